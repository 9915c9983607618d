"""Normalises and rotates the heads of Q and K, and writes K and V to their slots. A unit is a row.

Rotation is by halves, as GPT-NeoX and Llama have it: of the first `rotated` dimensions of a head,
those of the first half turn with those of the second. Or neighbours turn with each other, as GLM,
ERNIE and Cohere have it.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache, reduce

from kvchat_kernels.cpu.code import F32, F32S, I16, I32, I32S, I64, LANES, Code, Kernel, Value
from kvchat_kernels.cpu.maths import I8S, Stored, load_floats, store_floats
from kvchat_kernels.cpu.norms import inverse_rms
from kvchat_kernels.cpu.step import Header

# Of groups of 8 bits: the largest number, and floats between which a scale and its numbers are
# not zero and not infinite. The same as in `int8_kv.py`.
_MOST = 127.0
_LEAST = 1e-30
_FINITE = 3.3e38


class Place(IntEnum):
    """The task. QKV is float32: rows of Q, K and V side by side, QKV_STRIDE bytes each.

    COSINES, SINES            float32 [rows, rotated / 2]
    KEYS, VALUES              addresses of the pools, [slots, KV heads, dim]
    QUERY_NORM, KEY_NORM      weights, float32 [dim], or [heads * dim] for a norm of all heads
    EPSILON                   float32
    KEY_SCALES, VALUE_SCALES  bfloat16 [slots, KV heads, dim / group], where pools are of 8 bits
    QUERY_FACTORS             float32 [rows], what Q is multiplied with after it is rotated
    """

    QKV = 0
    QKV_STRIDE = 1
    COSINES = 2
    SINES = 3
    KEYS = 4
    VALUES = 5
    QUERY_NORM = 6
    KEY_NORM = 7
    EPSILON = 8
    KEY_SCALES = 9
    VALUE_SCALES = 10
    QUERY_FACTORS = 11


class HeadNorm(StrEnum):
    """Which parts of Q and K are normalised together."""

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all heads"


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer. Dims are multiples of 8, `rotated` of 16; 0 rotates nothing.

    `stored` is how the pools hold K and V. Of 8 bits, `key_group` numbers of a key and
    `value_group` of a value share a scale: powers of two from 8 on.

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
    stored: Stored
    key_group: int = 0
    value_group: int = 0
    scales_query: bool = False
    turns_neighbours: bool = False
    norms_last: bool = False
    norms_value: bool = False
    writes_kv: bool = True


@cache
def rotation_kernel(heads: Heads) -> Kernel:
    return Kernel("rotation", (heads,), lambda code: _write(code, heads))


def _write(code: Code, heads: Heads) -> None:
    row = code.field(Place.QKV) + code.unit * code.field(Place.QKV_STRIDE)
    key_row = row + heads.num_heads * heads.key_dim * 4
    value_row = key_row + heads.num_kv_heads * heads.key_dim * 4
    parts = [(row, heads.num_heads, Place.QUERY_NORM)]
    if heads.writes_kv:
        parts.append((key_row, heads.num_kv_heads, Place.KEY_NORM))
    for address, count, weight in parts:
        if not heads.norms_last:
            _write_norms(code, heads, address, count, code.field(weight))
        if heads.rotated:
            with code.loop(0, count) as head:
                _write_rotation(code, heads, address + head * heads.key_dim * 4)
        if heads.norms_last:
            _write_norms(code, heads, address, count, code.field(weight))
    if heads.scales_query:
        _write_scaling(code, row, heads.num_heads * heads.key_dim)
    if heads.norms_value:
        with code.loop(0, heads.num_kv_heads) as head:
            start = value_row + head * heads.value_dim * 4
            _write_norm(code, start, code.whole(heads.value_dim), None)
    if heads.writes_kv:
        _write_kv(code, heads, key_row, value_row)


def _write_kv(code: Code, heads: Heads, key_row: Value, value_row: Value) -> None:
    """Write a row of K and one of V to the row's slot, if it has one."""
    slot = code.load(code.header(Header.SLOTS), code.unit * 8, I64)
    with code.when(slot > -1):
        for address, pool, dim, scales, group in (
            (key_row, Place.KEYS, heads.key_dim, Place.KEY_SCALES, heads.key_group),
            (value_row, Place.VALUES, heads.value_dim, Place.VALUE_SCALES, heads.value_group),
        ):
            width = heads.num_kv_heads * dim
            to = code.field(pool) + slot * (width * heads.stored.num_bytes)
            if group:
                to_scales = code.field(scales) + slot * (width // group * Stored.BFLOAT.num_bytes)
                _write_groups(code, address, to, to_scales, width, group)
                continue
            with code.loop(0, width, LANES) as index:
                value = code.load(address, index * 4, F32S)
                store_floats(code, value, to, index * heads.stored.num_bytes, heads.stored)


def _write_groups(
    code: Code, address: Value, to: Value, scales: Value, width: int, group: int
) -> None:
    """Write `width` floats as groups of whole numbers and their scales, as `int8_kv.quantised`."""
    with code.loop(0, width, group) as first:
        parts = [first + part for part in range(0, group, LANES)]
        floats = [code.load(address, part * 4, F32S) for part in parts]
        # Bits of floats without a sign are ordered as the floats are, and a NaN is above all.
        sizes = [code.as_bits(value, I32S) & 0x7FFFFFFF for value in floats]
        most = code.call("llvm.vector.reduce.smax.v8i32", I32, reduce(code.greatest, sizes))
        peak = code.as_bits(most, F32)
        exact = code.select(peak < _LEAST, code.single(0.0), peak / _MOST)
        bits = code.as_bits(exact, I32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)  # to bfloat16, ties to even
        code.store(code.convert("trunc", bits >> 16, I16), scales, first // group * 2)
        scale = code.as_bits((bits >> 16) << 16, F32)
        is_usable = code.spread((scale > 0.0) & (scale < _FINITE))
        for part, value in zip(parts, floats, strict=True):
            level = code.call("llvm.rint.v8f32", F32S, value / code.spread(scale))
            level = code.select(is_usable, level, code.floats(0.0))
            level = code.least(code.greatest(level, -_MOST), _MOST)
            whole = code.convert("fptosi", level, I32S)
            code.store(code.convert("trunc", whole, I8S), to, part)


def _write_norms(code: Code, heads: Heads, address: Value, count: int, weight: Value) -> None:
    if heads.norm is HeadNorm.NONE:
        return
    is_wide = heads.norm is HeadNorm.ALL_HEADS
    width = code.whole(heads.key_dim * count if is_wide else heads.key_dim)
    with code.loop(0, 1 if is_wide else count) as part:
        _write_norm(code, address + part * width * 4, width, weight)


def _write_norm(code: Code, start: Value, width: Value, weight: Value | None) -> None:
    epsilon = code.float_field(Place.EPSILON)
    factor = code.spread(inverse_rms(code, start, width, epsilon))
    with code.loop(0, width, LANES) as index:
        value = code.load(start, index * 4, F32S) * factor
        if weight is not None:
            value = value * code.load(weight, index * 4, F32S)
        code.store(value, start, index * 4)


def _write_rotation(code: Code, heads: Heads, head: Value) -> None:
    half = heads.rotated // 2
    angles = code.unit * (half * 4)
    cosines, sines = (code.field(place) + angles for place in (Place.COSINES, Place.SINES))
    with code.loop(0, half, LANES) as index:
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
    factor = code.spread(code.load(code.field(Place.QUERY_FACTORS), code.unit * 4, F32))
    with code.loop(0, width, LANES) as index:
        code.store(code.load(row, index * 4, F32S) * factor, row, index * 4)
