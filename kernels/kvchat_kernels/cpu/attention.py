"""Attention of few rows over paged KV, and the joining of its parts.

The context is cut at positions that are multiples of PART. A unit of the first kernel is a part of
the context of one sequence, for one KV head: it reads K and V of these positions once, for all rows
of the sequence and all query heads of the KV head, and writes each row's weighted sum of values,
its largest score and the sum of its weights. The second kernel joins a row's parts. Where a part
ends depends on nothing but positions, so a row's result does not depend on the rows beside it, nor
on the number of threads.

Source: "FlashDecoding" (Dao et al. 2023) for the split over the context.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, F32S, I32, I64, LANES, Code, Kernel, Value
from kvchat_kernels.cpu.maths import Stored, exp, load_floats, tanh
from kvchat_kernels.cpu.step import MAX_ROWS

# Positions of a part, and of a tile of K or V that is converted to float32 at once.
PART = 256
_TILE = 32
_HIDDEN = -1e30


class Job(IntEnum):
    """A part of a context: 64-bit numbers.

    ROW, NUM_ROWS   the sequence's rows of the step
    START           the part's first position, a multiple of PART
    FIRST, END      the positions that any of the rows sees of the part
    TABLE           address of the sequence's block table, int32
    RESULT          number of the first row's result of this part; the other rows' follow
    """

    ROW = 0
    NUM_ROWS = 1
    START = 2
    FIRST = 3
    END = 4
    TABLE = 5
    RESULT = 6


JOB_NUMBERS = 8


class Record(IntEnum):
    """What layers that see the same positions have in common: addresses, renewed for every step.

    JOBS              [jobs, JOB_NUMBERS] int64
    FIRST, END        [rows] int64: each row sees positions FIRST to END - 1
    RESULTS           [rows] int64: number of a row's first result
    STRIDES, COUNTS   [rows] int64: how far apart a row's results are, and how many they are
    SUMS, STATS       float32 [results, heads, value dim] and [results, heads, 2]
    """

    JOBS = 0
    FIRST = 1
    END = 2
    RESULTS = 3
    STRIDES = 4
    COUNTS = 5
    SUMS = 6
    STATS = 7


class Place(IntEnum):
    """The task. QUERY is float32 [rows, heads, key dim] with QUERY_STRIDE bytes to a row.

    KEYS, VALUES   addresses of the pools, [slots, KV heads, dim]
    SCALE          float32, what scores are multiplied with
    SOFTCAP        float32, where the form has one
    SINKS          float32 [heads], where the form has them
    OUT            float32 [rows, heads, value dim]
    """

    RECORD = 0
    QUERY = 1
    QUERY_STRIDE = 2
    KEYS = 3
    VALUES = 4
    SCALE = 5
    SOFTCAP = 6
    SINKS = 7
    OUT = 8


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What code is made for. `block_size` is a power of two, dims are multiples of 8."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    stored: Stored
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@cache
def attention_kernel(form: AttentionForm) -> Kernel:
    """Return the kernel that attends parts. Units: jobs times KV heads."""
    return Kernel("attention", (form,), lambda code: _Part(code, form).write())


@cache
def joining_kernel(form: AttentionForm) -> Kernel:
    """Return the kernel that joins a row's parts. Units: rows."""
    return Kernel("joining", (form,), lambda code: _write_joining(code, form))


