"""The state of a Mamba-2 layer in a step, behind its convolution, and the norm of what it says.

Each head decays its state S [head dim, state size], adds its input x [head dim] times B, and reads
it by C; what is read is gated. B and C [state size] are those of a group of heads. A unit is a head
of a sequence, whose rows it computes one after another:

    step = softplus(dt + bias);  S = exp(rate * step) * S + (step * x) B
    out = (S C + D * x) * silu(z)

The state is changed in place.
"""

from dataclasses import dataclass

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import exp, sigmoid, softplus
from kvchat_kernels.cpu.norms import write_norm
from kvchat_kernels.cpu.step import InputsTask, StateRow, rows_of_state
from kvchat_kernels.cpu.task import Memory, Task

# Rows of a state that are computed at once, and share what is loaded of B and C.
_ROWS = 4


class MambaTask(InputsTask):
    """The state's step. All are float32; the shapes are those of one row. The first three are parts
    of `inputs`.

    mixed       x [heads, head dim], B and C [groups, state size], one after another
    gates       [heads, head dim]
    steps       [heads], before the softplus
    step_bias   [heads], added to `steps`
    rates       [heads], what a step is multiplied with: the logarithm of the decay
    skips       [heads], D
    out         [heads, head dim]
    state       bytes from the beginning of a sequence's state to [heads, head dim, state size]
    """

    mixed: Memory
    gates: Memory
    steps: Memory
    step_bias: Memory
    rates: Memory
    skips: Memory
    out: Memory
    state: int


class GroupNormTask(Task):
    """The norm, float32: `x` is [rows, num_groups, width], `weight` is of a row."""

    x: Memory
    weight: Memory
    width: int
    epsilon: float
    num_groups: int


@dataclass(frozen=True, slots=True)
class MambaForm:
    """Sizes of a layer. Dims are multiples of 8, and heads of groups."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int


@kernel("mamba", MambaTask)
def mamba_kernel(code: Code, form: MambaForm) -> None:
    number, head = code.unit // form.num_heads, code.unit % form.num_heads
    size = form.head_dim * form.state_size * 4
    room, unread = code.room(size), code.room(form.head_dim * 4)
    with rows_of_state(code, number, code.task.state + head * size, room) as row:
        _write_step(code, form, row, head, unread)


def _write_step(code: Code, form: MambaForm, of_step: StateRow, head: Value, unread: Value) -> None:
    """Write a row's step; what is read of an earlier guess goes to `unread`."""
    width, offset = form.head_dim * 4, of_step.offset
    mixed = code.task.mixed + offset
    x = mixed + head * width
    group = head // (form.num_heads // form.num_groups)
    b = mixed + form.num_heads * width + group * (form.state_size * 4)
    c = b + form.num_groups * (form.state_size * 4)
    out = code.task.out + (of_step.row * form.num_heads + head) * width
    out = code.select(of_step.is_earlier, unread, out)
    step = code.spread(code.load(code.task.steps + offset, head * 4, F32))
    bias, rate, skip = (
        code.spread(code.load(of_heads, head * 4, F32))
        for of_heads in (code.task.step_bias, code.task.rates, code.task.skips)
    )
    step = softplus(code, step + bias)
    decay = exp(code, rate * step)
    with code.loop(0, form.head_dim, _ROWS) as row:
        added = [
            code.spread(code.load(x, (row + number) * 4, F32)) * step for number in range(_ROWS)
        ]
        at_row = row * (form.state_size * 4)
        states = of_step.before + at_row, of_step.after + at_row
        _write_rows(code, form, states, (b, c), decay, added, out, row)
    gates = code.task.gates + offset + head * width
    with code.loop(0, form.head_dim, LANES) as column:
        at = column * 4
        gate = code.load(gates, at, F32S)
        total = code.load(out, at, F32S) + code.load(x, at, F32S) * skip
        code.store(total * gate * sigmoid(code, gate), out, at)


def _write_rows(
    code: Code,
    form: MambaForm,
    states: tuple[Value, Value],
    of_group: tuple[Value, Value],
    decay: Value,
    added: list[Value],
    out: Value,
    row: Value,
) -> None:
    """Write: some rows of a state take their step, and what C reads of each goes to `out`.

    `states` are where they lie before and after it.
    """
    (before, after), (b, c) = states, of_group
    totals = [code.variable(code.floats(0.0)) for _ in added]
    with code.loop(0, form.state_size, LANES) as column:
        at = column * 4
        of_b, of_c = code.load(b, at, F32S), code.load(c, at, F32S)
        for number, (factor, total) in enumerate(zip(added, totals, strict=True)):
            offset = at + number * (form.state_size * 4)
            new = code.load(before, offset, F32S) * decay + factor * of_b
            code.store(new, after, offset)
            total.set(total.get() + new * of_c)
    for number, total in enumerate(totals):
        code.store(code.total(total.get()), out, (row + number) * 4)


@kernel("group norm", GroupNormTask)
def group_norm_kernel(code: Code) -> None:
    """Write the kernel that norms each group of a row in place. Units: rows."""
    width, num_groups = code.task.width, code.task.num_groups
    row = code.task.x + code.unit * num_groups * width * 4
    write_group_norms(code, row, code.task.weight, width, num_groups)


def write_group_norms(
    code: Code, row: Value, weights: Value, width: Value, num_groups: Value | int
) -> None:
    """Write: norm each group of a row, of `width` floats, in place."""
    with code.loop(0, num_groups) as group:
        offset = group * width * 4
        write_norm(code, row + offset, width, weights + offset)
