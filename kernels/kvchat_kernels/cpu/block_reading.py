"""Reads blocks as GGUF files store them into block weights, each byte once.

The parts are those that `block_weights` (`linear/gguf_blocks.py`) makes, bit by bit, and their
levels interleaved if asked for. `linear/file_formats.py` has a table of each format.
"""

from collections.abc import Iterator, Sequence

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import alternating, each_group
from kvchat_kernels.cpu.code import I8, I16, I32, Code, Value, kernel
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS, PLANES, STEP_COLUMNS
from kvchat_kernels.linear.file_formats import (
    FILE_FORMATS,
    Bytes,
    FileFormat,
    Halves,
    Plane,
    Whole,
)

_BLOCKS_PER_STEP = STEP_COLUMNS // COLUMNS
_HALF_BYTES = 2  # of a float16
_FOUR = ir.VectorType(I8, 4)
_SIGN = -(1 << 15)  # of a float16
# Below so many numbers side by side each is shifted by itself.
_FEWEST = 4


class ReadingTask(Task):
    """Rows to read: sizes are in rows and blocks of 32 columns.

    stored                               rows as the file has them, one behind the other
    levels, scales, minimums, steps      written, as BlockWeights has them
    chunk                                rows of a unit
    """

    num_out: int
    num_blocks: int
    stored: Memory
    levels: Memory
    scales: Memory
    minimums: Memory | None = None
    steps: Memory | None = None
    chunk: int


