"""The state of a Mamba-2 layer in a step, behind its convolution, and the norm of what it says.

Each head decays its state S [head dim, state size], adds its input x [head dim] times B, and reads
it by C; what is read is gated. B and C [state size] are those of a group of heads. A unit is a head
of a sequence, whose rows it computes one after another:

    step = softplus(dt + bias);  S = exp(rate * step) * S + (step * x) B
    out = (S C + D * x) * silu(z)

The state is changed in place. `recurrent_reference.py` has the same in torch.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Kernel, Value
from kvchat_kernels.cpu.maths import exp, sigmoid, softplus
from kvchat_kernels.cpu.norms import inverse_rms
from kvchat_kernels.cpu.step import read_sequence

# Rows of a state that are computed at once, and share what is loaded of B and C.
_ROWS = 4


class Place(IntEnum):
    """The task of the state's step. All are float32; those of rows are said to be of one.

    MIXED       x [heads, head dim], B and C [groups, state size], one after another
    GATES       [heads, head dim]
    STEPS       [heads], before the softplus
    STEP_BIAS   [heads], added to STEPS
    RATES       [heads], what a step is multiplied with: the logarithm of the decay
    SKIPS       [heads], D
    OUT         [heads, head dim]
    STATE       bytes from the beginning of a sequence's state to [heads, head dim, state size]
    STRIDE      bytes from a row of MIXED, GATES and STEPS to the next; OUT has no gaps
    """

    MIXED = 0
    GATES = 1
    STEPS = 2
    STEP_BIAS = 3
    RATES = 4
    SKIPS = 5
    OUT = 6
    STATE = 7
    STRIDE = 8


class NormPlace(IntEnum):
    """The task of the norm, float32: X is [rows, NUM_GROUPS, WIDTH], WEIGHT is of a row."""

    X = 0
    WEIGHT = 1
    WIDTH = 2
    EPSILON = 3
    NUM_GROUPS = 4


@dataclass(frozen=True, slots=True)
class MambaForm:
    """Sizes of a layer. Dims are multiples of 8, and heads of groups."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int


@cache
def mamba_kernel(form: MambaForm) -> Kernel:
    return Kernel("mamba", (form,), lambda code: _write(code, form))


@cache
def group_norm_kernel() -> Kernel:
    """Return the kernel that norms each group of a row in place. Units: rows."""
    return Kernel("group norm", (), _write_norm)


def _write(code: Code, form: MambaForm) -> None:
    first, end, state = read_sequence(code, code.unit // form.num_heads)
    head = code.unit % form.num_heads
    state = state + code.field(Place.STATE) + head * (form.head_dim * form.state_size * 4)
    with code.loop(first, end) as row:
        _write_step(code, form, row, head, state)


def _write_step(code: Code, form: MambaForm, row_of_step: Value, head: Value, state: Value) -> None:
    width, offset = form.head_dim * 4, row_of_step * code.field(Place.STRIDE)
    mixed = code.field(Place.MIXED) + offset
    x = mixed + head * width
    group = head // (form.num_heads // form.num_groups)
    b = mixed + form.num_heads * width + group * (form.state_size * 4)
    c = b + form.num_groups * (form.state_size * 4)
    out = code.field(Place.OUT) + (row_of_step * form.num_heads + head) * width
    step = code.spread(code.load(code.field(Place.STEPS) + offset, head * 4, F32))
    bias, rate, skip = (
        code.spread(code.load(code.field(place), head * 4, F32))
        for place in (Place.STEP_BIAS, Place.RATES, Place.SKIPS)
    )
    step = softplus(code, step + bias)
    decay = exp(code, rate * step)
    with code.loop(0, form.head_dim, _ROWS) as row:
        added = [
            code.spread(code.load(x, (row + number) * 4, F32)) * step for number in range(_ROWS)
        ]
        _write_rows(code, form, state + row * (form.state_size * 4), (b, c), decay, added, out, row)
    gates = code.field(Place.GATES) + offset + head * width
    with code.loop(0, form.head_dim, LANES) as column:
        at = column * 4
        gate = code.load(gates, at, F32S)
        total = code.load(out, at, F32S) + code.load(x, at, F32S) * skip
        code.store(total * gate * sigmoid(code, gate), out, at)


def _write_rows(
    code: Code,
    form: MambaForm,
    state: Value,
    of_group: tuple[Value, Value],
    decay: Value,
    added: list[Value],
    out: Value,
    row: Value,
) -> None:
    """Write: some rows of a state take their step, and what C reads of each goes to `out`."""
    b, c = of_group
    totals = [code.variable(code.floats(0.0)) for _ in added]
    with code.loop(0, form.state_size, LANES) as column:
        at = column * 4
        of_b, of_c = code.load(b, at, F32S), code.load(c, at, F32S)
        for number, (factor, total) in enumerate(zip(added, totals, strict=True)):
            offset = at + number * (form.state_size * 4)
            new = code.load(state, offset, F32S) * decay + factor * of_b
            code.store(new, state, offset)
            total.set(total.get() + new * of_c)
    for number, total in enumerate(totals):
        code.store(code.total(total.get()), out, (row + number) * 4)


def _write_norm(code: Code) -> None:
    width, num_groups = code.field(NormPlace.WIDTH), code.field(NormPlace.NUM_GROUPS)
    row = code.field(NormPlace.X) + code.unit * num_groups * width * 4
    with code.loop(0, num_groups) as group:
        offset = group * width * 4
        x, weight = row + offset, code.field(NormPlace.WEIGHT) + offset
        factor = code.spread(inverse_rms(code, x, width, code.float_field(NormPlace.EPSILON)))
        with code.loop(0, width, LANES) as column:
            at = column * 4
            normed = code.load(x, at, F32S) * factor * code.load(weight, at, F32S)
            code.store(normed, x, at)
