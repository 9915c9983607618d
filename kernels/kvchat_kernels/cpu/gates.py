"""The middle of an MLP, act(gate) * up or act(up), the gates of attention's heads, and factors.

A unit of the first is a run of columns of all rows, one of the others a row.
"""

from enum import IntEnum, StrEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Kernel, Value
from kvchat_kernels.cpu.maths import erf, exp, sigmoid, tanh
from kvchat_kernels.cpu.step import Header

# Columns of a unit.
UNIT_COLUMNS = 1024


class Place(IntEnum):
    """The task: BOTH is float32 [rows, 2 * WIDTH], gate before up; OUT is float32 [rows, WIDTH].

    Without a gate BOTH is float32 [rows, WIDTH]. The last four are of XIELU, float32: for x > 0,
    POSITIVE * x^2 + LINEAR * x, else (exp(min(x, LARGEST)) - 1 - x) * NEGATIVE + LINEAR * x.
    """

    BOTH = 0
    OUT = 1
    WIDTH = 2
    POSITIVE = 3
    NEGATIVE = 4
    LINEAR = 5
    LARGEST = 6


class HeadPlace(IntEnum):
    """The task of gated heads: BOTH is float32 [rows, heads, 2 * dim], of each head its query
    before its gate; OUT has rows of OUT_STRIDE bytes, whose first [heads, dim] are written.
    """

    BOTH = 0
    OUT = 1
    OUT_STRIDE = 2
    NUM_HEADS = 3
    DIM = 4


class SidePlace(IntEnum):
    """The task of side inputs: GATE and OUT are float32 [rows, WIDTH], SIDE has rows of
    SIDE_STRIDE bytes, whose first WIDTH are taken.
    """

    GATE = 0
    SIDE = 1
    SIDE_STRIDE = 2
    OUT = 3
    WIDTH = 4


class FactorPlace(IntEnum):
    """The task of factors: X has rows of STRIDE bytes, whose first WIDTH are multiplied with
    FACTORS, float32 [WIDTH].
    """

    X = 0
    STRIDE = 1
    FACTORS = 2
    WIDTH = 3


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu tanh"
    SQUARED_RELU = "squared relu"
    XIELU = "xielu"


@cache
def gate_kernel(activation: Activation, is_gated: bool = True) -> Kernel:
    return Kernel("gate", (activation, is_gated), lambda code: _write(code, activation, is_gated))


@cache
def side_kernel(activation: Activation) -> Kernel:
    """Return the kernel of act(gate) * side, where the side input is no product of the step."""
    return Kernel("side", (activation,), lambda code: _write_side(code, activation))


@cache
def factors_kernel() -> Kernel:
    """Return the kernel that multiplies the columns of a row with a factor each."""
    return Kernel("factors", (), _write_factors)


@cache
def queries_kernel() -> Kernel:
    """Return the kernel that copies the queries of heads with gates."""
    return Kernel("queries", (), lambda code: _write_heads(code, is_gate=False))


@cache
def head_gate_kernel() -> Kernel:
    """Return the kernel that multiplies what heads attended to with sigmoids of their gates."""
    return Kernel("head gate", (), lambda code: _write_heads(code, is_gate=True))


def _write_heads(code: Code, is_gate: bool) -> None:
    dim, count = code.field(HeadPlace.DIM), code.field(HeadPlace.NUM_HEADS)
    out = code.field(HeadPlace.OUT) + code.unit * code.field(HeadPlace.OUT_STRIDE)
    both = code.field(HeadPlace.BOTH) + code.unit * count * dim * 8
    with code.loop(0, count) as head, code.loop(0, dim, LANES) as column:
        at, to = (head * dim * 2 + column) * 4, (head * dim + column) * 4
        if is_gate:
            gate = sigmoid(code, code.load(both, at + dim * 4, F32S))
            code.store(code.load(out, to, F32S) * gate, out, to)
        else:
            code.store(code.load(both, at, F32S), out, to)


def _write_factors(code: Code) -> None:
    x = code.field(FactorPlace.X) + code.unit * code.field(FactorPlace.STRIDE)
    factors, width = code.field(FactorPlace.FACTORS), code.field(FactorPlace.WIDTH)
    whole = width // LANES * LANES
    with code.loop(0, whole, LANES) as column:
        at = column * 4
        code.store(code.load(x, at, F32S) * code.load(factors, at, F32S), x, at)
    with code.loop(whole, width) as column:
        at = column * 4
        code.store(code.load(x, at, F32) * code.load(factors, at, F32), x, at)


def _write(code: Code, activation: Activation, is_gated: bool) -> None:
    width = code.field(Place.WIDTH)
    start = code.unit * UNIT_COLUMNS
    end = code.least(start + UNIT_COLUMNS, width)
    with code.loop(0, code.header(Header.NUM_ROWS)) as row:
        gate = code.field(Place.BOTH) + row * width * (8 if is_gated else 4)
        out = code.field(Place.OUT) + row * width * 4
        with code.loop(start, end, LANES) as column:
            x = code.load(gate, column * 4, F32S)
            value = _activated(code, x, activation)
            if is_gated:
                value = value * code.load(gate, (column + width) * 4, F32S)
            code.store(value, out, column * 4)


def _write_side(code: Code, activation: Activation) -> None:
    width = code.field(SidePlace.WIDTH)
    gate, out = (
        code.field(place) + code.unit * width * 4 for place in (SidePlace.GATE, SidePlace.OUT)
    )
    side = code.field(SidePlace.SIDE) + code.unit * code.field(SidePlace.SIDE_STRIDE)
    with code.loop(0, width, LANES) as column:
        value = _activated(code, code.load(gate, column * 4, F32S), activation)
        code.store(value * code.load(side, column * 4, F32S), out, column * 4)


def _activated(code: Code, x: Value, activation: Activation) -> Value:
    if activation is Activation.SILU:
        return x * sigmoid(code, x)
    if activation is Activation.SQUARED_RELU:
        positive = code.greatest(x, 0.0)
        return positive * positive
    if activation is Activation.XIELU:
        return _xielu(code, x)
    half, one = code.floats(0.5), code.floats(1.0)
    if activation is Activation.GELU:
        return x * half * (one + erf(code, x * code.floats(2**-0.5)))
    inner = (x + x * x * x * code.floats(0.044715)) * code.floats(0.7978845608028654)
    return x * half * (one + tanh(code, inner))


def _xielu(code: Code, x: Value) -> Value:
    positive, negative, linear, largest = (
        code.spread(code.float_field(place))
        for place in (Place.POSITIVE, Place.NEGATIVE, Place.LINEAR, Place.LARGEST)
    )
    below = (exp(code, code.least(x, largest)) - code.floats(1.0) - x) * negative
    return code.select(x > 0.0, positive * x * x, below) + linear * x
