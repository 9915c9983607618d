"""WindowedKvPool: images of blocks whose layers with a window have KV, and of others."""

import pytest
import torch

from kvchat.cache.kv_pool import CodedFormat, KvFormat, KvGeometry, LayerGeometry, PlainFormat
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat_kernels.kv_code import INT8

FORMATS = [PlainFormat(), CodedFormat(INT8)]


def new_pool(
    kv_format: KvFormat, num_blocks: int = 6, num_window_blocks: int = 4
) -> WindowedKvPool:
    layers = (LayerGeometry(2, 16, 16), LayerGeometry(1, 32, 16), LayerGeometry(2, 16, 16))
    geometry = KvGeometry(layers, torch.bfloat16, 4, kv_format)
    return WindowedKvPool(geometry, Windows(frozenset({0, 2}), 5), num_blocks, num_window_blocks)


def fill(pool: WindowedKvPool) -> None:
    for number, layer in enumerate(pool.layers):
        for tensor in layer.tensors:
            for block in range(1, len(tensor)):
                tensor[block] = 10 * number + block


@pytest.mark.parametrize("kv_format", FORMATS, ids=["plain", "int8"])
def test_images_come_back_where_they_have_windows_and_where_not(kv_format: KvFormat) -> None:
    pool, other = new_pool(kv_format), new_pool(kv_format)
    pool.blocks.give([2, 4])
    fill(pool)

    images = pool.stage([1, 2, 4])

    assert pool.has_windows(images).tolist() == [False, True, True]
    other.blocks.give([3, 5])  # block 5 has room that the image does not fill
    other.unstage([1, 3, 5], images[[0, 1, 1]])
    assert other.has_windows(other.stage([1, 3, 5])).tolist() == [False, True, True]
    assert torch.equal(other.stage([1, 3, 5]), images[[0, 1, 1]])
    assert other.num_finite([1, 3]) == 2, "what is not there is not a NaN"


def test_eight_bits_of_minus_one_are_a_window() -> None:
    """All bytes of such keys are those that stand for an absent window; those of scales are not."""
    pool = new_pool(CodedFormat(INT8))
    pool.blocks.give([1])
    for layer in pool.layers:
        layer.tensors[0][1] = -1

    assert pool.has_windows(pool.stage([1])).tolist() == [True]


def test_a_copied_or_zeroed_block_leaves_the_window_of_another_alone() -> None:
    pool = new_pool(PlainFormat())
    pool.blocks.give([2, 4])
    fill(pool)
    before = pool.stage([4])

    pool.copy_block(4, 1)
    pool.zero(1, 0)
    pool.copy_block(1, 3)
    assert torch.equal(pool.stage([4]), before)
    pool.copy_block(4, 2)
    assert torch.equal(pool.stage([2]), before)
    assert pool.kv_error(2, 4, 0)[:, 0].tolist() == [0.0] * 6
    assert len(pool.kv_error(1, 4, 0)) == 2, "only the layer without a window is compared"
