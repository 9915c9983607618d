"""Many rows of one sequence of a Mamba-2 layer, one after another: a prompt.

It is what `convolution.py` and `mamba.py` do for each row, in three kernels: the convolution with
what else a row needs before the state; the state's steps with the gates, where the rows of a head's
state are divided among units, since no row reads another; the norms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.convolution import write_convolved
from kvchat_kernels.cpu.mamba import MambaForm, write_group_norms
from kvchat_kernels.cpu.maths import exp, sigmoid, softplus
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task

# Rows of a state that a unit takes: with 128 numbers in each, they fit into the fastest cache.
_ROWS = 4 * LANES


class MambaRowsTask(Task):
    """The task of all three. All are float32 and contiguous; rows are the header's.

    x            [taps - 1 + rows, channels], the inputs of the convolution, the past ones first
    weights      [taps, channels]
    bias         [channels]
    mixed        [rows, channels]: x [heads, head dim], B and C [groups, state size]
    steps        [rows, heads], replaced by their softplus, at least `least` and at most `most`
    decays       [rows, heads]
    step_bias, rates, skips   [heads], as in `MambaTask`
    state        [heads, head dim, state size]
    gates        [rows, heads, head dim]
    norm         [heads, head dim]
    epsilon      of the norm
    out          [rows, heads, head dim]
    """

    x: Memory
    weights: Memory
    bias: Memory | None = None
    mixed: Memory
    steps: Memory
    decays: Memory
    step_bias: Memory
    rates: Memory
    skips: Memory
    state: Memory
    gates: Memory
    norm: Memory | None = None
    epsilon: float = 0.0
    out: Memory
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class RowsForm:
    """The sizes, and the convolution: how many inputs it sums up, and whether it has a bias."""

    sizes: MambaForm
    num_taps: int
    has_bias: bool

    @property
    def num_channels(self) -> int:
        sizes = self.sizes
        return sizes.num_heads * sizes.head_dim + 2 * sizes.num_groups * sizes.state_size

    @property
    def num_units(self) -> int:
        """The units of the state's steps."""
        return self.sizes.num_heads * (self.sizes.head_dim // self.rows_of_unit)

    @property
    def rows_of_unit(self) -> int:
        return _ROWS if self.sizes.head_dim % _ROWS == 0 else LANES


@kernel("mamba inputs", MambaRowsTask)
def inputs_kernel(code: Code, form: RowsForm) -> None:
    """Write the kernel of the convolution and the decays. Units: rows."""
    offset = code.unit * (form.num_channels * 4)
    x, mixed = (rows + offset for rows in (code.task.x, code.task.mixed))
    bias = code.task.bias if form.has_bias else None
    write_convolved(code, x, code.task.weights, bias, mixed, (form.num_taps, form.num_channels))
    num_heads = form.sizes.num_heads
    with code.loop(0, num_heads) as head:
        at = (code.unit * num_heads + head) * 4
        step_bias, rate = (
            code.spread(code.load(of_heads, head * 4, F32))
            for of_heads in (code.task.step_bias, code.task.rates)
        )
        step = code.spread(code.load(code.task.steps, at, F32)) + step_bias
        least, most = (code.spread(code.task.least), code.spread(code.task.most))
        step = code.least(code.greatest(softplus(code, step), least), most)
        code.store(code.lane(step, 0), code.task.steps, at)
        code.store(code.lane(exp(code, rate * step), 0), code.task.decays, at)


@kernel("mamba steps", MambaRowsTask)
def steps_kernel(code: Code, form: RowsForm) -> None:
    """Copy the unit's rows of a state, turned, take all steps, and copy them back.

    Units: `form.num_units`.
    """
    sizes, width = form.sizes, form.rows_of_unit
    strips = sizes.head_dim // width
    head, first = code.unit // strips, (code.unit % strips) * width
    state = code.task.state
    state = state + (head * sizes.head_dim + first) * (sizes.state_size * 4)
    room = code.room(sizes.state_size * width * 4)
    with code.loop(0, width) as row, code.loop(0, sizes.state_size) as column:
        number = code.load(state, (row * sizes.state_size + column) * 4, F32)
        code.store(number, room, (column * width + row) * 4)
    inside = (head * sizes.head_dim + first) * 4
    group = head // (sizes.num_heads // sizes.num_groups)
    of_b = group * (sizes.state_size * 4) + sizes.num_heads * sizes.head_dim * 4
    of_c = of_b + sizes.num_groups * sizes.state_size * 4
    with code.loop(0, code.header(Header.NUM_ROWS)) as row:
        mixed = code.task.mixed + row * (form.num_channels * 4)
        addresses = (mixed + inside, mixed + of_b, mixed + of_c)
        at_head = (row * sizes.num_heads + head) * 4
        factors = [
            code.spread(code.load(of_rows, at_head, F32))
            for of_rows in (code.task.steps, code.task.decays)
        ]
        offset = row * (sizes.num_heads * sizes.head_dim * 4) + inside
        read = _step(code, form, room, addresses, factors)
        skip = code.spread(code.load(code.task.skips, head * 4, F32))
        for at, total in zip(range(0, width * 4, LANES * 4), read, strict=True):
            gate = code.load(code.task.gates, offset + at, F32S)
            total = total + code.load(addresses[0], at, F32S) * skip
            code.store(total * gate * sigmoid(code, gate), code.task.out, offset + at)
    with code.loop(0, width) as row, code.loop(0, sizes.state_size) as column:
        number = code.load(room, (column * width + row) * 4, F32)
        code.store(number, state, (row * sizes.state_size + column) * 4)


def _step(
    code: Code,
    form: RowsForm,
    room: Value,
    addresses: Sequence[Value],
    factors: Sequence[Value],
) -> list[Value]:
    """Change the turned rows of a state by one step; return what C reads of them."""
    x, b, c = addresses
    step, decay = factors
    row_bytes = form.rows_of_unit * 4
    vectors = range(0, row_bytes, LANES * 4)
    added = [code.load(x, at, F32S) * step for at in vectors]
    read = [code.variable(code.floats(0.0)) for _ in vectors]
    with code.loop(0, form.sizes.state_size) as index:
        of_b, of_c = (code.spread(code.load(each, index * 4, F32)) for each in (b, c))
        for at, change, total in zip(vectors, added, read, strict=True):
            place = index * row_bytes + at
            new = code.load(room, place, F32S) * decay + of_b * change
            code.store(new, room, place)
            total.set(total.get() + of_c * new)
    return [total.get() for total in read]


@kernel("mamba norms", MambaRowsTask)
def norms_kernel(code: Code, form: RowsForm) -> None:
    """Write the kernel that norms each group. Units: rows."""
    sizes = form.sizes
    width = sizes.num_heads * sizes.head_dim // sizes.num_groups
    row = code.task.out + code.unit * (sizes.num_groups * width * 4)
    write_group_norms(code, row, code.task.norm, code.whole(width), sizes.num_groups)
