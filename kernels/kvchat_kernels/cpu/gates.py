"""The middle of an MLP, of gate and up or of up alone, the gates of attention's heads, and factors.

A unit of the first is a run of columns of all rows, one of the others a row.
"""

from enum import StrEnum

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import erf, exp, sigmoid, tanh
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task

# Columns of a unit.
UNIT_COLUMNS = 1024


class GateTask(Task):
    """`both` is float32 [rows, 2 * width], gate before up, or by turns; `out` is [rows, width].

    Without a gate `both` is float32 [rows, width]. Four numbers are of XIELU: for x > 0,
    positive * x^2 + linear * x, else (exp(min(x, largest)) - 1 - x) * negative + linear * x.
    Two are of LIMITED: g * sigmoid(steepness * g) * (u + 1), where g is at most `limit`, and u,
    which is up, as far from zero.
    """

    both: Memory
    out: Memory
    width: int
    positive: float = 0.0
    negative: float = 0.0
    linear: float = 0.0
    largest: float = 0.0
    steepness: float = 0.0
    limit: float = 0.0


class HeadsTask(Task):
    """Gated heads: `both` is float32 [rows, heads, 2 * dim], of each head its query before its
    gate; `out` has rows of `out_stride` bytes, whose first [heads, dim] are written.
    """

    both: Memory
    out: Memory
    out_stride: int
    num_heads: int
    dim: int


class SideTask(Task):
    """Side inputs: `gate` and `out` are float32 [rows, width], `side` has rows of `side_stride`
    bytes, whose first `width` floats are taken.
    """

    gate: Memory
    side: Memory
    side_stride: int
    out: Memory
    width: int


class FactorsTask(Task):
    """`x` has rows of `stride` bytes, whose first `width` floats are multiplied with `factors`,
    float32 [width].
    """

    x: Memory
    stride: int
    factors: Memory
    width: int


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu tanh"
    SQUARED_RELU = "squared relu"
    XIELU = "xielu"
    LIMITED = "limited"
    SIGMOID = "sigmoid"


@kernel("heads", HeadsTask)
def heads_kernel(code: Code, is_gate: bool) -> None:
    """Multiply what heads attended to with sigmoids of their gates, or copy the queries of heads
    with gates.
    """
    dim, count = code.task.dim, code.task.num_heads
    out = code.task.out + code.unit * code.task.out_stride
    both = code.task.both + code.unit * count * dim * 8
    with code.loop(0, count) as head, code.loop(0, dim, LANES) as column:
        at, to = (head * dim * 2 + column) * 4, (head * dim + column) * 4
        if is_gate:
            gate = sigmoid(code, code.load(both, at + dim * 4, F32S))
            code.store(code.load(out, to, F32S) * gate, out, to)
        else:
            code.store(code.load(both, at, F32S), out, to)


@kernel("factors", FactorsTask)
def factors_kernel(code: Code) -> None:
    """Write the kernel that multiplies the columns of a row with a factor each."""
    x = code.task.x + code.unit * code.task.stride
    factors, width = code.task.factors, code.task.width
    whole = width // LANES * LANES
    with code.loop(0, whole, LANES) as column:
        at = column * 4
        code.store(code.load(x, at, F32S) * code.load(factors, at, F32S), x, at)
    with code.loop(whole, width) as column:
        at = column * 4
        code.store(code.load(x, at, F32) * code.load(factors, at, F32), x, at)


@kernel("gate", GateTask)
def gate_kernel(
    code: Code, activation: Activation, is_gated: bool = True, is_by_turns: bool = False
) -> None:
    """Write the kernel of a gated MLP's middle: act(gate) * up, but for LIMITED; or of act(up).

    `is_by_turns`: each number of the gate stands before that of up.
    """
    width = code.task.width
    start = code.unit * UNIT_COLUMNS
    end = code.least(start + UNIT_COLUMNS, width)
    with code.loop(0, code.header(Header.NUM_ROWS)) as row:
        gate = code.task.both + row * width * (8 if is_gated else 4)
        out = code.task.out + row * width * 4
        with code.loop(start, end, LANES) as column:
            if not is_gated:
                value = _activated(code, code.load(gate, column * 4, F32S), activation)
            else:
                x, up = _gate_and_up(code, gate, column, width, is_by_turns)
                is_limited = activation is Activation.LIMITED
                value = (
                    _limited(code, x, up) if is_limited else _activated(code, x, activation) * up
                )
            code.store(value, out, column * 4)


def _gate_and_up(
    code: Code, row: Value, column: Value, width: Value, is_by_turns: bool
) -> tuple[Value, Value]:
    """Load 8 numbers of the gate and of up."""
    if not is_by_turns:
        return code.load(row, column * 4, F32S), code.load(row, (column + width) * 4, F32S)
    lower, upper = (code.load(row, column * 8 + part, F32S) for part in (0, 4 * LANES))
    even, odd = (code.shuffled(lower, upper, range(part, 2 * LANES, 2)) for part in (0, 1))
    return even, odd


def _limited(code: Code, gate: Value, up: Value) -> Value:
    limit, steepness = code.spread(code.task.limit), code.spread(code.task.steepness)
    gate = code.least(gate, limit)
    up = code.greatest(code.least(up, limit), code.floats(0.0) - limit)
    return gate * sigmoid(code, gate * steepness) * (up + code.floats(1.0))


@kernel("side", SideTask)
def side_kernel(code: Code, activation: Activation) -> None:
    """Write the kernel of act(gate) * side, where the side input is no product of the step."""
    width = code.task.width
    gate, out = (rows + code.unit * width * 4 for rows in (code.task.gate, code.task.out))
    side = code.task.side + code.unit * code.task.side_stride
    with code.loop(0, width, LANES) as column:
        value = _activated(code, code.load(gate, column * 4, F32S), activation)
        code.store(value * code.load(side, column * 4, F32S), out, column * 4)


def _activated(code: Code, x: Value, activation: Activation) -> Value:
    if activation is Activation.SILU:
        return x * sigmoid(code, x)
    if activation is Activation.SQUARED_RELU:
        positive = code.greatest(x, 0.0)
        return positive * positive
    if activation is Activation.SIGMOID:
        return sigmoid(code, x)
    if activation is Activation.XIELU:
        return _xielu(code, x)
    half, one = code.floats(0.5), code.floats(1.0)
    if activation is Activation.GELU:
        return x * half * (one + erf(code, x * code.floats(2**-0.5)))
    inner = (x + x * x * x * code.floats(0.044715)) * code.floats(0.7978845608028654)
    return x * half * (one + tanh(code, inner))


def _xielu(code: Code, x: Value) -> Value:
    task = code.task
    positive, negative, linear, largest = (
        code.spread(number) for number in (task.positive, task.negative, task.linear, task.largest)
    )
    below = (exp(code, code.least(x, largest)) - code.floats(1.0) - x) * negative
    return code.select(x > 0.0, positive * x * x, below) + linear * x
