"""The states of RWKV's layers in a step: rows mixed with those before them, and averages over time.

A half of a layer mixes each of its rows with the row before, once for each matrix that reads it:

    mixed = mix * x + (1 - mix) * x of the row before

Time mixing makes keys k, values v and receptances r of that, and averages the values of all rows
with weights that decay by a rate w of each channel. The newest has a bonus u:

    read = (exp(m - t) S + exp(k + u - t) v) / (exp(m - t) T + exp(k + u - t)),  t = max(m, k + u)
    S, T, m = exp(m + w - t) S + exp(k - t) v,  exp(m + w - t) T + exp(k - t),  t = max(m + w, k)
    out = sigmoid(r) * read

A unit is a run of channels of a sequence, whose rows it computes one after another. The states are
changed in place.
"""

from kvchat_kernels.cpu.code import F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import Stored, exp, load_floats, sigmoid, store_floats
from kvchat_kernels.cpu.step import InputsTask, StateRow, rows_of_state
from kvchat_kernels.cpu.task import Memory

# Channels of a unit of averages, which take four exponentials each, and of a unit of mixed rows.
_AVERAGED, _SHIFTED = 128, 512
# The largest exponent where there is no row yet.
_LEAST = -1e30


class ShiftTask(InputsTask):
    """Rows are float32; `inputs` and what is mixed of them are [rows, width].

    mixes    [two or three, width], of `keys`, `receptances` and `values`, in this order
    state    bytes from the beginning of a sequence's state to [width], the newest row
    """

    width: int
    mixes: Memory
    state: int
    keys: Memory
    receptances: Memory
    values: Memory | None = None


class AverageTask(InputsTask):
    """All are float32; the shapes are those of one row.

    inputs   keys [channels], values [channels]
    gates    [channels], receptances before the sigmoid; None: `out` is what is read alone
    rates    [channels], what is added to the exponents of earlier rows
    bonuses  [channels]
    out      [channels]
    state    bytes from the beginning of a sequence's state to [3, channels]: S, T, m
    """

    gates: Memory | None = None
    rates: Memory
    bonuses: Memory
    out: Memory
    state: int


def num_units(num_channels: int, *, are_mixed: bool = False) -> int:
    """Return the units of a sequence, of averages or of mixed rows."""
    return -(-num_channels // (_SHIFTED if are_mixed else _AVERAGED))


@kernel("shift", ShiftTask)
def shift_kernel(code: Code, stored: Stored, has_values: bool) -> None:
    """Write the kernel that mixes rows with those before them. Units: as of `num_units`."""
    task = code.task
    runs = (task.width + (_SHIFTED - 1)) // _SHIFTED
    start = code.unit % runs * _SHIFTED
    end = code.least(start + _SHIFTED, task.width)
    room = code.room(_SHIFTED * stored.num_bytes) - start * stored.num_bytes
    unread = code.room(_SHIFTED * 4) - start * 4
    outs = (task.keys, task.receptances, *((task.values,) if has_values else ()))
    with rows_of_state(code, code.unit // runs, task.state, room) as row:
        at_row = row.row * task.width * 4
        places = [code.select(row.is_earlier, unread, out + at_row) for out in outs]
        with code.loop(start, end, LANES) as channel:
            at, of_state = channel * 4, channel * stored.num_bytes
            new = code.load(task.inputs + row.offset, at, F32S)
            old = load_floats(code, row.before, of_state, stored)
            store_floats(code, new, row.after, of_state, stored)
            for number, place in enumerate(places):
                mix = code.load(task.mixes + task.width * (4 * number), at, F32S)
                code.store(new * mix + old * (code.floats(1.0) - mix), place, at)


@kernel("average", AverageTask)
def average_kernel(code: Code, num_channels: int, is_gated: bool = True) -> None:
    """Write the kernel of the averages. Units: as of `num_units`."""
    runs = num_units(num_channels)
    start = code.unit % runs * _AVERAGED
    run = start, code.least(start + _AVERAGED, code.whole(num_channels))
    room, unread = code.room(3 * num_channels * 4), code.room(_AVERAGED * 4) - start * 4
    with rows_of_state(code, code.unit // runs, code.task.state, room) as row:
        _write_row(code, num_channels * 4, row, run, unread, is_gated)


def _write_row(
    code: Code,
    width: int,
    row: StateRow,
    run: tuple[Value, Value],
    unread: Value,
    is_gated: bool,
) -> None:
    """Write a row's averages; what is read of an earlier guess goes to `unread`."""
    task, x = code.task, code.task.inputs + row.offset
    at_row = code.select(row.is_earlier, code.whole(0), row.row * width)
    out = code.select(row.is_earlier, unread, task.out + at_row)
    with code.loop(*run, LANES) as channel:
        at = channel * 4
        key, value = code.load(x, at, F32S), code.load(x + width, at, F32S)
        total, weight, most = (code.load(row.before + part * width, at, F32S) for part in range(3))
        # A weight is 1 or more once there was a row: that of the largest exponent is.
        most = code.select(weight > 0.0, most, code.floats(_LEAST))
        bonus, rate = code.load(task.bonuses, at, F32S), code.load(task.rates, at, F32S)
        read, of_read, _ = _added(code, (total, weight, most), key + bonus, value)
        read = read / of_read
        if is_gated:
            read = read * sigmoid(code, code.load(task.gates + at_row, at, F32S))
        code.store(read, out, at)
        new = _added(code, (total, weight, most + rate), key, value)
        for part, numbers in enumerate(new):
            code.store(numbers, row.after + part * width, at)


def _added(
    code: Code, state: tuple[Value, Value, Value], exponent: Value, value: Value
) -> tuple[Value, Value, Value]:
    """Return the sum, the sum of weights and the largest exponent with a value more."""
    total, weight, most = state
    largest = code.greatest(most, exponent)
    old, new = exp(code, most - largest), exp(code, exponent - largest)
    return total * old + value * new, weight * old + new, largest
