"""Copying whole blocks of all tensors at once: the reference is right, and the kernels equal it."""

import pytest
import torch

from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks
from support.interpreter import Interpreter
from support.kv_kernel_checks import check_block_copies

# Rows of one block and tensor; their bytes decide how wide a word is.
SHAPES = {
    "16 bytes": ((4, 2, 8), (4, 2, 16)),
    "8 bytes": ((1, 4), (3, 4)),
    "4 bytes": ((3, 1, 2), (5, 1, 2)),
    "2 bytes": ((1, 3), (1, 7), (1, 16)),
    "several parts": ((16, 3, 128), (16, 3, 20), (16, 1, 64)),
    "one tensor": ((5,),),
}


def test_copied_blocks_equal_their_sources_and_the_rest_is_untouched() -> None:
    tensors = [torch.randn(8, 4, 2, 3), torch.randn(8, 4, 2, 5)]
    before = [tensor.clone() for tensor in tensors]

    copy_blocks(PoolTensors(tensors), [1, 1, 6], [3, 5, 2])

    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[3, 5, 2]], old[[1, 1, 6]])
        assert torch.equal(tensor[[0, 1, 4, 6, 7]], old[[0, 1, 4, 6, 7]])


def test_an_image_is_a_blocks_rows_one_tensor_after_another() -> None:
    tensors = [torch.randn(6, 2, 3), torch.randn(6, 5).bfloat16()]
    pools = PoolTensors(tensors)
    images = torch.empty(2, pools.image_bytes, dtype=torch.uint8)

    gather_blocks(pools, [4, 2], images)

    for image, block in zip(images, (4, 2), strict=True):
        rows = [tensor[block].reshape(-1).view(torch.uint8) for tensor in tensors]
        assert torch.equal(image, torch.cat(rows))


def test_images_fill_other_blocks_and_only_those() -> None:
    tensors = [torch.randn(6, 2, 3), torch.randn(6, 5)]
    before = [tensor.clone() for tensor in tensors]
    pools = PoolTensors(tensors)
    images = torch.empty(2, pools.image_bytes, dtype=torch.uint8)
    gather_blocks(pools, [4, 2], images)

    scatter_blocks(pools, [0, 5], images)

    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[4, 1, 2, 3, 4, 2]])


def test_some_tensors_fill_their_part_of_an_image() -> None:
    tensors = [torch.randn(6, 2, 3), torch.randn(6, 5), torch.randn(6, 1)]
    whole = PoolTensors(tensors)
    images = torch.empty(2, whole.image_bytes, dtype=torch.uint8)
    gather_blocks(whole, [4, 2], images)
    starts = [start for _, start, _ in whole.columns()]
    found = torch.full_like(images, 9)

    for index in (2, 0, 1):
        [start] = starts[index : index + 1]
        gather_blocks(PoolTensors(tensors[index : index + 1], [start], 48), [4, 2], found)

    assert torch.equal(found, images)
    middle = PoolTensors(tensors[1:2], starts[1:2], 48)
    scatter_blocks(middle, [0], images[:1])
    assert torch.equal(tensors[1][0], tensors[1][4])
    assert not torch.equal(tensors[0][0], tensors[0][4])


def test_no_block_is_no_work() -> None:
    pools = PoolTensors([torch.randn(3, 4)])
    nothing = torch.empty(0, pools.image_bytes, dtype=torch.uint8)

    for impl in ("reference", "triton"):
        copy_blocks(pools, [], [], impl=impl)
        gather_blocks(pools, [], nothing, impl=impl)
        scatter_blocks(pools, [], nothing, impl=impl)


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_is_none_is_refused_before_anything_is_written(block: int) -> None:
    pools = PoolTensors([torch.randn(3, 4)])

    with pytest.raises(AssertionError, match=str(block)):
        copy_blocks(pools, [0], [block])


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_copy_what_the_twin_copies(interpreter: Interpreter, name: str) -> None:
    interpreter(check_block_copies, SHAPES[name])


@pytest.mark.parametrize(("name", "alignment"), [("16 bytes", 16), ("8 bytes", 8)])
def test_words_are_as_wide_as_rows_and_addresses_allow(name: str, alignment: int) -> None:
    pools = PoolTensors([torch.zeros(4, *shape).half() for shape in SHAPES[name]])

    assert pools.alignment == alignment
