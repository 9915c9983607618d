"""The kernels of attention: that of parts of a context, the one that joins a row's parts, and those
that score slots by the weights they get.
"""

from collections.abc import Callable, Iterator
from functools import cache

from kvchat_kernels.cpu.attention import HIDDEN, Part
from kvchat_kernels.cpu.attention_bytes import BytePart
from kvchat_kernels.cpu.attention_task import AttentionForm, AttentionTask, Record, SlotScoresTask
from kvchat_kernels.cpu.code import F32, F32S, I64, LANES, Code, Kernel, Value, kernel
from kvchat_kernels.cpu.maths import Stored, exp, write_turned
from kvchat_kernels.cpu.products import are_wide_floats_faster
from kvchat_kernels.kv_code import KvCode, group_size


@cache
def attention_kernel(form: AttentionForm) -> Kernel[AttentionTask]:
    """Return the kernel that attends parts. Units: jobs times KV heads."""
    forms = (form, are_wide_floats_faster(Stored.FLOAT))
    return Kernel("attention", AttentionTask, forms, lambda code: part_of(code, *forms).write())


@cache
def slot_scores_kernel(form: AttentionForm) -> Kernel[SlotScoresTask]:
    """Return the kernel that scores a part's slots, after `totals_kernel`. Units: as attention."""
    forms = (form, are_wide_floats_faster(Stored.FLOAT))

    def write(code: Code) -> None:
        part_of(code, *forms).write_slot_scores()

    return Kernel("slot scores", SlotScoresTask, forms, write)


def part_of(code: Code, form: AttentionForm, is_wide: bool) -> Part:
    """Return what writes a part.

    `is_wide`: float32 in vectors of 512 bits. Whole numbers and pairs are.
    """
    if form.in_bytes:
        return BytePart(code, form, is_wide=True)
    return Part(code, form, is_wide or form.in_pairs)


class _RowParts:
    """The results of the parts that a row sees."""

    def __init__(self, code: Code, form: AttentionForm) -> None:
        self._code, self._form = code, form
        record, of_row = code.task.record, (Record.RESULTS, Record.STRIDES, Record.COUNTS)
        self._first, self._stride, self._count = (
            code.load(code.load(record, 8 * place, I64), code.unit * 8, I64) for place in of_row
        )
        self._sums, self._stats = (
            code.load(record, 8 * place, I64) for place in (Record.SUMS, Record.STATS)
        )

    def each(self, head: Value) -> Iterator[tuple[Value, Value]]:
        """Write a loop over the parts: the body gets addresses of a part's stats and its sums."""
        form = self._form
        with self._code.loop(0, self._count) as part:
            number = (self._first + part * self._stride) * form.num_heads + head
            yield self._stats + number * 8, self._sums + number * (form.value_dim * 4)

    def most(self, head: Value) -> Value:
        """Write the loop that finds the largest score of all parts, or of a sink."""
        code = self._code
        most = code.variable(code.single(HIDDEN))
        if self._form.has_sinks:
            most.set(code.load(code.task.sinks, head * 4, F32))
        for stats, _ in self.each(head):
            most.set(code.greatest(most.get(), code.load(stats, 0, F32)))
        return most.get()

    def add(self, head: Value, most: Value, add_sums: Callable[[Value, Value], None]) -> Value:
        """Return the sum of all weights, spread; `add_sums` gets each part's sums and share."""
        code = self._code
        total = code.variable(code.floats(0.0))
        if self._form.has_sinks:
            sink = code.load(code.task.sinks, head * 4, F32) - most
            total.set(exp(code, code.spread(sink)))
        for stats, sums in self.each(head):
            share = exp(code, code.spread(code.load(stats, 0, F32) - most))
            total.set(total.get() + share * code.spread(code.load(stats, 4, F32)))
            add_sums(sums, share)
        return total.get()


@kernel("totals", SlotScoresTask)
def totals_kernel(code: Code, form: AttentionForm) -> None:
    """Write each row's largest score, and 1 over the sum of its weights. Units: rows."""
    parts = _RowParts(code, form)
    with code.loop(0, form.num_heads) as head:
        most = parts.most(head)
        total = parts.add(head, most, lambda sums, share: None)
        to = code.task.totals + (code.unit * form.num_heads + head) * 8
        code.store(most, to, 0)
        code.store(code.lane(code.floats(1.0) / total, 0), to, 4)


@kernel("joining", AttentionTask)
def joining_kernel(code: Code, form: AttentionForm) -> None:
    """Write the kernel that joins a row's parts. Units: rows."""
    parts = _RowParts(code, form)
    with code.loop(0, form.num_heads) as head:
        most = parts.most(head)
        out = code.task.out + (code.unit * form.num_heads + head) * (form.value_dim * 4)
        with code.loop(0, form.value_dim, LANES) as column:
            code.store(code.floats(0.0), out, column * 4)

        def add_sums(sums: Value, share: Value, out: Value = out) -> None:
            with code.loop(0, form.value_dim, LANES) as column:
                value = code.load(out, column * 4, F32S)
                value = value + code.load(sums, column * 4, F32S) * share
                code.store(value, out, column * 4)

        inverse = code.floats(1.0) / parts.add(head, most, add_sums)
        with code.loop(0, form.value_dim, LANES) as column:
            code.store(code.load(out, column * 4, F32S) * inverse, out, column * 4)
        if isinstance(form.stored, KvCode) and form.stored.values.turns(form.value_dim):
            write_turned(code, out, form.value_dim, group_size(form.value_dim))  # back
