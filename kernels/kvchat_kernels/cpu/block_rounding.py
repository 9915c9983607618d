"""Rounds a float matrix to interleaved block weights of 8 or 4 bits while it is read once.

The numbers are those that `quantised` and `interleaved` (`linear/blocks.py`) make, bit by bit: it
divides where they divide. No more of the matrix than a block is there in float32.
"""

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import alternating, each_group
from kvchat_kernels.cpu.code import F16, F32, I8, I16, I32, Code, Value, constant, kernel
from kvchat_kernels.cpu.maths import Stored, load_stored
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS, LEAST_SCALE

_FLOATS, _INTS = ir.VectorType(F32, COLUMNS), ir.VectorType(I32, COLUMNS)
_FACTOR_BYTES = 2


class WeightRoundingTask(Task):
    """A matrix to round: sizes are in rows and blocks of 32 columns.

    floats                       the matrix, contiguous
    levels, scales, minimums     written, as BlockWeights has them
    chunk                        rows of a unit
    """

    num_out: int
    num_blocks: int
    floats: Memory
    levels: Memory
    scales: Memory
    minimums: Memory | None = None
    chunk: int


@kernel("weight rounding", WeightRoundingTask)
def weight_rounding_kernel(code: Code, bits: int, stored: Stored) -> None:
    """Write the kernel that rounds floats stored so to 8 or 4 bits. Units: chunks of rows."""
    rounded = _round_to_8 if bits == 8 else _round_to_4
    count = code.task.num_blocks
    start, end = code.chunk(code.task.num_out)
    with code.loop(start, end) as row:
        for index, size in each_group(code, count):
            first = row * count + index
            words = [rounded(code, first + number, stored) for number in range(size)]
            levels = code.task.levels
            code.store(alternating(code, words), levels, first * (COLUMNS * bits // 8))


def _round_to_8(code: Code, index: Value, stored: Stored) -> Value:
    """Store the scale of a block; return its levels as words that alternate with other blocks'."""
    values = load_stored(
        code, code.task.floats, index * (COLUMNS * stored.num_bytes), stored, COLUMNS
    )
    largest = _extreme(code, "fmax", code.call("llvm.fabs.v32f32", _FLOATS, values))
    scale = _stored_scale(code, largest / 127.0, values, index)
    levels = _levels(code, values, scale, (-127.0, 127.0))
    return code.as_bits(_narrow(code, levels), ir.VectorType(I16, COLUMNS // 2))


def _round_to_4(code: Code, index: Value, stored: Stored) -> Value:
    """Do the same, with a minimum."""
    values = load_stored(
        code, code.task.floats, index * (COLUMNS * stored.num_bytes), stored, COLUMNS
    )
    low, high = _extreme(code, "fmin", values), _extreme(code, "fmax", values)
    scale = _stored_scale(code, (high - low) / 15.0, values, index)
    minimum = _stored_half(code, low, index, code.task.minimums)
    levels = _levels(code, values - code.spread(minimum, COLUMNS), scale, (0.0, 15.0))
    first, second = code.halves(levels)
    return code.as_bits(_narrow(code, first + (second << 4)), ir.VectorType(I32, 4))


def _extreme(code: Code, side: str, values: Value) -> Value:
    """Return the least ("fmin") or the largest of 32 floats; any number if one is NaN."""
    # nnan: a tree of comparisons
    return code.call(f"llvm.vector.reduce.{side}.v32f32", F32, values, fastmath=("nnan", "nsz"))


def _stored_scale(code: Code, scale: Value, values: Value, index: Value) -> Value:
    """Store a block's scale, NaN if one of its values is, so that a damaged model is noticed."""
    scale = code.greatest(scale, code.single(LEAST_SCALE))
    builder = code.builder
    odd = Value(code, builder.fcmp_unordered("uno", values.raw, values.raw))
    is_odd = code.call("llvm.vector.reduce.or.v32i1", ir.IntType(1), odd)
    scale = code.select(is_odd, Value(code, constant(float("nan"), F32)), scale)
    return _stored_half(code, scale, index, code.task.scales)


def _stored_half(code: Code, value: Value, index: Value, to: Value) -> Value:
    """Store a number of a block at `to` in 16 bits, and return what these hold."""
    half = code.convert("fptrunc", value, F16)
    code.store(half, to, index * _FACTOR_BYTES)
    return code.convert("fpext", half, F32)


def _levels(code: Code, values: Value, scale: Value, limits: tuple[float, float]) -> Value:
    """Return values divided by a scale as whole numbers within limits, 32 bits each."""
    levels = code.call("llvm.rint.v32f32", _FLOATS, values / code.spread(scale, COLUMNS))
    levels = code.least(code.greatest(levels, limits[0]), limits[1])
    return code.convert("fptosi", levels, _INTS)


def _narrow(code: Code, levels: Value) -> Value:
    return code.convert("trunc", levels, ir.VectorType(I8, levels.type.count))
