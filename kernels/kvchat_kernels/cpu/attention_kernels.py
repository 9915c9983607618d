"""The kernels of attention: that of parts of a context, and the one that joins a row's parts."""

from functools import cache

from kvchat_kernels.cpu.attention import HIDDEN, AttentionForm, AttentionTask, Part, Record
from kvchat_kernels.cpu.attention_bytes import BytePart
from kvchat_kernels.cpu.code import F32, F32S, I64, LANES, Code, Kernel, Value, kernel
from kvchat_kernels.cpu.maths import Stored, exp, write_turned
from kvchat_kernels.cpu.products import are_wide_floats_faster
from kvchat_kernels.kv_code import KvCode, group_size


@cache
def attention_kernel(form: AttentionForm) -> Kernel[AttentionTask]:
    """Return the kernel that attends parts. Units: jobs times KV heads."""
    forms = (form, are_wide_floats_faster(Stored.FLOAT))
    return Kernel("attention", AttentionTask, forms, lambda code: write_part(code, *forms))


def write_part(code: Code, form: AttentionForm, is_wide: bool) -> None:
    """Write the kernel; `is_wide`: float32 in vectors of 512 bits. Whole numbers and pairs are."""
    if form.in_bytes:
        BytePart(code, form, is_wide=True).write()
    else:
        Part(code, form, is_wide or form.in_pairs).write()


@kernel("joining", AttentionTask)
def joining_kernel(code: Code, form: AttentionForm) -> None:
    """Write the kernel that joins a row's parts. Units: rows."""
    record = code.task.record
    row = code.unit

    def of_row(place: Record) -> Value:
        return code.load(code.load(record, 8 * place, I64), row * 8, I64)

    first, stride, count = (
        of_row(place) for place in (Record.RESULTS, Record.STRIDES, Record.COUNTS)
    )
    sums, stats = (code.load(record, 8 * place, I64) for place in (Record.SUMS, Record.STATS))
    with code.loop(0, form.num_heads) as head:
        most = code.variable(code.single(HIDDEN))
        if form.has_sinks:
            most.set(code.load(code.task.sinks, head * 4, F32))
        with code.loop(0, count) as part:
            at = stats + ((first + part * stride) * form.num_heads + head) * 8
            most.set(code.greatest(most.get(), code.load(at, 0, F32)))
        out = code.task.out + (row * form.num_heads + head) * (form.value_dim * 4)
        with code.loop(0, form.value_dim, LANES) as column:
            code.store(code.floats(0.0), out, column * 4)
        total = code.variable(code.floats(0.0))
        if form.has_sinks:
            sink = code.load(code.task.sinks, head * 4, F32) - most.get()
            total.set(exp(code, code.spread(sink)))
        with code.loop(0, count) as part:
            number = (first + part * stride) * form.num_heads + head
            at = stats + number * 8
            share = exp(code, code.spread(code.load(at, 0, F32) - most.get()))
            total.set(total.get() + share * code.spread(code.load(at, 4, F32)))
            values = sums + number * (form.value_dim * 4)
            with code.loop(0, form.value_dim, LANES) as column:
                value = code.load(out, column * 4, F32S)
                value = value + code.load(values, column * 4, F32S) * share
                code.store(value, out, column * 4)
        inverse = code.floats(1.0) / total.get()
        with code.loop(0, form.value_dim, LANES) as column:
            code.store(code.load(out, column * 4, F32S) * inverse, out, column * 4)
        if isinstance(form.stored, KvCode) and form.stored.values.turns(form.value_dim):
            write_turned(code, out, form.value_dim, group_size(form.value_dim))  # back
