"""The state of a gated delta net (Qwen3.5, Qwen3-Next) in a step, behind its convolution.

Each value head decays its state S [key dim, value dim], corrects what S predicts for the key, and
reads S by the query; the reading is normed and gated. A unit is a value head of a sequence,
whose rows it computes one after another:

    S = decay * S;  S += k * (beta * (v - k S));  out = norm(q S) * silu(z)

It changes the state in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from kvchat_kernels.cpu.code import F32, F32S, I32, I64, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import exp, reciprocal_root, sigmoid, softplus
from kvchat_kernels.cpu.norms import inverse_rms
from kvchat_kernels.cpu.step import InputsTask, StateRow, rows_of_state
from kvchat_kernels.cpu.task import Memory, Task

# What the squares of a key or a query are added to, as the models have it.
LEAST_SQUARE = 1e-6


class DeltaTask(InputsTask):
    """All are float32; the shapes are those of one row. The first four are parts of `inputs`.

    mixed          queries, keys [key heads, key dim] and values [heads, value dim], one after
                   another
    gates          [heads, value dim]
    betas, steps   [heads], before their functions; where each channel decays by itself, `steps`
                   are [heads, key dim]
    step_bias      as `steps`, which it is added to
    rates          [heads], what a softplus of `steps` is multiplied with: the logarithm of the
                   decay
    norm           [value dim]
    epsilon        of the norm
    out            [heads, value dim]
    state          bytes from the beginning of a sequence's state to [heads, key dim, value dim]
    """

    mixed: Memory
    gates: Memory
    betas: Memory
    steps: Memory
    step_bias: Memory
    rates: Memory
    norm: Memory
    epsilon: float
    out: Memory
    state: int


class OrderingTask(Task):
    """out[i] = x[source[i]] of each row, float32 [rows, width]; `source` is int32.

    The strides are in bytes.
    """

    x: Memory
    x_stride: int
    source: Memory
    width: int
    out: Memory
    out_stride: int


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """Heads of a layer; `num_heads` are those of values. Dims are multiples of 8.

    most_beta         what the sigmoids of betas are multiplied with
    decays_channels   each number of a key decays by itself, as Kimi Linear's
    has_silu          what is read is multiplied with silu of the gates, else with sigmoids
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    most_beta: float = 1.0
    decays_channels: bool = False
    has_silu: bool = True


@kernel("delta", DeltaTask)
def delta_kernel(code: Code, form: DeltaForm) -> None:
    number, head = code.unit // form.num_heads, code.unit % form.num_heads
    size = form.key_dim * form.value_dim * 4
    room, unread = code.room(size), code.room(form.value_dim * 4)
    with rows_of_state(code, number, code.task.state + head * size, room) as row:
        _write_row(code, form, row, head, unread)


def _write_row(code: Code, form: DeltaForm, row: StateRow, head: Value, unread: Value) -> None:
    """Write a row's step; what is read of an earlier guess goes to `unread`."""
    row_bytes, offset = form.value_dim * 4, row.offset
    key_head = head // (form.num_heads // form.num_key_heads)
    width = form.num_key_heads * form.key_dim * 4
    mixed = code.task.mixed + offset
    query = mixed + key_head * (form.key_dim * 4)
    key = query + width
    value = mixed + 2 * width + head * row_bytes
    out = code.task.out + (row.row * form.num_heads + head) * row_bytes
    out = code.select(row.is_earlier, unread, out)
    of_query = code.spread(_inverse_norm(code, query, form) * form.key_dim**-0.5)
    of_key = code.spread(_inverse_norm(code, key, form))
    decays = _decays(code, form, offset, head)
    beta = code.spread(code.load(code.task.betas + offset, head * 4, F32))
    beta = sigmoid(code, beta) * code.floats(form.most_beta)
    for columns in _strips(form.value_dim):
        predictions = _sums(code, form, key, row.before, columns, decays)
        changes = [
            (code.load(value, column * 4, F32S) - total * of_key) * beta * of_key
            for total, column in zip(predictions, columns, strict=True)
        ]
        read = [code.variable(code.floats(0.0)) for _ in columns]
        with code.loop(0, form.key_dim) as index:
            k, q = (code.spread(code.load(at, index * 4, F32)) for at in (key, query))
            decay = decays(index)
            for column, change, total in zip(columns, changes, read, strict=True):
                at = index * row_bytes + column * 4
                new = code.load(row.before, at, F32S) * decay + k * change
                code.store(new, row.after, at)
                total.set(total.get() + q * new)
        for column, total in zip(columns, read, strict=True):
            code.store(total.get() * of_query, out, column * 4)
    write_gated_norm(code, form, offset + head * row_bytes, out)


