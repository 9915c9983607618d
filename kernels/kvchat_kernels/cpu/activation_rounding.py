"""Rounds rows of activations to whole numbers, for products with block weights.

Activations are rounded to whole numbers of 16 bits with a scale for each 32 columns: 2^-16 of the
block's largest value, which is below what bfloat16 keeps of it. Beside weights of 2 to 6 bits large
models have 8: the rounding of 4 bits is some 30 times as coarse, that of 6 bits some 4 times. In a
model of 135 M weights in Q4_1 that changed 2 % of the likeliest tokens (KL 0.0028 beside float32),
and 16 bits changed 0.2 % (KL 0.00004).
"""

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import each_group, row_bytes
from kvchat_kernels.cpu.code import F32, I8, I16, I32, Code, Value, constant, kernel
from kvchat_kernels.cpu.step import has_many
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, WORD, Rounding

# The least that a block's largest value counts as.
LEAST = 1e-30
# The bits of the low byte of a level in two.
_LOW_BITS = 8
_BLOCK_F, _BLOCK_I = ir.VectorType(F32, COLUMNS), ir.VectorType(I32, COLUMNS)


class RoundingTask(Task):
    """Rows to round: `floats` is float32 [rows, columns]; the others are as of `Rows`."""

    floats: Memory
    num_blocks: int
    x: Memory
    x_scales: Memory
    x_sums: Memory
    x_starts: Memory


@kernel("rounding", RoundingTask)
def rounding_kernel(code: Code, rounding: Rounding, many_are_short: bool) -> None:
    """Write the kernel that rounds activations. Units: rows.

    Blocks alternate, as those of interleaved weights do. Many rows are stored as 16 bits where
    `many_are_short`; their scales and sums are the same.
    """
    if not many_are_short or rounding is Rounding.SHORT:
        write_rounding(code, rounding)
        return
    are_many = has_many(code)
    with code.when(are_many ^ 1):
        write_rounding(code, rounding)
    with code.when(are_many):
        write_rounding(code, rounding, Rounding.SHORT)


def write_rounding(code: Code, rounding: Rounding, stored: Rounding | None = None) -> None:
    """Write: each block of 32 values of a row as levels, with its scale and its sum.

    Levels lie as `stored` says, if not as `rounding` does.
    """
    count, stored = code.task.num_blocks, stored or rounding
    for index, size in each_group(code, count):
        for number in range(size):
            levels = round_block(code, code.unit * count + (index + number), rounding)
            row = code.unit * count * row_bytes(COLUMNS, stored)
            block_bytes = row_bytes(COLUMNS, stored) // stored.num_parts
            for part, numbers in enumerate(_parts_of(code, levels, stored)):
                start = row + (count * part + index) * block_bytes
                _store_alternating(code, numbers, start, number, size, stored)


def _parts_of(code: Code, levels: Value, rounding: Rounding) -> list[Value]:
    """Return levels as they are, or their high and low bytes, in 32 bits each."""
    if rounding.num_parts == 1:
        return [levels]
    shift = constant(_LOW_BITS, levels.type)
    high = Value(code, code.builder.ashr((levels + (1 << (_LOW_BITS - 1))).raw, shift))
    return [high, levels - (high << _LOW_BITS)]


def round_block(code: Code, index: Value, rounding: Rounding) -> Value:
    """Write: store the scale and the sum of a block. Returns its levels, 32 x 32 bits."""
    values = code.load(code.task.floats, index * (4 * COLUMNS), _BLOCK_F)
    magnitudes = code.call("llvm.fabs.v32f32", _BLOCK_F, values)
    # nnan: a tree of comparisons
    name = "llvm.vector.reduce.fmax.v32f32"
    largest = code.call(name, F32, magnitudes, fastmath=("nnan", "nsz"))
    largest = code.greatest(largest, code.single(LEAST))
    inverse = code.spread(code.single(rounding.most) / largest, COLUMNS)
    rounded = code.call("llvm.rint.v32f32", _BLOCK_F, values * inverse)
    levels = code.convert("fptosi", rounded, _BLOCK_I)
    scale = largest / rounding.most
    code.store(scale, code.task.x_scales, index * 4)
    halves = [code.call("llvm.vector.reduce.add.v16i32", I32, half) for half in code.halves(levels)]
    total = halves[0] + halves[1]
    code.store(code.convert("sitofp", total, F32) * scale, code.task.x_sums, index * 4)
    if rounding.has_sums_of_halves:
        for number, half in enumerate(halves):
            code.store(half, code.task.x_starts, index * 8 + 4 * number)
    else:
        code.store(total * -CENTRE, code.task.x_starts, index * 4)
    return levels


def _store_alternating(
    code: Code, levels: Value, start: Value, number: int, size: int, rounding: Rounding
) -> None:
    """Store the block `number` of a group, which is at `start`."""
    stored = I16 if rounding is Rounding.SHORT else I8
    narrow = code.convert("trunc", levels, ir.VectorType(stored, COLUMNS))
    num_words = COLUMNS // rounding.word
    words = code.as_bits(narrow, ir.VectorType(I32, num_words))
    for place in range(num_words):
        offset = start + WORD * (place * size + number)
        code.store(code.lane(words, place), code.task.x, offset)
