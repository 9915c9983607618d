"""A short convolution: each channel's last inputs, weighted and summed up.

The kernel here is a step's; those of long prompts write theirs by `write_convolved`.

A unit is a run of channels of a sequence, whose rows it computes one after another. The state, the
channels' last inputs, gets the new inputs in place.
"""

from dataclasses import dataclass
from functools import reduce

from llvmlite import ir

from kvchat_kernels.cpu.code import F32, F32S, I16, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import Stored, as_floats, as_stored, sigmoid
from kvchat_kernels.cpu.step import InputsTask, StateRow, rows_of_state
from kvchat_kernels.cpu.task import Memory

# Channels of a unit.
UNIT_CHANNELS = 512


class ConvolutionTask(InputsTask):
    """All are float32 but the state.

    x         [rows, channels], of `inputs`; of a gated one [rows, 3, channels]: the input's factor,
              the sum's factor, the input
    weights   [taps, channels]
    bias      [channels]
    state     bytes from the beginning of a sequence's state to [channels, taps]
    out       [rows, channels]; it may be `x` if that is not gated. Of earlier guesses it is `x`
    out_stride   bytes from a row of `out` to the next
    """

    x: Memory
    weights: Memory
    channels: int
    state: int
    out: Memory
    out_stride: int
    bias: Memory | None = None


@dataclass(frozen=True, slots=True)
class ConvolutionForm:
    """What a convolution does: a sum over `num_taps` inputs, the state's dtype, silu of the sum."""

    num_taps: int
    stored: Stored
    has_bias: bool
    is_activated: bool
    is_gated: bool


@kernel("convolution", ConvolutionTask)
def convolution_kernel(code: Code, form: ConvolutionForm) -> None:
    channels = code.task.channels
    num_runs = (channels + (UNIT_CHANNELS - 1)) // UNIT_CHANNELS
    start = (code.unit % num_runs) * UNIT_CHANNELS
    run = start, code.least(start + UNIT_CHANNELS, channels)
    of_channel = form.num_taps * form.stored.num_bytes
    room = code.room(UNIT_CHANNELS * of_channel) - start * of_channel
    with rows_of_state(code, code.unit // num_runs, code.task.state, room) as row:
        _write_row(code, form, row, run)


def _write_row(code: Code, form: ConvolutionForm, row: StateRow, run: tuple[Value, Value]) -> None:
    channels = code.task.channels
    x = code.task.x + row.offset
    out = code.select(row.is_earlier, x, code.task.out + row.row * code.task.out_stride)
    with code.loop(*run, LANES) as channel:
        at = channel * 4
        new = code.load(x, at, F32S)
        if form.is_gated:
            new = new * code.load(x + channels * 8, at, F32S)
        total = _summed(code, form, row, channel, new)
        if form.is_activated:
            total = total * sigmoid(code, total)
        if form.is_gated:
            total = total * code.load(x + channels * 4, at, F32S)
        code.store(total, out, at)


def _summed(code: Code, form: ConvolutionForm, row: StateRow, channel: Value, new: Value) -> Value:
    """Return the sums of 8 channels; each channel's inputs move by one, and `new` comes last."""
    num_taps, channels = form.num_taps, code.task.channels
    offset = channel * (num_taps * form.stored.num_bytes)
    number = F32 if form.stored is Stored.FLOAT else I16
    old = code.load(row.before, offset, ir.VectorType(number, LANES * num_taps))
    newest = code.picked(as_stored(code, new, form.stored), [*range(LANES)] * num_taps)
    lanes: list[int] = []
    for lane in range(LANES):
        first = lane * num_taps
        lanes += [*range(first + 1, first + num_taps), LANES * num_taps + lane]
    code.store(code.shuffled(old, newest, lanes), row.after, offset)
    weights, at = code.task.weights, channel * 4
    total = new * code.load(weights + channels * (4 * (num_taps - 1)), at, F32S)
    for tap in range(num_taps - 1):
        of_tap = code.picked(old, [lane * num_taps + tap + 1 for lane in range(LANES)])
        weight = code.load(weights + channels * (4 * tap), at, F32S)
        total = total + as_floats(code, of_tap, form.stored) * weight
    if form.has_bias:
        total = total + code.load(code.task.bias, at, F32S)
    return total


def write_convolved(
    code: Code,
    x: Value,
    weights: Value,
    bias: Value | None,
    out: Value,
    size: tuple[int, int],
) -> None:
    """Write: silu of the sums over `size`, (taps, channels), of the inputs from row `x` on."""
    num_taps, num_channels = size
    row_bytes = num_channels * 4
    with code.loop(0, num_channels, LANES) as channel:
        at = channel * 4
        products = [
            code.load(x, at + tap * row_bytes, F32S)
            * code.load(weights, at + tap * row_bytes, F32S)
            for tap in range(num_taps)
        ]
        total = reduce(lambda one, other: one + other, products)
        if bias is not None:
            total = total + code.load(bias, at, F32S)
        code.store(total * sigmoid(code, total), out, at)
