"""Attention of few rows over a part of paged KV.

The context is cut at slots that are multiples of PART, and where a private table has empty slots.
A unit of the first kernel is a part of the context of one sequence, for one KV head: it reads K and
V of these slots once, for all rows of the sequence and all query heads of the KV head, and writes
each row's weighted sum of values, its largest score and the sum of its weights. The second kernel
joins a row's parts (`attention_kernels.py`). Where a part ends depends on nothing but the table, so
a row's result does not depend on the rows beside it, nor on the number of threads.

No kernel here knows a position: those of a table ascend, so what a row sees of a part without empty
slots is all slots between two, which `parts.py` finds.

Source: "FlashDecoding" (Dao et al. 2023) for the split over the context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import product

from llvmlite import ir

from kvchat_kernels.cpu.attention_reading import WORD_BYTES, load_words, words_of
from kvchat_kernels.cpu.attention_task import (
    JOB_ROWS,
    PART,
    AttentionForm,
    Job,
    Record,
    ScoresRecord,
)
from kvchat_kernels.cpu.bfloat_pairs import (
    PAIR_LANES,
    add_products,
    in_order,
    interleaved,
    load_pairs,
    rounded,
    store_halves,
)
from kvchat_kernels.cpu.code import F32, I32, I64, LANES, Code, Value
from kvchat_kernels.cpu.maths import exp, tanh

# Slots of a tile of K, whose words are transposed at once.
_TILE = 32
# Pairs of a row and a query head that share one reading of a tile, and how many vectors of a value
# are added to at once, by the number of pairs: sums stay in 16 registers beside what they read.
_FEW = (4, 3, 2, 1)
_VALUE_VECTORS = {4: 2, 3: 2, 2: 4, 1: 8}
# The same of 32 registers of 512 bits, by the number of query heads of a KV head. From 4 on they
# are taken together, if there are no more than the second: so none is left over.
_WIDE_FEW, _MOST_HEADS = {1: (8, 4, 2, 1), 2: (8, 4, 2), 3: (12, 3)}, 12
_WIDE_VALUE_VECTORS = {1: 8, 2: 4, 3: 4, 4: 4}
_CACHE_LINE = 64
HIDDEN = -1e30


class Part:
    """Writes the code of a part: `write`. Numbers are multiplied as float32, or in pairs."""

    def __init__(self, code: Code, form: AttentionForm, is_wide: bool) -> None:
        self._code = code
        self._form = form
        self._head = code.unit % form.num_kv_heads
        self._record = code.task.record
        jobs = code.load(self._record, 8 * Record.JOBS, I64)
        self._job = jobs + code.unit // form.num_kv_heads * (8 * len(Job))
        self._num_pairs = self._of_job(Job.NUM_ROWS) * form.group
        self._lanes = 2 * LANES if is_wide else LANES
        self._keys, self._values = form.numbers
        self._value_lanes = self._values.lanes(self._lanes)
        self._few = _pairs_at_once(form.group) if is_wide else _FEW
        self._in_pairs = form.in_pairs
        self._start = self._of_job(Job.START)
        self._first, self._end = self._of_job(Job.FIRST), self._of_job(Job.END)
        # Of keys and of values of a tile's slots: that of the first of a run says all.
        self._addresses = code.room(2 * _TILE * 8)
        self._slots_a_run = LANES if form.block_size >= LANES else 1
        self._words = code.room(_TILE * self._keys.num_bytes)
        self._factors = code.room(_TILE * self._keys.scale_bytes * 2)
        self._scores = code.room(JOB_ROWS * form.group * PART * 4)
        self._queries = code.room(JOB_ROWS * form.group * form.key_dim * 2 if form.in_pairs else 8)

    def _of_job(self, place: Job) -> Value:
        return self._code.load(self._job, 8 * place, I64)

    def write(self) -> None:
        self._write_all_scores()
        with self._code.loop(0, self._num_pairs) as pair:
            self._write_weights(pair)
        self._write_all_sums()

    def write_slot_scores(self) -> None:
        """Add to the scores of the part's slots; the task is a SlotScoresTask."""
        code, kind = self._code, ir.VectorType(F32, self._lanes)
        self._write_all_scores()
        sums, highest = (code.room(PART * 4) - self._start * 4 for _ in range(2))
        first = self._first - self._first % self._lanes
        with code.loop(first, self._end, self._lanes) as slot:
            for room in (sums, highest):
                code.store(code.floats(0.0, self._lanes), room, slot * 4)
        with code.loop(0, self._num_pairs) as pair:
            row, head = self._row_of(pair)
            at = code.task.totals + (row * self._form.num_heads + head) * 8
            most, inverse = (code.spread(code.load(at, i, F32), self._lanes) for i in (0, 4))
            scores, seen = self._scores_of(pair) - self._start * 4, self._seen(pair)
            with code.loop(first, self._end, self._lanes) as slot:
                score = self._bounded(code.load(scores, slot * 4, kind), slot, *seen)
                weight = exp(code, score - most) * inverse
                code.store(code.load(sums, slot * 4, kind) + weight, sums, slot * 4)
                best = code.greatest(code.load(highest, slot * 4, kind), weight)
                code.store(best, highest, slot * 4)
        self._add_slot_scores(sums, highest)

    def _add_slot_scores(self, sums: Value, highest: Value) -> None:
        """Add those of a part. No other part, head or run of rows writes to the same place."""
        code, share = self._code, 1.0 / self._form.group
        to_sums, to_highest, num_heads, num_slots = (
            code.load(code.task.slot_scores, 8 * place, I64) for place in ScoresRecord
        )
        run = self._of_job(Job.ROW) // JOB_ROWS
        start = (run * num_heads + code.task.first_head + self._head) * num_slots
        with code.loop(self._first, code.least(self._end, num_slots)) as slot:
            at = (start + slot) * 4
            total = code.load(to_sums, at, F32) + code.load(sums, slot * 4, F32) * share
            code.store(total, to_sums, at)
            most = code.greatest(code.load(to_highest, at, F32), code.load(highest, slot * 4, F32))
            code.store(most, to_highest, at)

    def _write_all_scores(self) -> None:
        self._write_queries()
        # Tiles begin at multiples of _TILE, which keeps every row's order of additions the same.
        tiles = self._code.loop(self._first - self._first % _TILE, self._end, _TILE)
        with tiles as tile:
            self._write_key_words(tile)
            self._each_few(lambda pairs: self._write_scores(pairs, tile))

    def _each_few(self, write: Callable[[Sequence[Value]], None]) -> None:
        """Write loops over the pairs of a row and a query head, a few at a time."""
        code = self._code
        done = code.whole(0)
        for count in self._few:
            end = done + (self._num_pairs - done) // count * count
            with code.loop(done, end, count) as first:
                write([first + i for i in range(count)])
            done = end

    def _row_of(self, pair: Value) -> tuple[Value, Value]:
        """Return the row of the step and the head of a pair."""
        group = self._form.group
        return self._of_job(Job.ROW) + pair // group, self._head * group + pair % group

    def _scores_of(self, pair: Value) -> Value:
        return self._scores + pair * (PART * 4)

    def _result(self, pair: Value, place: Record, width: int) -> Value:
        """Return the address of a pair's result."""
        code, form = self._code, self._form
        row, head = self._row_of(pair)
        number = self._of_job(Job.RESULT) + row - self._of_job(Job.ROW)
        results = code.load(self._record, 8 * place, I64)
        return results + (number * form.num_heads + head) * (width * 4)

    # K and V

    def _token(self, pool: Value, head_bytes: int, slot: Value) -> Value:
        """Return the address of what a pool has of the head of a slot."""
        form = self._form
        return pool + (self._in_pool(slot) * form.num_kv_heads + self._head) * head_bytes

    def _tokens(self, pool: Value, head_bytes: int, first: Value, count: int) -> list[Value]:
        """Return the addresses of what a pool has of the head of `count` slots from `first` on.

        `first` is a multiple of 8. Slots that no row sees have any address within the pool.
        """
        form = self._form
        found: list[Value] = []
        for run in range(0, count, LANES):
            if form.block_size < LANES:
                slots = [self._within(first + run + lane) for lane in range(LANES)]
                found += [self._token(pool, head_bytes, slot) for slot in slots]
            else:  # all in one block
                slot = self._within(first + run)
                start = self._token(pool, head_bytes, slot & -LANES)
                found += [start + lane * form.num_kv_heads * head_bytes for lane in range(LANES)]
        return found

    def _within(self, slot: Value) -> Value:
        """Return a slot, or the nearest one that a row sees."""
        code = self._code
        return code.least(code.greatest(slot, self._first), self._end - 1)

    def _in_pool(self, slot: Value) -> Value:
        """Return the pool's number of a slot of the table."""
        code, size = self._code, self._form.block_size
        table = self._of_job(Job.TABLE)
        block = code.load(table, (slot >> size.bit_length() - 1) * 4, I32)
        return code.convert("sext", block, I64) * size + (slot & size - 1)

    def _note_tokens(self, tile: Value, slot: Value) -> None:
        """Note where the next tile has the keys of 8 slots, and this one the values, or the first
        of them in a block: `_ask` asks for them while scores are computed. Ask for their scales.
        """
        code, form = self._code, self._form
        sides = (
            (self._keys, code.task.keys, code.task.key_scales, slot + 2 * _TILE),
            (*(self._values, code.task.values, code.task.value_scales, slot),),
        )
        for index, (numbers, pool, scales, first) in enumerate(sides):
            to = self._addresses + index * (_TILE * 8) + (slot - tile) * 8
            tokens = self._tokens(pool, numbers.num_bytes, first, LANES)
            for lane in range(0, LANES, self._slots_a_run):
                code.store(tokens[lane], to, lane * 8)
            if numbers.scale_bytes:
                run = max(1, _CACHE_LINE // (form.num_kv_heads * numbers.scale_bytes))
                for token in self._tokens(scales, numbers.scale_bytes, first, LANES)[::run]:
                    code.prefetch(token, 0)

    def _ask(self, word: Value, slot: Value, width: int) -> None:
        """Ask for a share of what `_note_tokens` noted of `width` slots: that of a word of a head.

        Asked for at once, they would have to wait for each other.
        """
        code, num_words = self._code, self._keys.num_bytes // WORD_BYTES
        for index, numbers in enumerate((self._keys, self._values)):
            lines = -(-numbers.num_bytes // _CACHE_LINE)
            count = -(-width * lines // num_words)
            for line in range(count):
                number = word * count + line
                if count * num_words > width * lines:
                    number = code.least(number, width * lines - 1)
                place = slot + number // lines
                lane = place & self._slots_a_run - 1
                addresses = self._addresses + index * (_TILE * 8)
                token = code.load(addresses, (place - lane) * 8, I64)
                token = token + lane * (self._form.num_kv_heads * numbers.num_bytes)
                code.prefetch(token, number % lines * _CACHE_LINE, to_second=True)

    def _write_key_words(self, tile: Value) -> None:
        """Write the words of a tile of K, [words, slots], and what its groups are multiplied with.

        Keys of the next tile and values of this one are asked for meanwhile.
        """
        code, keys, lanes = self._code, self._keys, self._lanes
        start = code.greatest(tile, self._first - self._first % lanes)
        with code.loop(start, code.least(tile + _TILE, self._end), lanes) as slot:
            for run in range(0, lanes, LANES):
                self._note_tokens(tile, slot + run)
            tokens = self._tokens(code.task.keys, keys.num_bytes, slot, lanes)
            to = self._words + (slot - tile) * WORD_BYTES
            whole = keys.num_bytes // (WORD_BYTES * lanes) * lanes
            with code.loop(0, whole, lanes) as first:
                words = load_words(code, tokens, first * WORD_BYTES, lanes)
                for index, word in enumerate(words):
                    code.store(word, to, (first + index) * (_TILE * WORD_BYTES))
            rest = [token + whole * WORD_BYTES for token in tokens]
            for index, word in words_of(code, rest, keys.num_bytes - whole * WORD_BYTES):
                code.store(word, to, (whole + index) * (_TILE * WORD_BYTES))
            if keys.scale_bytes:
                heads = self._tokens(code.task.key_scales, keys.scale_bytes, slot, lanes)
                to = self._factors + (slot - tile) * 4
                for index, scale in enumerate(keys.load_scales(code, heads)):
                    code.store(scale, to, index * (_TILE * 4))

    # Scores, weights, sums

    def _query(self, pair: Value) -> Value:
        """Return the address of a pair's query."""
        row, head = self._row_of(pair)
        query = self._code.task.query + row * self._code.task.query_stride
        return query + head * (self._keys.dim * 4)

    def _write_queries(self) -> None:
        """Write queries as they are multiplied, where these are not those of the step."""
        code, dim = self._code, self._keys.dim
        with code.loop(0, self._num_pairs if self._in_pairs else 0) as pair:
            query = self._query(pair)
            with code.loop(0, dim, PAIR_LANES) as column:
                numbers = code.load(query, column * 4, ir.VectorType(F32, PAIR_LANES))
                store_halves(
                    code, rounded(code, numbers), self._queries + pair * (dim * 2), column * 2
                )

    def _write_scores(self, pairs: Sequence[Value], tile: Value) -> None:
        """Write the pairs' scores of a tile, also of slots that a row does not see."""
        code, keys, lanes = self._code, self._keys, self._lanes
        width = self._slots_at_once(len(pairs))
        places, kind = range(0, width, lanes), ir.VectorType(I32, lanes)
        words_of_group = keys.num_bytes // WORD_BYTES * keys.group // keys.dim
        with code.loop(tile, code.least(tile + _TILE, self._end), width) as slot:
            scores = [self._scores_of(pair) + (slot - self._start) * 4 for pair in pairs]
            if keys.scale_bytes:
                for to, place in product(scores, places):
                    code.store(code.floats(0.0, lanes), to, place * 4)
            with code.loop(0, keys.dim // keys.group) as group:
                at = self._words + (slot - tile) * WORD_BYTES
                at = at + group * (words_of_group * _TILE * WORD_BYTES)

                @contextmanager
                def words(
                    group: Value = group, slot: Value = slot, at: Value = at
                ) -> Iterator[tuple[Value, list[Value]]]:
                    with code.loop(0, words_of_group) as word:
                        self._ask(group * words_of_group + word, slot - tile, width)
                        start = at + word * (_TILE * WORD_BYTES)
                        yield word, [code.load(start, to * WORD_BYTES, kind) for to in places]

                sums = self._products_of_group(pairs, group, len(places), words())
                for to, of_pair in zip(scores, sums, strict=True):
                    for place, total in zip(places, of_pair, strict=True):
                        if keys.scale_bytes:
                            factors = self._factors + group * (_TILE * 4) + (slot - tile) * 4
                            factor = code.load(factors, place * 4, total.type)
                            total = code.load(to, place * 4, total.type) + total * factor
                        code.store(total, to, place * 4)

    def _slots_at_once(self, num_pairs: int) -> int:
        """Return for how many slots of a tile scores of so many pairs are written at once."""
        return _TILE if num_pairs <= 2 or self._lanes > LANES else _TILE // 2

    def _products_of_group(
        self,
        pairs: Sequence[Value],
        group: Value,
        count: int,
        words: AbstractContextManager[tuple[Value, list[Value]]],
    ) -> list[list[Value]]:
        """Return what a group of K's columns adds to scores but for its scales, [pairs][count].

        `words` writes a loop over the words of a group, each as `count` vectors of slots.
        """
        code, keys, lanes = self._code, self._keys, self._lanes
        if self._in_pairs:
            queries = [self._queries + pair * (keys.dim * 2) for pair in pairs]
        else:
            queries = [self._query(pair) + group * (keys.group * 4) for pair in pairs]
        sums = [[code.variable(code.floats(0.0, lanes)) for _ in range(count)] for _ in pairs]
        with words as (word, vectors):
            if self._in_pairs:
                for query, of_pair in zip(queries, sums, strict=True):
                    factors = load_pairs(code, query, word * WORD_BYTES)
                    for of_place, total in zip(vectors, of_pair, strict=True):
                        total.set(add_products(code, total.get(), of_place, factors))
            else:
                numbers = [keys.of_words(code, of_place) for of_place in vectors]
                for of_places in zip(*numbers, strict=True):
                    column = word * keys.columns_of_word + of_places[0][0]
                    for query, of_pair in zip(queries, sums, strict=True):
                        factor = code.spread(code.load(query, column * 4, F32), lanes)
                        for (_, number), total in zip(of_places, of_pair, strict=True):
                            total.set(total.get() + factor * number)
        scale = code.spread(code.task.scale * keys.unit, lanes)
        return [[total.get() * scale for total in of_pair] for of_pair in sums]

    def _write_weights(self, pair: Value) -> None:
        """Turn a pair's scores into weights, and write their largest and their sum."""
        code = self._code
        scores = self._scores_of(pair) - self._start * 4
        lanes, kind = self._lanes, ir.VectorType(F32, self._lanes)
        first, seen = self._first - self._first % lanes, self._seen(pair)
        most = code.variable(code.floats(HIDDEN, lanes))
        with code.loop(first, self._end, lanes) as slot:
            value = self._bounded(code.load(scores, slot * 4, kind), slot, *seen)
            code.store(value, scores, slot * 4)
            most.set(code.greatest(most.get(), value))
        largest = code.maximum(most.get())
        total = code.variable(code.floats(0.0, lanes))
        with code.loop(first, self._end, lanes) as slot:
            score = code.load(scores, slot * 4, kind)
            weight = exp(code, score - code.spread(largest, lanes))
            if self._in_pairs:  # in the first half of the room: what lies there was read before
                weight = rounded(code, weight)
                store_halves(code, weight, self._weights_of(pair), slot * 2)
            else:
                code.store(weight, scores, slot * 4)
            total.set(total.get() + weight)
        stats = self._result(pair, Record.STATS, 2)
        code.store(largest, stats, 0)
        code.store(code.tree_total(total.get()), stats, 4)

    def _seen(self, pair: Value) -> tuple[Value, Value]:
        """Return the first slot of the part that a pair's row sees, and the one after the last."""
        code, (row, _) = self._code, self._row_of(pair)
        first, end = (
            code.load(code.load(self._record, 8 * place, I64), row * 8, I64)
            for place in (Record.FIRST, Record.END)
        )
        return code.greatest(first, self._first), code.least(end, self._end)

    def _bounded(self, scores: Value, slot: Value, first: Value, end: Value) -> Value:
        """Return scores from `slot` on; those of slots outside [first, end) are far below all."""
        code, count = self._code, self._lanes
        if self._form.has_softcap:
            cap = code.spread(code.task.softcap, count)
            scores = tanh(code, scores / cap) * cap
        return self._within_slots(scores, code.floats(HIDDEN, count), slot, first, end)

    def _within_slots(
        self, numbers: Value, others: Value, slot: Value, first: Value, end: Value
    ) -> Value:
        """Return numbers of slots from `slot` on, `others` of those outside [first, end)."""
        code, count = self._code, self._lanes
        lanes = code.counting(count)
        first, end = (
            code.spread(code.convert("trunc", at - slot, I32), count) for at in (first, end)
        )
        return code.select(lanes < end, code.select(lanes < first, others, numbers), others)

    def _write_all_sums(self) -> None:
        self._each_few(self._write_sums_of_pairs if self._in_pairs else self._write_sums)

    def _write_sums(self, pairs: Sequence[Value]) -> None:
        """Write the pairs' sums of the part's values times their weights."""
        code, values = self._code, self._values
        results = [self._result(pair, Record.SUMS, values.dim) for pair in pairs]
        weights = [self._scores_of(pair) - self._start * 4 for pair in pairs]
        lanes = self._value_lanes
        known = _WIDE_VALUE_VECTORS if self._lanes > LANES else _VALUE_VECTORS
        count = known.get(len(pairs), 2)
        all_columns = values.vector_columns(lanes)
        for first in range(0, len(all_columns), count):
            columns = all_columns[first : first + count]
            zeros = code.floats(0.0, lanes)
            sums = [[code.variable(zeros) for _ in columns] for _ in pairs]
            with code.loop(self._first, self._end) as slot:
                head = self._token(code.task.values, values.num_bytes, slot)
                scales = (
                    self._token(code.task.value_scales, values.scale_bytes, slot)
                    if values.scale_bytes
                    else None
                )
                vectors = values.load_vectors(code, head, scales, columns, lanes)
                for at, of_pair in zip(weights, sums, strict=True):
                    weight = code.spread(code.load(at, slot * 4, F32), lanes)
                    for vector, total in zip(vectors, of_pair, strict=True):
                        total.set(total.get() + vector * weight)
            for to, of_pair in zip(results, sums, strict=True):
                for column, total in zip(columns, of_pair, strict=True):
                    code.store(total.get(), to, column * 4)

    def _weights_of(self, pair: Value) -> Value:
        """Return the address that the rounded weight of slot 0 would have."""
        return self._scores_of(pair) - self._start * 2

    def _write_sums_of_pairs(self, pairs: Sequence[Value]) -> None:
        """Write what `_write_sums` does, by weights that are rounded, two slots at a time.

        A slot that no row sees has the weight 0, and the numbers of one that a row sees.
        """
        code, values = self._code, self._values
        results = [self._result(pair, Record.SUMS, values.dim) for pair in pairs]
        weights = [self._weights_of(pair) for pair in pairs]
        count = _WIDE_VALUE_VECTORS.get(len(pairs), 2)
        all_columns = range(0, values.dim, 2 * PAIR_LANES)
        for first in range(0, len(all_columns), count // 2):
            columns = all_columns[first : first + count // 2]
            zeros = code.floats(0.0, PAIR_LANES)
            sums = [[code.variable(zeros) for _ in range(2 * len(columns))] for _ in pairs]
            with code.loop(self._first - self._first % 2, self._end, 2) as slot:
                heads = [
                    self._token(code.task.values, values.num_bytes, self._within(slot + i))
                    for i in (0, 1)
                ]
                words = [w for column in columns for w in interleaved(code, heads, column * 2)]
                for at, of_pair in zip(weights, sums, strict=True):
                    factors = load_pairs(code, at, slot * 2)
                    for word, total in zip(words, of_pair, strict=True):
                        total.set(add_products(code, total.get(), word, factors))
            for to, of_pair in zip(results, sums, strict=True):
                for index, column in enumerate(columns):
                    halves = (total.get() for total in of_pair[2 * index : 2 * index + 2])
                    for part, vector in enumerate(in_order(code, *halves)):
                        code.store(vector, to, (column + part * PAIR_LANES) * 4)


def _pairs_at_once(group: int) -> tuple[int, ...]:
    """Return the numbers of pairs that are taken together: those of one row, where these fit."""
    return (group,) if 4 <= group <= _MOST_HEADS else _WIDE_FEW.get(group, _WIDE_FEW[1])
