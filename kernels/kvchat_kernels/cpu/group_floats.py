"""Makes floats of levels in blocks and the factors of stored groups, in any order of columns.

The numbers are those of the plain form (`kvchat/model/packed/unpacking.py`): float32, each product
and sum rounded by itself, and then to what is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from kvchat_kernels.cpu.code import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Code,
    Value,
    constant,
    kernel,
)
from kvchat_kernels.cpu.maths import Stored
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS

_LANES = COLUMNS // 2
_BYTES, _INTS = ir.VectorType(I8, _LANES), ir.VectorType(I32, _LANES)
_FLOATS, _SHORTS = ir.VectorType(F32, _LANES), ir.VectorType(I16, _LANES)
_NAN = 0x7FC0  # of a bfloat16


class FloatsTask(Task):
    """Floats to make: sizes are in rows, groups and blocks of 32 columns.

    levels       as BlockWeights has them, not interleaved
    scales       float32 [out, groups]; `second`, zeros or offsets, as well
    group_of     int32 [in]: the group of each column, below `num_groups`
    out          written, [out, in]
    chunk        rows of a unit
    """

    num_out: int
    num_blocks: int
    num_groups: int
    levels: Memory
    scales: Memory
    second: Memory
    group_of: Memory
    out: Memory
    chunk: int


@dataclass(frozen=True, slots=True)
class FloatForm:
    """What is read and written. `is_ordered`: all columns of a block are of one group."""

    bits: int
    has_offsets: bool
    is_ordered: bool
    out: Stored


@kernel("group floats", FloatsTask)
def group_floats_kernel(code: Code, form: FloatForm) -> None:
    """Write the kernel that writes floats. Units: chunks of rows."""
    count = code.task.num_blocks
    start, end = code.chunk(code.task.num_out)
    with code.loop(start, end) as row, code.loop(0, count) as index:
        for half, levels in enumerate(_levels(code, form.bits, row * count + index)):
            column = index * COLUMNS + half * _LANES
            scales, second = _factors(code, form, row, column)
            values = code.convert("uitofp", levels, _FLOATS)
            if form.has_offsets:  # not one instruction for both, which would round once
                values = values * scales
                values = Value(code, code.builder.fadd(values.raw, second.raw))
            else:
                values = (values - second) * scales
            place = (row * count * COLUMNS + column) * form.out.num_bytes
            code.store(_rounded(code, values, form.out), code.task.out, place)


def _levels(code: Code, bits: int, block: Value) -> Sequence[Value]:
    """Load the levels of a block: two vectors of 16 x 32 bits, from 0 on."""
    address = code.task.levels
    if bits == 4:
        packed = code.load(address, block * (COLUMNS // 2), _BYTES)
        halves = [packed & 15, packed >> 4]
    else:
        starts = (0, _LANES)
        halves = [code.load(address, block * COLUMNS + at, _BYTES) ^ -128 for at in starts]
    return [code.convert("zext", half, _INTS) for half in halves]


def _factors(code: Code, form: FloatForm, row: Value, column: Value) -> list[Value]:
    """Load the scales of 16 columns, and their zeros or offsets."""
    first = row * code.task.num_groups
    places = [
        first + code.convert("zext", code.load(code.task.group_of, at * 4, I32), I64)
        for at in ([column] if form.is_ordered else [column + lane for lane in range(_LANES)])
    ]
    both = []
    for factors in (code.task.scales, code.task.second):
        values = [code.load(factors, place * 4, F32) for place in places]
        single = len(values) == 1
        both.append(code.spread(values[0], _LANES) if single else code.gathered(values))
    return both


def _rounded(code: Code, values: Value, stored: Stored) -> Value:
    """Round 16 floats to what is stored, ties to even; NaN stays one."""
    if stored is Stored.FLOAT:
        return values
    if stored is Stored.HALF:
        return code.convert("fptrunc", values, ir.VectorType(F16, _LANES))
    bits = code.as_bits(values, _INTS)
    short = code.convert("trunc", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, _SHORTS)
    is_odd = Value(code, code.builder.fcmp_unordered("uno", values.raw, values.raw))
    return code.select(is_odd, Value(code, constant(_NAN, _SHORTS)), short)
