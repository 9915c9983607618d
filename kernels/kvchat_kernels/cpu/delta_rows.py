"""Many rows of one sequence of a gated delta net, one after another: a prompt.

It is what `convolution.py` and `delta.py` do for each row, in three kernels: the convolution with
what else a row needs before the state; the state's steps, where the columns of a head's state are
divided among units, since no column reads another; the norms with their gates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Value, Variable, kernel
from kvchat_kernels.cpu.convolution import write_convolved
from kvchat_kernels.cpu.delta import LEAST_SQUARE, DeltaForm, write_gated_norm
from kvchat_kernels.cpu.maths import exp, reciprocal_root, sigmoid, softplus
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task

# Columns of a state that a unit takes: with keys of 128 dims, they fit into the fastest cache.
_COLUMNS = 4 * LANES


class DeltaRowsTask(Task):
    """The task of all three. All are float32 and contiguous; rows are the header's.

    x            [taps - 1 + rows, channels], the inputs of the convolution, the past ones first
    weights      [taps, channels]
    mixed        [rows, channels]: queries, keys [key heads, key dim] and values [heads, value dim]
    steps        [rows, heads], replaced by the decays
    betas        [rows, heads], replaced by their sigmoids times `most_beta`
    step_bias, rates   [heads], as in `DeltaTask`
    state        [heads, key dim, value dim]
    gates        [rows, heads, value dim]
    norm         [value dim]
    epsilon      of the norm
    out          [rows, heads, value dim]
    """

    x: Memory
    weights: Memory
    mixed: Memory
    steps: Memory
    betas: Memory
    step_bias: Memory
    rates: Memory
    state: Memory
    gates: Memory
    norm: Memory
    epsilon: float
    out: Memory


@dataclass(frozen=True, slots=True)
class RowsForm:
    """The heads, and the number of inputs that the convolution sums up."""

    heads: DeltaForm
    num_taps: int

    @property
    def num_channels(self) -> int:
        heads = self.heads
        keys = 2 * heads.num_key_heads * heads.key_dim
        return keys + heads.num_heads * heads.value_dim

    @property
    def num_units(self) -> int:
        """The units of the state's steps."""
        return self.heads.num_heads * (self.heads.value_dim // self._columns)

    @property
    def _columns(self) -> int:
        return _COLUMNS if self.heads.value_dim % _COLUMNS == 0 else LANES


@kernel("delta inputs", DeltaRowsTask)
def inputs_kernel(code: Code, form: RowsForm) -> None:
    """Write the kernel of the convolution; it norms queries and keys too. Units: rows."""
    heads, row_bytes = form.heads, form.num_channels * 4
    x = code.task.x + code.unit * row_bytes
    mixed = code.task.mixed + code.unit * row_bytes
    write_convolved(code, x, code.task.weights, None, mixed, (form.num_taps, form.num_channels))
    width = heads.key_dim * 4
    with code.loop(0, 2 * heads.num_key_heads) as head:
        # Queries come before keys, and are scaled as well.
        scale = code.select(
            head < heads.num_key_heads, code.single(heads.key_dim**-0.5), code.single(1.0)
        )
        _write_normed(code, mixed + head * width, heads.key_dim, scale)
    _write_decays(code, heads)


def _write_normed(code: Code, address: Value, width: int, scale: Value) -> None:
    vectors = [code.load(address, at * 4, F32S) for at in range(0, width, LANES)]
    squares = reduce(lambda one, other: one + other, [vector * vector for vector in vectors])
    factor = code.spread(reciprocal_root(code, code.total(squares) + LEAST_SQUARE) * scale)
    for at, vector in zip(range(0, width, LANES), vectors, strict=True):
        code.store(vector * factor, address, at * 4)


def _write_decays(code: Code, heads: DeltaForm) -> None:
    """Write: what each head's state decays by, and how much of a change it takes."""
    row = code.unit * heads.num_heads
    steps, betas = code.task.steps, code.task.betas
    with code.loop(0, heads.num_heads) as head:
        at = (row + head) * 4
        bias, rate = (
            code.spread(code.load(of_heads, head * 4, F32))
            for of_heads in (code.task.step_bias, code.task.rates)
        )
        step = softplus(code, code.spread(code.load(steps, at, F32)) + bias)
        code.store(code.lane(exp(code, rate * step), 0), steps, at)
        beta = sigmoid(code, code.spread(code.load(betas, at, F32))) * code.floats(heads.most_beta)
        code.store(code.lane(beta, 0), betas, at)


@kernel("delta steps", DeltaRowsTask)
def steps_kernel(code: Code, form: RowsForm) -> None:
    """Copy the unit's columns of a state, take all rows' steps, and copy them back.

    While a row changes the state, it is also read by the next row's key, which is what that row's
    change is a correction of. Units: `form.num_units`.
    """
    heads, columns = form.heads, form._columns
    strips = heads.value_dim // columns
    head, first = code.unit // strips, (code.unit % strips) * (columns * 4)
    state = code.task.state + head * (heads.key_dim * heads.value_dim * 4) + first
    room = code.room(heads.key_dim * columns * 4)
    vectors = range(0, columns * 4, LANES * 4)
    with code.loop(0, heads.key_dim) as index:
        for at in vectors:
            value = code.load(state, index * (heads.value_dim * 4) + at, F32S)
            code.store(value, room, index * (columns * 4) + at)
    key_head = head // (heads.num_heads // heads.num_key_heads)
    query = code.task.mixed + key_head * (heads.key_dim * 4)
    key = query + (heads.num_key_heads * heads.key_dim * 4)
    value = code.task.mixed + (2 * heads.num_key_heads * heads.key_dim * 4)
    value = value + head * (heads.value_dim * 4) + first
    out = code.task.out + head * (heads.value_dim * 4) + first
    predictions = [code.variable(code.floats(0.0)) for _ in vectors]
    with code.loop(0, heads.key_dim) as index:
        k = code.spread(code.load(key, index * 4, F32))
        for at, total in zip(vectors, predictions, strict=True):
            total.set(total.get() + k * code.load(room, index * (columns * 4) + at, F32S))
    last = code.header(Header.NUM_ROWS) - 1
    with code.loop(0, last + 1) as row:
        after = code.least(row + 1, last) * (form.num_channels * 4)
        offset = row * (form.num_channels * 4)
        addresses = (query + offset, key + offset, key + after)
        factors = [
            code.spread(code.load(of_rows, (row * heads.num_heads + head) * 4, F32))
            for of_rows in (code.task.steps, code.task.betas)
        ]
        readings = _step(code, form, room, addresses, value + offset, factors, predictions)
        at_row = row * (heads.num_heads * heads.value_dim * 4)
        for at, reading in zip(vectors, readings, strict=True):
            code.store(reading, out, at_row + at)
    with code.loop(0, heads.key_dim) as index:
        for at in vectors:
            number = code.load(room, index * (columns * 4) + at, F32S)
            code.store(number, state, index * (heads.value_dim * 4) + at)


def _step(
    code: Code,
    form: RowsForm,
    room: Value,
    addresses: Sequence[Value],
    value: Value,
    factors: Sequence[Value],
    predictions: Sequence[Variable],
) -> list[Value]:
    """Change the columns of a state by one row; return what its query reads of them.

    `predictions` are what the row's key reads of them before, and become what the next row's reads.
    """
    decay, beta = factors
    row_bytes = form._columns * 4
    vectors = range(0, row_bytes, LANES * 4)
    changes = [
        (code.load(value, at, F32S) - total.get() * decay) * beta
        for at, total in zip(vectors, predictions, strict=True)
    ]
    readings = [code.variable(code.floats(0.0)) for _ in vectors]
    for total in predictions:
        total.set(code.floats(0.0))
    with code.loop(0, form.heads.key_dim) as index:
        q, k, next_k = (code.spread(code.load(each, index * 4, F32)) for each in addresses)
        parts = zip(vectors, changes, readings, predictions, strict=True)
        for at, change, reading, prediction in parts:
            place = index * row_bytes + at
            new = code.load(room, place, F32S) * decay + k * change
            code.store(new, room, place)
            reading.set(reading.get() + q * new)
            prediction.set(prediction.get() + next_k * new)
    return [total.get() for total in readings]


@kernel("delta outputs", DeltaRowsTask)
def outputs_kernel(code: Code, form: RowsForm) -> None:
    """Write the kernel of the norms and gates. Units: rows."""
    heads = form.heads
    row_bytes = heads.num_heads * heads.value_dim * 4
    with code.loop(0, heads.num_heads) as head:
        offset = code.unit * row_bytes + head * (heads.value_dim * 4)
        write_gated_norm(code, heads, offset, code.task.out + offset)
