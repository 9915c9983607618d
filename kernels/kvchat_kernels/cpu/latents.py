"""Queries, keys and values that are made of latents (DeepSeek V2): shorter vectors of each row.

Of a head's query and key the last numbers are rotated, those of the key are the same in all heads.
"""

from dataclasses import dataclass

from kvchat_kernels.cpu.code import F32S, LANES, Code, Value, kernel
from kvchat_kernels.cpu.maths import copy_floats
from kvchat_kernels.cpu.norms import write_norm
from kvchat_kernels.cpu.task import Memory, Task


class LatentNormTask(Task):
    """Norms the first `width` floats of rows of `stride` bytes; `out` is float32 [rows, width]."""

    x: Memory
    stride: int
    width: int
    weight: Memory
    epsilon: float
    out: Memory


class LatentHeadsTask(Task):
    """The heads of rows, in float32.

    qkv               rows of `qkv_stride` bytes: Q, whose last part is yet to be rotated, and
                      room for K and V
    expanded          [rows, heads, plain + value dim]: the first part of each key, then its value
    key               rows of `key_stride` bytes: the last part of all keys, yet to be rotated
    cosines, sines    [rows, rotated / 2]
    """

    qkv: Memory
    qkv_stride: int
    expanded: Memory
    key: Memory
    key_stride: int
    cosines: Memory | None = None
    sines: Memory | None = None


@dataclass(frozen=True, slots=True)
class LatentForm:
    """Sizes are multiples of 8, `rotated` of 16: a key has `plain` and `rotated` numbers.

    is_turned          false where nothing is rotated
    turns_neighbours   numbers 2i and 2i + 1 turn by the angle i, else those of both halves
    parts_neighbours   they then lie in both halves
    """

    num_heads: int
    plain: int
    rotated: int
    value_dim: int
    is_turned: bool
    turns_neighbours: bool
    parts_neighbours: bool


@kernel("latent norm", LatentNormTask)
def latent_norm_kernel(code: Code) -> None:
    """Write the kernel that norms latents. Units: rows."""
    width, task = code.task.width, code.task
    x, out = task.x + code.unit * task.stride, task.out + code.unit * width * 4
    write_norm(code, x, width, task.weight, out)


@kernel("latent heads", LatentHeadsTask)
def latent_heads_kernel(code: Code, form: LatentForm) -> None:
    """Write the kernel that rotates parts of Q and K, and writes K and V. Units: rows."""
    task, heads = code.task, form.num_heads
    query = task.qkv + code.unit * task.qkv_stride
    key_bytes, value_bytes, plain = (
        (form.plain + form.rotated) * 4,
        form.value_dim * 4,
        form.plain * 4,
    )
    keys = query + heads * key_bytes
    values = keys + heads * key_bytes
    expanded = task.expanded + code.unit * (heads * (plain + value_bytes))
    of_all, of_one = code.room(form.rotated * 4), code.room(form.rotated * 4)
    key_part = task.key + code.unit * task.key_stride
    if form.is_turned:
        _write_turned(code, form, key_part, of_all)
    else:
        of_all = key_part
    with code.loop(0, heads) as head:
        if form.is_turned:
            last = query + head * key_bytes + plain
            _write_turned(code, form, last, of_one)
            copy_floats(code, of_one, last, form.rotated)
        source = expanded + head * (plain + value_bytes)
        key = keys + head * key_bytes
        copy_floats(code, source, key, form.plain)
        copy_floats(code, of_all, key + plain, form.rotated)
        copy_floats(code, source + plain, values + head * value_bytes, form.value_dim)


def _write_turned(code: Code, form: LatentForm, source: Value, target: Value) -> None:
    half = form.rotated // 2
    angles = code.unit * (half * 4)
    with code.loop(0, half, LANES) as index:
        cos, sin = (
            code.load(at + angles, index * 4, F32S) for at in (code.task.cosines, code.task.sines)
        )
        if form.turns_neighbours:
            lower, upper = (code.load(source, index * 8 + part, F32S) for part in (0, 4 * LANES))
            one, other = (code.shuffled(lower, upper, range(part, 2 * LANES, 2)) for part in (0, 1))
        else:
            one, other = (code.load(source, index * 4 + part, F32S) for part in (0, 4 * half))
        first, second = one * cos - other * sin, other * cos + one * sin
        if form.turns_neighbours and not form.parts_neighbours:
            for part in (0, 1):
                lanes = [part * LANES // 2 + lane // 2 + lane % 2 * LANES for lane in range(LANES)]
                value = code.shuffled(first, second, lanes)
                code.store(value, target, index * 8 + part * 4 * LANES)
        else:
            code.store(first, target, index * 4)
            code.store(second, target, index * 4 + 4 * half)
