"""Gates: act(gate) * up, the middle of a gated MLP, and the gates of attention's heads.

A unit of the first is a run of columns of all rows, one of the others a row.
"""

from enum import IntEnum, StrEnum
from functools import cache

from kvchat_kernels.cpu.code import F32S, LANES, Code, Kernel, Value
from kvchat_kernels.cpu.maths import erf, sigmoid, tanh
from kvchat_kernels.cpu.step import Header

# Columns of a unit.
UNIT_COLUMNS = 1024


class Place(IntEnum):
    """The task: BOTH is float32 [rows, 2 * WIDTH], gate before up; OUT is float32 [rows, WIDTH]."""

    BOTH = 0
    OUT = 1
    WIDTH = 2


class HeadPlace(IntEnum):
    """The task of gated heads: BOTH is float32 [rows, heads, 2 * dim], of each head its query
    before its gate; OUT has rows of OUT_STRIDE bytes, whose first [heads, dim] are written.
    """

    BOTH = 0
    OUT = 1
    OUT_STRIDE = 2
    NUM_HEADS = 3
    DIM = 4


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu tanh"


@cache
def gate_kernel(activation: Activation) -> Kernel:
    return Kernel("gate", (activation,), lambda code: _write(code, activation))


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


def _write(code: Code, activation: Activation) -> None:
    width = code.field(Place.WIDTH)
    start = code.unit * UNIT_COLUMNS
    end = code.least(start + UNIT_COLUMNS, width)
    with code.loop(0, code.header(Header.NUM_ROWS)) as row:
        gate = code.field(Place.BOTH) + row * width * 8
        out = code.field(Place.OUT) + row * width * 4
        with code.loop(start, end, LANES) as column:
            x = code.load(gate, column * 4, F32S)
            up = code.load(gate, (column + width) * 4, F32S)
            code.store(_activated(code, x, activation) * up, out, column * 4)


def _activated(code: Code, x: Value, activation: Activation) -> Value:
    if activation is Activation.SILU:
        return x * sigmoid(code, x)
    half, one = code.floats(0.5), code.floats(1.0)
    if activation is Activation.GELU:
        return x * half * (one + erf(code, x * code.floats(2**-0.5)))
    inner = (x + x * x * x * code.floats(0.044715)) * code.floats(0.7978845608028654)
    return x * half * (one + tanh(code, inner))