def _strips(width: int) -> list[range]:
    """Return the columns at which the vectors of each pass over a state begin."""
    strip = 4 * LANES if width % (4 * LANES) == 0 else LANES
    return [range(start, start + strip, LANES) for start in range(0, width, strip)]


def _sums(
    code: Code,
    form: DeltaForm,
    key: Value,
    state: Value,
    columns: Sequence[int],
    decays: Callable[[Value], Value],
) -> list[Value]:
    """Return the product of a key and the decayed state, a vector for each of the `columns`."""
    totals = [code.variable(code.floats(0.0)) for _ in columns]
    with code.loop(0, form.key_dim) as index:
        k = code.spread(code.load(key, index * 4, F32))
        if form.decays_channels:
            k = k * decays(index)
        for column, total in zip(columns, totals, strict=True):
            row = code.load(state, index * (form.value_dim * 4) + column * 4, F32S)
            total.set(total.get() + k * row)
    if form.decays_channels:
        return [total.get() for total in totals]
    decay = decays(code.whole(0))
    return [total.get() * decay for total in totals]


def _inverse_norm(code: Code, address: Value, form: DeltaForm) -> Value:
    squares = [
        x * x for x in (code.load(address, at * 4, F32S) for at in range(0, form.key_dim, LANES))
    ]
    total = code.total(reduce(lambda one, other: one + other, squares))
    return reciprocal_root(code, total + LEAST_SQUARE)


def _decays(code: Code, form: DeltaForm, offset: Value, head: Value) -> Callable[[Value], Value]:
    """Return what gives the decay of a number of the key, in all lanes.

    It is exp(rate * softplus(step + bias)), of the head or of the number, of the row at `offset`.
    """
    task = code.task
    rate = code.spread(code.load(task.rates, head * 4, F32))
    if not form.decays_channels:
        step = code.spread(code.load(task.steps + offset, head * 4, F32))
        bias = code.spread(code.load(task.step_bias, head * 4, F32))
        of_head = exp(code, rate * softplus(code, step + bias))
        return lambda index: of_head
    decays, first = code.room(form.key_dim * 4), head * (form.key_dim * 4)
    steps, biases = task.steps + offset + first, task.step_bias + first
    with code.loop(0, form.key_dim, LANES) as index:
        step = code.load(steps, index * 4, F32S) + code.load(biases, index * 4, F32S)
        code.store(exp(code, rate * softplus(code, step)), decays, index * 4)
    return lambda index: code.spread(code.load(decays, index * 4, F32))


def write_gated_norm(code: Code, form: DeltaForm, offset: Value, out: Value) -> None:
    """Write: norm what a head has read, and multiply it with silu, or sigmoids, of the gates at
    `offset`.
    """
    width = code.whole(form.value_dim)
    factor = code.spread(inverse_rms(code, out, width))
    gates = code.task.gates + offset
    weight = code.task.norm
    with code.loop(0, width, LANES) as column:
        gate = code.load(gates, column * 4, F32S)
        normed = code.load(out, column * 4, F32S) * factor * code.load(weight, column * 4, F32S)
        normed = normed * gate if form.has_silu else normed
        code.store(normed * sigmoid(code, gate), out, column * 4)


@kernel("ordering", OrderingTask)
def ordering_kernel(code: Code) -> None:
    """Put the numbers of each row in another order. Units: rows."""
    order, width = code.task.source, code.task.width
    x = code.task.x + code.unit * code.task.x_stride
    out = code.task.out + code.unit * code.task.out_stride
    with code.loop(0, width) as index:
        source = code.convert("sext", code.load(order, index * 4, I32), I64)
        code.store(code.load(x, source * 4, F32), out, index * 4)
