"""Normalises and rotates the heads of Q and K, and writes K and V to their slots. A unit is a row.

Rotation is by halves, as GPT-NeoX and Llama have it: of the first `rotated` dimensions of a head,
those of the first half turn with those of the second. Or neighbours turn with each other, as GLM,
ERNIE and Cohere have it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import add

from kvchat_kernels.cpu.code import (
    F32,
    F32S,
    I16,
    I32,
    I32S,
    I64,
    LANES,
    Code,
    Value,
    kernel,
)
from kvchat_kernels.cpu.maths import (
    I8S,
    Stored,
    load_floats,
    load_floats_of_group,
    store_floats,
    turned,
    write_turned,
)
from kvchat_kernels.cpu.norms import write_norm
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.kv_code import (
    LEAST,
    SCALE_BYTES,
    STEPS,
    UNITS,
    Form,
    KvCode,
    NumberCode,
    group_size,
)

# A scale above this is not finite. The bits of infinity, below those of every NaN.
_FINITE = 3.3e38
_INFINITE_BITS = 0x7F800000


class RotationTask(Task):
    """`qkv` is float32: rows of Q, K and V side by side, `qkv_stride` bytes each.

    cosines, sines            float32 [rows, rotated / 2]
    keys, values              the pools, [slots, KV heads, dim]
    query_norm, key_norm      weights, float32 [dim], or [heads * dim] for a norm of all heads
    epsilon                   of all norms
    key_scales, value_scales  bfloat16 [slots, KV heads, dim / group], where pools have a code
    query_factors             float32 [rows], what Q is multiplied with after it is rotated
    """

    qkv: Memory
    qkv_stride: int
    keys: Memory
    values: Memory
    cosines: Memory | None = None
    sines: Memory | None = None
    query_norm: Memory | None = None
    key_norm: Memory | None = None
    epsilon: float = 0.0
    key_scales: Memory | None = None
    value_scales: Memory | None = None
    query_factors: Memory | None = None


class HeadNorm(StrEnum):
    """Which parts of Q and K are normalised together."""

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all heads"


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer. Dims are multiples of 8, `rotated` of 2; 0 rotates nothing.

    Pools hold floats, as `stored`, or numbers of a code, whose groups are powers of two from 8 on.

    turns_neighbours   dimensions 2i and 2i + 1 turn by the angle i
    norms_last         heads are normalised after they are rotated
    norms_value        heads of V are normalised too, without weights
    writes_kv          false where a layer attends to the KV of another one: rows are of Q alone
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotated: int
    norm: HeadNorm
    stored: Stored | KvCode
    scales_query: bool = False
    turns_neighbours: bool = False
    norms_last: bool = False
    norms_value: bool = False
    writes_kv: bool = True


@kernel("rotation", RotationTask)
def rotation_kernel(code: Code, heads: Heads) -> None:
    row = code.task.qkv + code.unit * code.task.qkv_stride
    key_row = row + heads.num_heads * heads.key_dim * 4
    value_row = key_row + heads.num_kv_heads * heads.key_dim * 4
    parts = [(row, heads.num_heads, code.task.query_norm)]
    if heads.writes_kv:
        parts.append((key_row, heads.num_kv_heads, code.task.key_norm))
    for address, count, weight in parts:
        if not heads.norms_last:
            _write_norms(code, heads, address, count, weight)
        if heads.rotated:
            with code.loop(0, count) as head:
                _write_rotation(code, heads, address + head * heads.key_dim * 4)
        if heads.norms_last:
            _write_norms(code, heads, address, count, weight)
    if heads.scales_query:
        _write_scaling(code, row, heads.num_heads * heads.key_dim)
    if heads.norms_value:
        with code.loop(0, heads.num_kv_heads) as head:
            start = value_row + head * heads.value_dim * 4
            write_norm(code, start, code.whole(heads.value_dim), None)
    if heads.writes_kv:
        _write_kv(code, heads, key_row, value_row)
    if isinstance(heads.stored, KvCode) and heads.stored.keys.turned:
        # Their products with turned keys are then right.
        write_turned(code, row, heads.num_heads * heads.key_dim, group_size(heads.key_dim))


def _write_kv(code: Code, heads: Heads, key_row: Value, value_row: Value) -> None:
    """Write a row of K and one of V to the row's slot, if it has one."""
    slot = code.load(code.header(Header.SLOTS), code.unit * 8, I64)
    task, stored = code.task, heads.stored
    codes = (stored.keys, stored.values) if isinstance(stored, KvCode) else (None, None)
    with code.when(slot > -1):
        for address, to, scales, dim, numbers in (
            (key_row, task.keys, task.key_scales, heads.key_dim, codes[0]),
            (value_row, task.values, task.value_scales, heads.value_dim, codes[1]),
        ):
            width = heads.num_kv_heads * dim
            if numbers is not None:
                group = group_size(dim)
                to = to + slot * numbers.width(width)
                to_scales = scales + slot * (width // group * SCALE_BYTES)
                with code.loop(0, width, group) as first:
                    _write_group(code, numbers, group, address, first, to, to_scales)
                continue
            assert isinstance(stored, Stored)
            to = to + slot * (width * stored.num_bytes)
            with code.loop(0, width, LANES) as index:
                value = code.load(address, index * 4, F32S)
                store_floats(code, value, to, index * stored.num_bytes, stored)


def _write_group(
    code: Code,
    numbers: NumberCode,
    group: int,
    address: Value,
    first: Value,
    to: Value,
    scales: Value,
) -> None:
    """Write the `group` floats from `first` on, and their scale, as `NumberCode.quantised`."""
    floats = load_floats_of_group(code, address, first, group)
    if numbers.turned:
        floats = turned(code, floats)
    bits = _scale_bits(code, numbers, floats)
    code.store(code.convert("trunc", bits >> 16, I16), scales, first // group * SCALE_BYTES)
    scale = code.as_bits((bits >> 16) << 16, F32)
    size = code.as_bits(code.as_bits(scale, I32) & 0x7FFFFFFF, F32)
    is_usable = code.spread((size > 0.0) & (size < _FINITE))
    levels = []
    for value in floats:
        level = code.select(is_usable, value / code.spread(scale), code.floats(0.0))
        levels.append(_level_bits(code, numbers, level))
    if numbers.form is Form.INT4:
        half = len(levels) // 2
        both = zip(levels[:half], levels[half:], strict=True)
        levels = [lower + 8 | (upper + 8) << 4 for lower, upper in both]
        first = first >> 1
    for part, level in enumerate(levels):
        code.store(code.convert("trunc", level, I8S), to, first + part * LANES)


def _level_bits(code: Code, numbers: NumberCode, level: Value) -> Value:
    """Return the bits of numbers of a group over its scale, as whole numbers of 32 bits."""
    if numbers.form is Form.E4M3:
        return _e4m3_bits(code, _bounded(code, level, -numbers.most, numbers.most))
    bounds = (-127.0, 127.0) if numbers.form is Form.INT8 else (-8.0, 7.0)
    return code.convert("fptosi", _bounded(code, _rounded(code, level), *bounds), I32S)


def _e4m3_bits(code: Code, values: Value) -> Value:
    """Return floats of at most 448 as the nearest e4m3, ties to even."""
    bits = code.as_bits(values, I32S)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = _rounded(code, code.as_bits(size, F32S) * 512.0)
    small = code.convert("fptosi", small, I32S)
    return code.select(size < 121 << 23, small, normal) | ((bits >> 24) & 0x80)


def _scale_bits(code: Code, numbers: NumberCode, floats: list[Value]) -> Value:
    """Return the bits of a group's scale as a float32, to be cut to the upper 16."""
    # Bits of floats without a sign are ordered as the floats are, and a NaN is above all.
    sizes = [code.as_bits(value, I32S) & 0x7FFFFFFF for value in floats]
    most = code.call("llvm.vector.reduce.smax.v8i32", I32, reduce(code.greatest, sizes))
    peak = code.as_bits(most, F32)
    if numbers.form is not Form.INT4:
        scale = peak / numbers.most
    else:
        own = reduce(code.greatest, [code.as_bits(value, I32S) for value in floats])
        highest = code.call("llvm.vector.reduce.smax.v8i32", I32, own)
        best = _best_scale(code, floats, peak, highest >= most)
        scale = code.select(most < _INFINITE_BITS, best, peak)
    scale = code.select(peak < LEAST, code.single(0.0), scale)
    bits = code.as_bits(scale, I32)
    return bits + 0x7FFF + ((bits >> 16) & 1)  # to bfloat16, ties to even


def _best_scale(code: Code, floats: list[Value], peak: Value, is_positive: Value) -> Value:
    """Return the scale of 4 bits for a group with finite numbers, as `kv_code` searches it.

    is_positive   whether the number farthest from zero is, whose size is `peak`
    """
    unit = peak / float(UNITS)
    unit = code.select(is_positive, code.single(0.0) - unit, unit)
    whole = [_rounded(code, value / code.spread(unit)) for value in floats]
    best, scale = code.single(-1.0), code.single(0.0)
    for step in STEPS:
        factor = code.floats(1 / step)
        levels = [_bounded(code, _rounded(code, value * factor), -8.0, 7.0) for value in whole]
        products = [value * level for value, level in zip(whole, levels, strict=True)]
        product = code.total(reduce(add, products))
        square = code.total(reduce(add, [level * level for level in levels]))
        gain = product * product / square
        is_better = gain > best
        best = code.select(is_better, gain, best)
        scale = code.select(is_better, product / square, scale)
    return scale * unit


def _rounded(code: Code, values: Value) -> Value:
    return code.call("llvm.rint.v8f32", F32S, values)


def _bounded(code: Code, values: Value, lowest: float, highest: float) -> Value:
    return code.least(code.greatest(values, lowest), highest)


def _write_norms(code: Code, heads: Heads, address: Value, count: int, weight: Value) -> None:
    if heads.norm is HeadNorm.NONE:
        return
    is_wide = heads.norm is HeadNorm.ALL_HEADS
    width = code.whole(heads.key_dim * count if is_wide else heads.key_dim)
    with code.loop(0, 1 if is_wide else count) as part:
        write_norm(code, address + part * width * 4, width, weight)


def _write_rotation(code: Code, heads: Heads, head: Value) -> None:
    half = heads.rotated // 2
    whole = half // LANES * LANES
    angles = code.unit * (half * 4)
    cosines, sines = (rows + angles for rows in (code.task.cosines, code.task.sines))
    for pair in range(whole, half):  # what fills no vector
        cos, sin = (code.load(at, pair * 4, F32) for at in (cosines, sines))
        both = (2 * pair, 2 * pair + 1) if heads.turns_neighbours else (pair, pair + half)
        first, second = (code.load(head, place * 4, F32) for place in both)
        code.store(first * cos - second * sin, head, both[0] * 4)
        code.store(second * cos + first * sin, head, both[1] * 4)
    with code.loop(0, whole, LANES) as index:
        cos, sin = (load_floats(code, at, index * 4, Stored.FLOAT) for at in (cosines, sines))
        if heads.turns_neighbours:
            _write_turned_neighbours(code, head + index * 8, cos, sin)
        else:
            first = code.load(head, index * 4, F32S)
            second = code.load(head, index * 4 + half * 4, F32S)
            code.store(first * cos - second * sin, head, index * 4)
            code.store(second * cos + first * sin, head, index * 4 + half * 4)


def _write_turned_neighbours(code: Code, address: Value, cos: Value, sin: Value) -> None:
    """Write: turn 8 pairs of neighbours by 8 angles."""
    lower, upper = (code.load(address, part * LANES * 4, F32S) for part in (0, 1))
    even, odd = (code.shuffled(lower, upper, range(part, 2 * LANES, 2)) for part in (0, 1))
    first, second = even * cos - odd * sin, odd * cos + even * sin
    for part in (0, 1):
        start = part * LANES // 2
        lanes = [
            lane for number in range(start, start + LANES // 2) for lane in (number, number + LANES)
        ]
        code.store(code.shuffled(first, second, lanes), address, part * LANES * 4)


def _write_scaling(code: Code, row: Value, width: int) -> None:
    factor = code.spread(code.load(code.task.query_factors, code.unit * 4, F32))
    with code.loop(0, width, LANES) as index:
        code.store(code.load(row, index * 4, F32S) * factor, row, index * 4)
