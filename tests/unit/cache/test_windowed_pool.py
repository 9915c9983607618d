"""WindowedKvPool: images of blocks whose layers with a window have KV, and of others."""

import pytest
import torch

from kvchat.cache.device_copies import ImageCopies
from kvchat.cache.kv_pool import CodedFormat, KvFormat, KvGeometry, LayerGeometry, PlainFormat
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat_kernels.kv_code import INT8
from unit.cache.test_device_copies import FakeStream

CPU = torch.device("cpu")
FORMATS = [PlainFormat(), CodedFormat(INT8)]


def new_pool(
    kv_format: KvFormat,
    num_blocks: int = 6,
    num_window_blocks: int = 4,
    copies: ImageCopies | None = None,
) -> WindowedKvPool:
    layers = (LayerGeometry(2, 16, 16), LayerGeometry(1, 32, 16), LayerGeometry(2, 16, 16))
    geometry = KvGeometry(layers, torch.bfloat16, 4, kv_format)
    windows = Windows(frozenset({0, 2}), 5)
    return WindowedKvPool(geometry, windows, num_blocks, num_window_blocks, CPU, copies)


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


def test_images_cross_to_a_device_and_back_with_their_windows() -> None:
    """The blocks are overwritten at once: what leaves is what was there when it was exported."""
    image_bytes = new_pool(PlainFormat()).geometry.block_bytes
    copies = ImageCopies(FakeStream(), FakeStream(), image_bytes)
    pool = new_pool(PlainFormat(), copies=copies)
    pool.blocks.give([2, 4])
    fill(pool)
    pool.warm_up()
    expected = bytes(pool.gather([1, 2, 4]))

    leaving = pool.export([1, 2, 4])
    for block in (1, 2, 4):
        pool.zero(block, 0)
    assert leaving is not None
    image = bytearray(leaving.read())
    leaving.release()

    assert image == expected
    manager = WindowedCacheManager(pool, max_step_tokens=4)
    for block in (2, 4):
        pool.blocks.drop(block)
    ids = list(range(12))
    assert manager.adopt(ids, 0, image) == 3
    found = manager.export(ids, 0, 3)
    assert found is not None
    assert bytes(found.read()) == expected
    manager.check([])


@pytest.mark.parametrize("layers", [{0, 2}, {0, 1, 2}], ids=["mixed", "all"])
def test_pools_are_warmed_up_block_by_block_without_a_change(layers: set[int]) -> None:
    geometry = new_pool(PlainFormat()).geometry
    pool = WindowedKvPool(geometry, Windows(frozenset(layers), 5), 6, 4, CPU)
    fill(pool)
    before = [tensor.clone() for layer in pool.layers for tensor in layer.tensors]

    pool.warm_up()

    after = [tensor for layer in pool.layers for tensor in layer.tensors]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
