"""Reads blocks as GGUF files store them into block weights, each byte once.

The parts are those that `block_weights` (`linear/gguf_blocks.py`) makes, bit by bit, and their
levels interleaved if asked for. The formats are ggml's (ggml-common.h).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import alternating, each_group
from kvchat_kernels.cpu.code import I8, I16, I32, Code, Value, kernel
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS, STEP_COLUMNS

_HALF = COLUMNS // 2
_BLOCKS_PER_STEP = STEP_COLUMNS // COLUMNS
_HALF_BYTES = 2  # of a float16
# Steps of scales and of minimums, and 6 bits for each scale and minimum of 8 blocks.
_HEAD_BYTES = 16
_BYTES, _ALL_BYTES = ir.VectorType(I8, _HALF), ir.VectorType(I8, COLUMNS)
_FOUR, _FLAGS = ir.VectorType(I8, 4), ir.VectorType(ir.IntType(1), COLUMNS)
_SIGN = -(1 << 15)  # of a float16


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
def block_reading_kernel(code: Code, name: str, is_interleaved: bool) -> None:
    """Write the kernel that reads blocks of a format, such as Q4_K. Units: chunks of rows."""
    form = _FORMS[name]
    count = code.task.num_blocks
    start, end = code.chunk(code.task.num_out)
    with code.loop(start, end) as row:
        for index, size in _groups(code, count, form):
            first = row * count + index
            words = form.read(code, first, size)
            _store_levels(code, words, first, form.bits, is_interleaved)


def _groups(code: Code, count: Value, form: "_Form") -> Iterator[tuple[Value, int]]:
    """Write loops over the groups of a row; blocks that share a step come all at once."""
    if form.blocks == 1:
        yield from each_group(code, count)
        return
    with code.loop(0, count, form.blocks) as index:
        yield index, form.blocks


def _store_levels(
    code: Code, blocks: Sequence[Value], first: Value, bits: int, is_interleaved: bool
) -> None:
    """Store the bytes of neighbouring blocks, whose words alternate if they are interleaved."""
    levels, block_bytes = code.task.levels, COLUMNS * bits // 8
    if is_interleaved:
        word = I32 if bits == 4 else I16
        kind = ir.VectorType(word, block_bytes * 8 // word.width)
        words = [code.as_bits(block, kind) for block in blocks]
        code.store(alternating(code, words), levels, first * block_bytes)
        return
    for number, block in enumerate(blocks):
        code.store(block, levels, (first + number) * block_bytes)


# The formats: each stores scales, minimums and steps, and returns the bytes of the levels: 16 of
# two levels each, or 32.

_Read = Callable[[Code, Value, int], list[Value]]


@dataclass(frozen=True, slots=True)
class _Form:
    """A format: the blocks that it stores together, and what reads so many or a group of them."""

    bits: int
    blocks: int
    read: _Read


def _q8_0(code: Code, first: Value, size: int) -> list[Value]:
    def read(at: Value, index: Value) -> Value:
        _copy_half(code, at, 0, code.task.scales, index)
        return code.load(at, 2, _ALL_BYTES)

    return _each(code, first, size, 34, read)


def _q4_0(code: Code, first: Value, size: int) -> list[Value]:
    def read(at: Value, index: Value) -> Value:
        _copy_half(code, at, 0, code.task.scales, index)
        return code.load(at, 2, _BYTES)

    return _each(code, first, size, 18, read)


def _q4_1(code: Code, first: Value, size: int) -> list[Value]:
    def read(at: Value, index: Value) -> Value:
        _copy_half(code, at, 0, code.task.scales, index)
        _copy_half(code, at, 2, code.task.minimums, index)
        return code.load(at, 4, _BYTES)

    return _each(code, first, size, 20, read)


def _q5_0(code: Code, first: Value, size: int) -> list[Value]:
    def read(at: Value, index: Value) -> Value:
        _copy_half(code, at, 0, code.task.scales, index)
        return _with_fifth_bits(code, at, 2) - 16

    return _each(code, first, size, 22, read)


def _q5_1(code: Code, first: Value, size: int) -> list[Value]:
    def read(at: Value, index: Value) -> Value:
        _copy_half(code, at, 0, code.task.scales, index)
        _copy_half(code, at, 2, code.task.minimums, index)
        return _with_fifth_bits(code, at, 4)

    return _each(code, first, size, 24, read)


def _each(
    code: Code, first: Value, size: int, num_bytes: int, read: Callable[[Value, Value], Value]
) -> list[Value]:
    """Read blocks that are stored alone, in `num_bytes` each."""
    stored = code.task.stored
    return [read(stored + (first + number) * num_bytes, first + number) for number in range(size)]


def _copy_half(code: Code, at: Value, offset: int, to: Value, index: Value) -> None:
    """Copy the 16 bits of a number to those of a block."""
    code.store(code.load(at, offset, I16), to, index * _HALF_BYTES)


def _with_fifth_bits(code: Code, at: Value, offset: int) -> Value:
    """Return levels of 5 bits: a number of 32 bits has the fifth ones, 16 bytes the others."""
    nibbles = code.load(at, offset + 4, _BYTES)
    levels = code.joined(nibbles & 15, nibbles >> 4)
    flags = code.as_bits(code.load(at, offset, I32), _FLAGS)
    return levels + (code.convert("zext", flags, _ALL_BYTES) << 4)


def _q4_k(code: Code, first: Value, size: int) -> list[Value]:
    """Blocks 0 and 1 are the low and the high bits of the first 32 bytes, and so on."""
    at, blocks = _stored_step(code, first, 144), []
    _read_head(code, at, first)
    for pair in range(size // 2):
        low, high = (code.load(at, _HEAD_BYTES + COLUMNS * pair + side, _BYTES) for side in (0, 16))
        blocks += [(low & 15) + (high << 4), (low >> 4) + (high & -16)]
    return blocks


def _q5_k(code: Code, first: Value, size: int) -> list[Value]:
    """Bit `n` of 32 bytes is the fifth one of block `n`."""
    at, blocks = _stored_step(code, first, 176), []
    _read_head(code, at, first)
    fifth = code.load(at, _HEAD_BYTES, _ALL_BYTES)
    for number in range(size):
        pair = code.load(at, _HEAD_BYTES + COLUMNS * (1 + number // 2), _ALL_BYTES)
        levels = pair >> 4 if number % 2 else pair & 15
        blocks.append(levels + (((fifth >> number) & 1) << 4))
    return blocks


def _read_head(code: Code, at: Value, first: Value) -> None:
    """Store 8 scales and 8 minimums of 6 bits, and the two steps; minimums are subtracted."""
    low, other, high = (code.load(at, start, _FOUR) for start in (4, 8, 12))
    scales = code.joined(low & 63, (high & 15) + ((low >> 6) << 4))
    minimums = code.joined(other & 63, (high >> 4) + ((other >> 6) << 4))
    code.store(scales, code.task.scales, first)
    code.store(minimums, code.task.minimums, first)
    place = first // _BLOCKS_PER_STEP * (2 * _HALF_BYTES)
    steps = code.task.steps
    code.store(code.load(at, 0, I16), steps, place)
    code.store(code.load(at, _HALF_BYTES, I16) + _SIGN, steps, place + _HALF_BYTES)


def _q6_k(code: Code, first: Value, size: int) -> list[Value]:
    """Two halves of 128 columns: 64 bytes of low bits and 32 of high bits for each."""
    at, blocks = _stored_step(code, first, 210), []
    code.store(code.load(at, 192, _BYTES), code.task.scales, first * 2)
    place = first // _BLOCKS_PER_STEP * _HALF_BYTES
    code.store(code.load(at, 208, I16), code.task.steps, place)
    for number in range(size):
        half, quarter = divmod(number, 4)
        pair = code.load(at, 64 * half + COLUMNS * (quarter % 2), _ALL_BYTES)
        low = pair >> 4 if quarter > 1 else pair & 15
        high = code.load(at, 128 + COLUMNS * half, _ALL_BYTES) >> (2 * quarter)
        blocks.append(low + ((high & 3) << 4) - 32)
    return blocks


def _stored_step(code: Code, first: Value, num_bytes: int) -> Value:
    """Return the address of the blocks that share a step, of which `first` is the first."""
    return code.task.stored + first // _BLOCKS_PER_STEP * num_bytes


_FORMS = {
    "Q8_0": _Form(8, 1, _q8_0),
    "Q4_0": _Form(4, 1, _q4_0),
    "Q4_1": _Form(4, 1, _q4_1),
    "Q5_0": _Form(8, 1, _q5_0),
    "Q5_1": _Form(8, 1, _q5_1),
    "Q4_K": _Form(4, _BLOCKS_PER_STEP, _q4_k),
    "Q5_K": _Form(8, _BLOCKS_PER_STEP, _q5_k),
    "Q6_K": _Form(8, _BLOCKS_PER_STEP, _q6_k),
}
