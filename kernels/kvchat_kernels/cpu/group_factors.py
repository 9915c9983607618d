"""Makes scales and minimums of blocks of those of stored groups of columns, float32 or float16.

A first kernel looks whether float16 holds all of them, and whether zeros are all the middle; a
second one writes what its answer asks for. The numbers are those of the plain form
(`kvchat/model/packed/unpacking.py`), bit by bit: float32, each product rounded by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvchat_kernels.cpu.code import F16, F32, I32, I64, Code, Value, kernel
from kvchat_kernels.cpu.maths import Stored, load_stored
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import CENTRE
from kvchat_kernels.linear.stored_groups import AWQ_ROWS, WORD_BITS, WordOrder

_WORD_BYTES = WORD_BITS // 8


class FactorsTask(Task):
    """Factors to read: sizes, and in bytes how far the next row and the next group are.

    blocks                    blocks of a group
    scale.., offset..         floats as the file has them
    zero..                    words of zeros; `zero_row` is from one word to the next
    zero_offset               what is added to a zero
    scales, minimums          written, as BlockWeights has them
    counts                    written, for each unit 3 numbers (int64): how many zeros are not the
                              middle, and how many scales and minimums float16 does not hold
    chunk                     rows of a unit
    """

    num_out: int
    num_groups: int
    blocks: int
    scale: Memory
    scale_row: int
    scale_group: int
    offset: Memory | None = None
    offset_row: int = 0
    offset_group: int = 0
    zero: Memory | None = None
    zero_row: int = 0
    zero_group: int = 0
    zero_offset: int
    scales: Memory | None = None
    minimums: Memory | None = None
    counts: Memory | None = None
    chunk: int


NUM_COUNTS = 3


@dataclass(frozen=True, slots=True)
class FactorForm:
    """How a file stores the factors of groups. `offsets`: None for none; they exclude zeros."""

    order: WordOrder
    bits: int
    scales: Stored
    has_zeros: bool
    offsets: Stored | None

    @property
    def centre(self) -> int:
        """The level that stands for 0 in blocks without minimums."""
        return CENTRE if self.bits == 4 else 128


@kernel("group factors looked at", FactorsTask)
def looking_kernel(code: Code, form: FactorForm) -> None:
    """Write the kernel that writes what it finds of each unit. Units: chunks of rows."""
    counts = [code.variable(code.whole(0)) for _ in range(NUM_COUNTS)]

    def look(row: Value, group: Value) -> None:
        scale, zero = _scale(code, form, row, group), _zero(code, form, row, group)
        minimum = _minimum(code, form, scale, zero, row, group)
        is_odd = Value(code, code.builder.icmp_signed("!=", zero.raw, code.whole(form.centre).raw))
        facts = (is_odd, _is_rounded(code, scale), _is_rounded(code, minimum))
        for count, fact in zip(counts, facts, strict=True):
            count.set(count.get() + code.convert("zext", fact, I64))

    _each(code, look)
    for place, count in enumerate(counts):
        code.store(count.get(), code.task.counts, code.unit * (8 * NUM_COUNTS) + 8 * place)


@kernel("group factors", FactorsTask)
def factors_kernel(code: Code, form: FactorForm, has_minimums: bool, is_half: bool) -> None:
    """Write the kernel that writes scales, and minimums if asked for. Units: chunks of rows."""

    def write(row: Value, group: Value) -> None:
        scale = _scale(code, form, row, group)
        parts = [(scale, code.task.scales)]
        if has_minimums:
            zero = _zero(code, form, row, group)
            minimum = _minimum(code, form, scale, zero, row, group)
            parts.append((minimum, code.task.minimums))
        num_blocks = code.task.blocks
        first = (row * code.task.num_groups + group) * num_blocks
        for value, to in parts:
            stored = code.convert("fptrunc", value, F16) if is_half else value
            with code.loop(first, first + num_blocks) as block:
                code.store(stored, to, block * (2 if is_half else 4))

    _each(code, write)


@kernel("plain group factors", FactorsTask)
def plain_factors_kernel(code: Code, form: FactorForm) -> None:
    """Write the kernel that writes what a file stores, float32 [out, groups].

    `minimums` are its offsets, or its zeros. Units: chunks of rows.
    """

    def write(row: Value, group: Value) -> None:
        if form.offsets is None:
            second = code.convert("sitofp", _zero(code, form, row, group), F32)
        else:
            second = _offset(code, form.offsets, row, group)
        place = (row * code.task.num_groups + group) * 4
        code.store(_scale(code, form, row, group), code.task.scales, place)
        code.store(second, code.task.minimums, place)

    _each(code, write)


def _each(code: Code, body: Callable[[Value, Value], None]) -> None:
    """Write loops over the groups and the rows of a unit: rows may lie side by side."""
    start, end = code.chunk(code.task.num_out)
    with code.loop(0, code.task.num_groups) as group, code.loop(start, end) as row:
        body(row, group)


def _scale(code: Code, form: FactorForm, row: Value, group: Value) -> Value:
    offset = row * code.task.scale_row + group * code.task.scale_group
    return load_stored(code, code.task.scale, offset, form.scales)


def _zero(code: Code, form: FactorForm, row: Value, group: Value) -> Value:
    """Return the zero of a group as a whole number; the middle, where none are stored."""
    if not form.has_zeros:
        return code.whole(form.centre)
    per_word = WORD_BITS // form.bits
    offset = row // per_word * code.task.zero_row + group * code.task.zero_group
    word = code.convert("zext", code.load(code.task.zero, offset, I32), I64)
    place = row % per_word
    if form.order is WordOrder.AWQ:  # of AWQ_ROWS the place
        place = place // 2 + place % 2 * (len(AWQ_ROWS) // 2)
    level = Value(code, code.builder.lshr(word.raw, (place * form.bits).raw))
    return (level & (2**form.bits - 1)) + code.task.zero_offset


def _minimum(
    code: Code, form: FactorForm, scale: Value, zero: Value, row: Value, group: Value
) -> Value:
    """Return what the level 0 stands for, or the signed level 0 of 8 bits."""
    if form.offsets is None:
        whole = zero if form.bits == 4 else code.whole(form.centre) - zero
        factor = code.convert("sitofp", whole, F32)
        # -0.0 where a zero is 0, as the plain form has it.
        return scale * (Value(code, code.builder.fneg(factor.raw)) if form.bits == 4 else factor)
    offset = _offset(code, form.offsets, row, group)
    centre = scale * float(form.centre) if form.bits == 8 else code.single(0.0)
    return Value(code, code.builder.fadd(offset.raw, centre.raw))  # each is rounded by itself


def _offset(code: Code, stored: Stored, row: Value, group: Value) -> Value:
    place = row * code.task.offset_row + group * code.task.offset_group
    return load_stored(code, code.task.offset, place, stored)


def _is_rounded(code: Code, value: Value) -> Value:
    """Return whether float16 holds another number than this float32; it does for NaN."""
    half = code.convert("fpext", code.convert("fptrunc", value, F16), F32)
    return Value(code, code.builder.fcmp_unordered("!=", half.raw, value.raw))