@kernel("block reading", ReadingTask)
def block_reading_kernel(code: Code, name: str, word: int | None) -> None:
    """Write the kernel that reads blocks of a format, such as Q4_K. Units: chunks of rows.

    `word`: how many bytes of a block stay together where blocks alternate; None: they do not.
    """
    form = FILE_FORMATS[name]
    count = code.task.num_blocks
    start, end = code.chunk(code.task.num_out)
    with code.loop(start, end) as row:
        for index, size in _groups(code, count, form):
            first = row * count + index
            blocks = []
            for number in range(0, size, form.columns // COLUMNS):
                at = (
                    code.task.stored
                    + (first + number) // (form.columns // COLUMNS) * form.num_bytes
                )
                _store_factors(code, form, at, first + number)
                blocks += _levels_of(code, form, at)
            _store_levels(code, blocks, first, form.bits, word)


def _groups(code: Code, count: Value, form: FileFormat) -> Iterator[tuple[Value, int]]:
    """Write loops over the groups of a row, which begin and end where stored blocks do."""
    if form.columns < STEP_COLUMNS:
        for index, size in each_group(code, count):
            if size >= form.columns // COLUMNS:  # no row ends within a stored block
                yield index, size
        return
    with code.loop(0, count, form.columns // COLUMNS) as index:
        yield index, form.columns // COLUMNS


def _levels_of(code: Code, form: FileFormat, at: Value) -> list[Value]:
    """Return the levels of a stored block, a vector of bytes for each 32 columns."""
    return [
        numbers(code, at, form.planes, first, COLUMNS) for first in range(0, form.columns, COLUMNS)
    ]


def numbers(code: Code, at: Value, planes: Sequence[Plane], first: int, count: int) -> Value:
    """Return the numbers from `first` on of a stored block, a vector of `count` bytes."""
    total, low = None, 0
    for plane in planes:
        part = _bits_of(code, at, plane, first, count)
        part = part << low if low else part
        total = part if total is None else total + part
        low += plane.bits
    assert total is not None
    return total


def _bits_of(code: Code, at: Value, plane: Plane, first: int, count: int) -> Value:
    """Return the bits that a plane has of some numbers."""
    places, shifts = zip(*(plane.place(first + i) for i in range(count)), strict=True)
    is_even = len(set(shifts)) == 1
    if not is_even and plane.run >= _FEWEST:
        half = count // 2
        parts = (_bits_of(code, at, plane, first + start, half) for start in (0, half))
        return code.joined(*parts)
    start, width = min(places), max(places) + 1 - min(places)
    if plane.bits == plane.run == 1 and count == COLUMNS and shifts[0] == 0:
        flags = code.as_bits(code.load(at, start, I32), ir.VectorType(ir.IntType(1), COLUMNS))
        return code.convert("zext", flags, ir.VectorType(I8, COLUMNS))
    loaded = code.load(at, start, ir.VectorType(I8, width))
    lanes = [place - start for place in places]
    if lanes != list(range(width)):
        loaded = code.picked(loaded, lanes)
    if is_even:
        loaded = loaded >> shifts[0] if shifts[0] else loaded
    else:
        loaded = loaded >> Value(code, ir.Constant(loaded.type, list(shifts)))
    return loaded if plane.bits == 8 else loaded & ((1 << plane.bits) - 1)


def _store_levels(
    code: Code, blocks: Sequence[Value], first: Value, bits: int, word: int | None
) -> None:
    """Store the levels of neighbouring blocks in planes, whose words alternate if one is given."""
    levels, block_bytes = code.task.levels, COLUMNS * bits // 8
    planes = [_in_planes(code, block, bits) for block in blocks]
    start = 0
    for parts in zip(*planes, strict=True):
        num_bytes = parts[0].type.count
        if word is None:
            for number, part in enumerate(parts):
                code.store(part, levels, (first + number) * block_bytes + start)
        else:
            kind = ir.VectorType(ir.IntType(8 * word), num_bytes // word)
            words = [code.as_bits(part, kind) for part in parts]
            at = first * block_bytes + start * len(blocks)
            code.store(alternating(code, words), levels, at)
        start += num_bytes


def _in_planes(code: Code, levels: Value, bits: int) -> list[Value]:
    """Return the bytes of the planes of a block's levels, as `in_planes` has them."""
    parts, low = [], 0
    for plane in PLANES[bits]:
        width, total = 4 * plane, None
        of_plane = levels >> low if low else levels
        of_plane = of_plane if low + plane == bits else of_plane & ((1 << plane) - 1)
        for field in range(8 // plane):
            part = code.picked(of_plane, range(field * width, (field + 1) * width))
            part = part << (field * plane) if field else part
            total = part if total is None else total + part
        assert total is not None
        parts.append(total)
        low += plane
    return parts


# Factors


def _store_factors(code: Code, form: FileFormat, at: Value, first: Value) -> None:
    """Store scales, minimums and steps of a stored block, whose first 32 columns are `first`."""
    task, scales = code.task, form.scales
    if isinstance(scales, Halves):
        block = first // (form.block // COLUMNS) if form.block > COLUMNS else first
        _copy_half(code, at, scales.scale, task.scales, block)
        if scales.minimum is not None:
            _copy_half(code, at, scales.minimum, task.minimums, first)
        return
    step = first // _BLOCKS_PER_STEP
    if isinstance(scales, Bytes):
        stored = numbers(code, at, scales.planes, 0, form.columns // form.block)
        code.store(stored, task.scales, first * COLUMNS // form.block)
        if scales.steps:
            _store_steps(code, at, scales.steps, step)
    elif isinstance(scales, Whole):
        whole = numbers(code, at, scales.planes, 0, form.columns // form.block)
        whole = whole - scales.zero if scales.zero else whole
        code.store(whole, task.scales, first * (COLUMNS // form.block))
        _copy_half(code, at, scales.step, task.steps, step)
    else:
        _store_head(code, at, first, step)


def _copy_half(code: Code, at: Value, offset: int, to: Value, index: Value) -> None:
    """Copy the 16 bits of a number to those of a block."""
    code.store(code.load(at, offset, I16), to, index * _HALF_BYTES)


def _store_head(code: Code, at: Value, first: Value, step: Value) -> None:
    """Store 8 scales and 8 minimums of 6 bits, and the two steps; minimums are subtracted."""
    low, other, high = (code.load(at, start, _FOUR) for start in (4, 8, 12))
    scales = code.joined(low & 63, (high & 15) + ((low >> 6) << 4))
    minimums = code.joined(other & 63, (high >> 4) + ((other >> 6) << 4))
    code.store(scales, code.task.scales, first)
    code.store(minimums, code.task.minimums, first)
    _store_steps(code, at, (0, _HALF_BYTES), step)


def _store_steps(code: Code, at: Value, places: Sequence[int], step: Value) -> None:
    """Store the steps of scales and of minimums."""
    to, steps = step * (2 * _HALF_BYTES), code.task.steps
    code.store(code.load(at, places[0], I16), steps, to)
    code.store(code.load(at, places[1], I16) + _SIGN, steps, to + _HALF_BYTES)
