"""The state of a Mamba-1 layer in a step, behind its convolution.

Each channel has a state S [state size], whose numbers decay by rates of their own. It adds its
input x times B, and is read by C; what is read is gated. B, C and the steps are made of all
channels' inputs. A unit is a run of channels of a sequence, whose rows it computes one after
another:

    step = softplus(dt);  S = exp(step * rates) * S + (step * x) B
    out = (S C + D * x) * silu(z)

The state is changed in place.
"""

from dataclasses import dataclass

from kvchat_kernels.cpu.code import F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import copy_floats, exp, sigmoid, softplus
from kvchat_kernels.cpu.norms import write_norm
from kvchat_kernels.cpu.step import InputsTask, StateRow, rows_of_state
from kvchat_kernels.cpu.task import Memory, Task

# Channels of a unit: with 16 numbers each, their states fit into the fastest cache.
UNIT_CHANNELS = 64


class SelectiveInputsTask(Task):
    """What a row's state reads is put together. All are float32.

    x         [channels], convolved; a row follows another after `x_stride` bytes
    parts     [rows, rank + 2 * state size]: what steps are made of, B and C
    weight    [rank + 2 * state size], of the norm of each of the three
    epsilon   of the norms
    latents   [rows, width], whose first `rank` numbers are what steps are made of
    inputs    [rows, 2 * channels + 2 * state size], as of SelectiveTask, but for the steps
    """

    x: Memory
    x_stride: int
    parts: Memory
    weight: Memory | None = None
    epsilon: float = 0.0
    latents: Memory
    latents_width: int
    inputs: Memory


class SelectiveTask(InputsTask):
    """The state's step. All are float32; the shapes are those of one row.

    inputs   x [channels], steps before the softplus [channels], B and C [state size]
    gates    [channels]; a row follows another after `gates_stride` bytes
    rates    [channels, state size], what a step is multiplied with: the logarithm of the decay
    skips    [channels], D
    out      [channels]; a row follows another after `out_stride` bytes
    state    bytes from the beginning of a sequence's state to [channels, state size]
    """

    gates: Memory
    gates_stride: int
    rates: Memory
    skips: Memory
    out: Memory
    out_stride: int
    state: int


@dataclass(frozen=True, slots=True)
class SelectiveForm:
    """Sizes of a layer, multiples of 8; steps are made of `rank` numbers."""

    num_channels: int
    state_size: int
    rank: int


@kernel("selective inputs", SelectiveInputsTask)
def selective_inputs_kernel(code: Code, form: SelectiveForm, is_normed: bool) -> None:
    """Write the kernel that norms the parts, or copies them, beside the inputs. Units: rows."""
    task, channels, size = code.task, form.num_channels, form.state_size
    inputs = task.inputs + code.unit * (8 * (channels + size))
    x, parts = (
        task.x + code.unit * task.x_stride,
        task.parts + code.unit * ((form.rank + 2 * size) * 4),
    )
    copy_floats(code, x, inputs, channels)
    of_state = inputs + 8 * channels
    latents = task.latents + code.unit * task.latents_width * 4
    places = ((0, form.rank, latents), (form.rank, size, of_state))
    for first, width, out in (*places, (form.rank + size, size, of_state + size * 4)):
        part = parts + first * 4
        if is_normed:
            write_norm(code, part, code.whole(width), task.weight + first * 4, out)
        else:
            copy_floats(code, part, out, width)


@kernel("selective", SelectiveTask)
def selective_kernel(code: Code, form: SelectiveForm) -> None:
    """Write the kernel of a step. Units: `num_units` for each sequence."""
    runs, of_channel = num_units(form), form.state_size * 4
    start = code.unit % runs * UNIT_CHANNELS
    run = start, code.least(start + UNIT_CHANNELS, form.num_channels)
    room = code.room(UNIT_CHANNELS * of_channel) - start * of_channel
    unread = code.room(UNIT_CHANNELS * 4) - start * 4
    with rows_of_state(code, code.unit // runs, code.task.state, room) as row:
        _write_row(code, form, row, run, unread)


def num_units(form: SelectiveForm) -> int:
    """Return the units of a sequence."""
    return -(-form.num_channels // UNIT_CHANNELS)


def _write_row(
    code: Code, form: SelectiveForm, row: StateRow, run: tuple[Value, Value], unread: Value
) -> None:
    """Write a row's step; what is read of an earlier guess goes to `unread`."""
    task, width = code.task, form.num_channels * 4
    x = task.inputs + row.offset
    steps, of_state = x + width, x + 2 * width
    gates = task.gates + code.select(row.is_earlier, code.whole(0), row.row * task.gates_stride)
    out = code.select(row.is_earlier, unread, task.out + row.row * task.out_stride)
    with code.loop(*run, LANES) as channel:
        at = channel * 4
        step, value = softplus(code, code.load(steps, at, F32S)), code.load(x, at, F32S)
        read = _read(code, form, row, of_state, channel, (step, step * value))
        gate = code.load(gates, at, F32S)
        total = read + value * code.load(task.skips, at, F32S)
        code.store(total * gate * sigmoid(code, gate), out, at)


def _read(
    code: Code,
    form: SelectiveForm,
    row: StateRow,
    of_state: Value,
    channel: Value,
    factors: tuple[Value, Value],
) -> Value:
    """Write the steps of 8 channels' states; return what C reads of each.

    `factors` are the channels' steps, and what B is multiplied with.
    """
    of_channel = form.state_size * 4
    lanes = [[code.spread(code.lane(each, lane)) for each in factors] for lane in range(LANES)]
    totals = [code.variable(code.floats(0.0)) for _ in lanes]
    first = channel * of_channel
    with code.loop(0, of_channel, LANES * 4) as at:
        b, c = code.load(of_state, at, F32S), code.load(of_state + of_channel, at, F32S)
        for lane, ((step, added), total) in enumerate(zip(lanes, totals, strict=True)):
            place = first + at + lane * of_channel
            decay = exp(code, code.load(code.task.rates, place, F32S) * step)
            new = code.load(row.before, place, F32S) * decay + added * b
            code.store(new, row.after, place)
            total.set(total.get() + new * c)
    return code.gathered([code.total(total.get()) for total in totals])
