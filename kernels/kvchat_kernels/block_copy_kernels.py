"""The block copies as Triton kernels over a table of addresses, one launch for all tensors.

Shapes: W words of a part of a row. A word has WORD bytes. Groups of ALIGNED words are declared to
start at a multiple of ALIGNED * WORD bytes, so that the compiler can use 16-byte loads.
"""

import triton
import triton.language as tl


@triton.jit
def _copy_part(
    source, target, row_bytes, part, WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy part `part`, of BLOCK words, of a row between two addresses, given as int64."""
    word: tl.constexpr = tl.core.get_int_dtype(8 * WORD, True)
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(word)), WORD * ALIGNED)
    target_ptr = tl.multiple_of(target.to(tl.pointer_type(word)), WORD * ALIGNED)
    num_words = tl.multiple_of((row_bytes // WORD).to(tl.int32), ALIGNED)
    index = part * BLOCK + tl.arange(0, BLOCK)  # [W]
    inside = index < num_words
    words = tl.load(source_ptr + index, mask=inside, other=0)
    tl.store(target_ptr + index, words, mask=inside)


@triton.jit
def copy_kernel(
    table_ptr, sources_ptr, targets_ptr, WORD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (copy, tensor, part) copies BLOCK words of one tensor's row."""
    entry_ptr = table_ptr + 3 * tl.program_id(1)
    part = tl.program_id(2)
    address = tl.load(entry_ptr)
    row_bytes = tl.load(entry_ptr + 1)
    if part * BLOCK * WORD < row_bytes:
        source = address + tl.load(sources_ptr + tl.program_id(0)) * row_bytes
        target = address + tl.load(targets_ptr + tl.program_id(0)) * row_bytes
        _copy_part(source, target, row_bytes, part, WORD, ALIGNED, BLOCK)


@triton.jit
def image_kernel(
    table_ptr, blocks_ptr, images_ptr, image_bytes, IS_GATHER: tl.constexpr, WORD: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (image, tensor, part) copies BLOCK words of a row to its image, or back."""
    image = tl.program_id(0).to(tl.int64)
    entry_ptr = table_ptr + 3 * tl.program_id(1)
    part = tl.program_id(2)
    address = tl.load(entry_ptr)
    row_bytes = tl.load(entry_ptr + 1)
    start = tl.load(entry_ptr + 2)
    if part * BLOCK * WORD < row_bytes:
        in_pool = address + tl.load(blocks_ptr + image) * row_bytes
        in_image = images_ptr.to(tl.int64) + image * image_bytes + start
        if IS_GATHER:
            _copy_part(in_pool, in_image, row_bytes, part, WORD, ALIGNED, BLOCK)
        else:
            _copy_part(in_image, in_pool, row_bytes, part, WORD, ALIGNED, BLOCK)
