"""Adds to the residual stream and normalises it. A unit is a row.

stream = (stream + addend') * factor..., out = normed(stream), where addend' may be normed too, as
Gemma and OLMo 2 have it. A norm is x / sqrt(mean(x^2) + epsilon) * weight, all in float32. A
centred one, as Cohere and StarCoder 2 have it, takes the mean from x first, and adds a bias at
last.
"""

from dataclasses import dataclass

from kvchat_kernels.cpu.code import F32, F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import copy_floats, reciprocal_root
from kvchat_kernels.cpu.step import Header
from kvchat_kernels.cpu.task import Memory, Task


class NormTask(Task):
    """Rows of `stream`, `addend` and `out` are `width` float32 each, one after another.

    addend_weight   of the norm of the addend, float32 [width]
    weight          of the norm of the stream
    factor          what the addend is multiplied with
    bias            of a centred norm of the stream, float32 [width]
    stream_factor   what the sum of both is multiplied with
    """

    stream: Memory
    width: int
    addend: Memory | None = None
    addend_weight: Memory | None = None
    weight: Memory | None = None
    out: Memory | None = None
    bias: Memory | None = None
    epsilon: float = 0.0
    factor: float = 1.0
    stream_factor: float = 1.0


class JoinedNormTask(Task):
    """The norm of rows of `one` and of `other` together, [rows, width] float32 each.

    weight, out   float32 [2 * width], [rows, 2 * width]
    """

    one: Memory
    other: Memory
    width: int
    weight: Memory
    epsilon: float
    out: Memory


@dataclass(frozen=True, slots=True)
class NormForm:
    """What a norm kernel does.

    adds          adds the addend to the stream first
    norms_addend  normalises the addend before it is added
    norms         writes the normed stream
    picks         reads and writes the rows of the stream that the header names
    centres       the norm of the stream is a centred one
    scales        multiplies the stream after it has added
    """

    adds: bool
    norms_addend: bool = False
    norms: bool = True
    picks: bool = False
    centres: bool = False
    scales: bool = False


@kernel("norm", NormTask)
def norm_kernel(code: Code, form: NormForm) -> None:
    width = code.task.width
    row = code.unit
    if form.picks:
        row = code.load(code.header(Header.ROWS), code.unit * 8, row.type)
    stream = code.task.stream + row * width * 4
    if form.adds:
        addend = code.task.addend + row * width * 4
        factor = code.spread(code.task.factor)
        if form.norms_addend:
            factor = factor * code.spread(inverse_rms(code, addend, width))
        with code.loop(0, width, LANES) as index:
            value = code.load(addend, index * 4, F32S) * factor
            if form.norms_addend:
                value = value * code.load(code.task.addend_weight, index * 4, F32S)
            value = code.load(stream, index * 4, F32S) + value
            if form.scales:
                value = value * code.spread(code.task.stream_factor)
            code.store(value, stream, index * 4)
    if form.norms:
        out = code.task.out + code.unit * width * 4
        if form.centres:
            _write_centred(code, stream, width, out)
            return
        write_norm(code, stream, width, code.task.weight, out)


def _write_centred(code: Code, address: Value, width: Value, out: Value) -> None:
    total = code.variable(code.floats(0.0))
    with code.loop(0, width, LANES) as index:
        total.set(total.get() + code.load(address, index * 4, F32S))
    count = code.convert("sitofp", width, F32)
    mean = code.spread(code.total(total.get()) / count)
    with code.loop(0, width, LANES) as index:
        code.store(code.load(address, index * 4, F32S) - mean, out, index * 4)
    factor = code.spread(inverse_rms(code, out, width))
    weight, bias = code.task.weight, code.task.bias
    with code.loop(0, width, LANES) as index:
        value = code.load(out, index * 4, F32S) * factor * code.load(weight, index * 4, F32S)
        code.store(value + code.load(bias, index * 4, F32S), out, index * 4)


def write_norm(
    code: Code, x: Value, width: Value, weight: Value | None, out: Value | None = None
) -> None:
    """Write the norm of `width` floats to `out`, or in place; None: without a weight."""
    factor = code.spread(inverse_rms(code, x, width))
    with code.loop(0, width, LANES) as index:
        value = code.load(x, index * 4, F32S) * factor
        if weight is not None:
            value = value * code.load(weight, index * 4, F32S)
        code.store(value, x if out is None else out, index * 4)


def inverse_rms(code: Code, address: Value, width: Value) -> Value:
    """Return 1 / sqrt(mean(x^2) + epsilon) of `width` floats; `epsilon` is of the task."""
    total = code.variable(code.floats(0.0))
    with code.loop(0, width, LANES) as index:
        value = code.load(address, index * 4, F32S)
        total.set(total.get() + value * value)
    count = code.convert("sitofp", width, F32)
    return reciprocal_root(code, code.total(total.get()) / count + code.task.epsilon)


@kernel("joined norm", JoinedNormTask)
def joined_norm_kernel(code: Code) -> None:
    """Write the kernel that norms two rows as if one lay behind the other. Units: rows."""
    width, row_bytes = code.task.width, code.task.width * 4
    out = code.task.out + code.unit * row_bytes * 2
    for number, rows in enumerate((code.task.one, code.task.other)):
        copy_floats(code, rows + code.unit * row_bytes, out + row_bytes * number, width)
    write_norm(code, out, width * 2, code.task.weight)