class _Part:
    def __init__(self, code: Code, form: AttentionForm) -> None:
        self._code = code
        self._form = form
        self._head = code.unit % form.num_kv_heads
        self._record = code.field(Place.RECORD)
        jobs = code.load(self._record, 8 * Record.JOBS, I64)
        self._job = jobs + code.unit // form.num_kv_heads * (8 * JOB_NUMBERS)
        self._num_rows = self._of_job(Job.NUM_ROWS)
        self._start = self._of_job(Job.START)
        self._first, self._end = self._of_job(Job.FIRST), self._of_job(Job.END)
        widest = max(form.key_dim, form.value_dim)
        self._tile = code.room(_TILE * widest * 4)
        self._scores = code.room(MAX_ROWS * form.group * PART * 4)

    def _of_job(self, place: Job) -> Value:
        return self._code.load(self._job, 8 * place, I64)

    def write(self) -> None:
        # Tiles begin at multiples of _TILE, which keeps every row's order of additions the same.
        start = self._first - self._first % _TILE
        num_scores = (self._end - self._start + (LANES - 1)) // LANES * LANES
        self._write_scores(start, num_scores)
        self._write_weights(num_scores)
        self._write_sums(start)

    def _row_of(self, index: Value) -> tuple[Value, Value]:
        """Return the row of the step and the head of the `index`-th pair of row and query head."""
        group = self._form.group
        return self._of_job(Job.ROW) + index // group, self._head * group + index % group

    def _scores_of(self, index: Value) -> Value:
        return self._scores + index * (PART * 4)

    @property
    def _num_pairs(self) -> Value:
        return self._num_rows * self._form.group

    def _convert(self, pool: Place, dim: int, start: Value, end: Value) -> None:
        """Write K or V of positions [`start`, `end`) to the tile as float32 [positions, dim]."""
        code, form = self._code, self._form
        table, address = self._of_job(Job.TABLE), code.field(pool)
        size = form.stored.num_bytes
        token_bytes = form.num_kv_heads * dim * size
        with code.loop(start, end) as position:
            block = code.load(table, position // form.block_size * 4, I32)
            slot = code.convert("sext", block, I64) * form.block_size + position % form.block_size
            token = address + slot * token_bytes + self._head * (dim * size)
            to = self._tile + (position - start) * (dim * 4)
            for index in range(0, dim, LANES):
                code.store(load_floats(code, token, index * size, form.stored), to, index * 4)

    def _write_scores(self, start: Value, num_scores: Value) -> None:
        """Write each pair's scores of the part; what a row does not see is far below all others."""
        code, form = self._code, self._form
        pairs, places = code.loop(0, self._num_pairs), code.loop(0, num_scores, LANES)
        with pairs as index, places as place:
            code.store(code.floats(_HIDDEN), self._scores_of(index), place * 4)
        with code.loop(start, self._end, _TILE) as tile:
            begin = code.greatest(tile, self._first)
            end = code.least(tile + _TILE, self._end)
            self._convert(Place.KEYS, form.key_dim, begin, end)
            with code.loop(0, self._num_pairs) as index:
                row, head = self._row_of(index)
                firsts, ends = (
                    code.load(code.load(self._record, 8 * place, I64), row * 8, I64)
                    for place in (Record.FIRST, Record.END)
                )
                first, last = code.greatest(begin, firsts), code.least(end, ends)
                query = code.field(Place.QUERY) + row * code.field(Place.QUERY_STRIDE)
                query = query + head * (form.key_dim * 4)
                with code.loop(first, last) as position:
                    key = self._tile + (position - begin) * (form.key_dim * 4)
                    score = self._score(query, key)
                    code.store(score, self._scores_of(index), (position - self._start) * 4)

    def _score(self, query: Value, key: Value) -> Value:
        code, form = self._code, self._form
        sums = [code.floats(0.0) for _ in range(min(4, form.key_dim // LANES))]
        for number, index in enumerate(range(0, form.key_dim, LANES)):
            product = code.load(query, index * 4, F32S) * code.load(key, index * 4, F32S)
            sums[number % len(sums)] = sums[number % len(sums)] + product
        while len(sums) > 1:
            sums = [sum(sums[i + 1 : i + 2], sums[i]) for i in range(0, len(sums), 2)]
        return code.total(sums[0]) * code.float_field(Place.SCALE)

    def _write_weights(self, num_scores: Value) -> None:
        """Turn each pair's scores into weights, and write their largest and their sum."""
        code, form = self._code, self._form
        with code.loop(0, self._num_pairs) as index:
            scores = self._scores_of(index)
            most = code.variable(code.floats(_HIDDEN))
            with code.loop(0, num_scores, LANES) as place:
                value = code.load(scores, place * 4, F32S)
                if form.has_softcap:
                    cap = code.spread(code.float_field(Place.SOFTCAP))
                    capped = tanh(code, value / cap) * cap
                    value = code.select(value > _HIDDEN / 2, capped, value)
                    code.store(value, scores, place * 4)
                most.set(code.greatest(most.get(), value))
            largest = code.maximum(most.get())
            total = code.variable(code.floats(0.0))
            with code.loop(0, num_scores, LANES) as place:
                weight = exp(code, code.load(scores, place * 4, F32S) - code.spread(largest))
                code.store(weight, scores, place * 4)
                total.set(total.get() + weight)
            stats = self._result(index, Record.STATS, 2)
            code.store(largest, stats, 0)
            code.store(code.total(total.get()), stats, 4)

    def _result(self, index: Value, place: Record, width: int) -> Value:
        """Return the address of a pair's result."""
        code, form = self._code, self._form
        row, head = self._row_of(index)
        number = self._of_job(Job.RESULT) + row - self._of_job(Job.ROW)
        results = code.load(self._record, 8 * place, I64)
        return results + (number * form.num_heads + head) * (width * 4)

    def _write_sums(self, start: Value) -> None:
        """Write each pair's sum of values times weights."""
        code, form = self._code, self._form
        with code.loop(0, self._num_pairs) as index:
            sums = self._result(index, Record.SUMS, form.value_dim)
            with code.loop(0, form.value_dim, LANES) as column:
                code.store(code.floats(0.0), sums, column * 4)
        with code.loop(start, self._end, _TILE) as tile:
            begin = code.greatest(tile, self._first)
            end = code.least(tile + _TILE, self._end)
            self._convert(Place.VALUES, form.value_dim, begin, end)
            with code.loop(0, self._num_pairs) as index:
                sums = self._result(index, Record.SUMS, form.value_dim)
                for first in range(0, form.value_dim, 8 * LANES):
                    self._add_values(index, sums, begin, end, first)

    def _add_values(self, index: Value, sums: Value, begin: Value, end: Value, column: int) -> None:
        """Add the values of a tile, for up to 64 columns from `column` on."""
        code, form = self._code, self._form
        offsets = range(column * 4, min(column + 8 * LANES, form.value_dim) * 4, LANES * 4)
        totals = [code.variable(code.load(sums, offset, F32S)) for offset in offsets]
        with code.loop(begin, end) as position:
            weight = code.load(self._scores_of(index), (position - self._start) * 4, F32)
            value = self._tile + (position - begin) * (form.value_dim * 4)
            for offset, total in zip(offsets, totals, strict=True):
                product = code.load(value, offset, F32S) * code.spread(weight)
                total.set(total.get() + product)
        for offset, total in zip(offsets, totals, strict=True):
            code.store(total.get(), sums, offset)


def _write_joining(code: Code, form: AttentionForm) -> None:
    record = code.field(Place.RECORD)
    row = code.unit

    def of_row(place: Record) -> Value:
        return code.load(code.load(record, 8 * place, I64), row * 8, I64)

    first, stride, count = (
        of_row(place) for place in (Record.RESULTS, Record.STRIDES, Record.COUNTS)
    )
    sums, stats = (code.load(record, 8 * place, I64) for place in (Record.SUMS, Record.STATS))
    with code.loop(0, form.num_heads) as head:
        most = code.variable(code.single(_HIDDEN))
        if form.has_sinks:
            most.set(code.load(code.field(Place.SINKS), head * 4, F32))
        with code.loop(0, count) as part:
            at = stats + ((first + part * stride) * form.num_heads + head) * 8
            most.set(code.greatest(most.get(), code.load(at, 0, F32)))
        out = code.field(Place.OUT) + (row * form.num_heads + head) * (form.value_dim * 4)
        with code.loop(0, form.value_dim, LANES) as column:
            code.store(code.floats(0.0), out, column * 4)
        total = code.variable(code.floats(0.0))
        if form.has_sinks:
            sink = code.load(code.field(Place.SINKS), head * 4, F32) - most.get()
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
