"""Attention over whole numbers of 8 and 4 bits, in products of bytes.

What a query has of a group of columns is rounded to 16 bits, and so are a part's weights times the
scales of a group of values: in units of their own, in which the largest is 32,639. Sums of products
are whole numbers and exact, so a row's result does not depend on the rows beside it.

Bytes without signs are more than their numbers, by the same for all. So the sum of what they are
multiplied with, so many times, is taken away again.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from kvchat_kernels.cpu.attention import JOB_ROWS, PART, AttentionForm, Part, Record
from kvchat_kernels.cpu.attention_reading import WORD_BYTES
from kvchat_kernels.cpu.byte_products import (
    FLOATS,
    WORD_LANES,
    add_byte_products,
    interleaved_bytes,
    size_of,
    store_in_bytes,
    unit_of,
    whole,
)
from kvchat_kernels.cpu.code import F32, I32, LANES, Code, Value, Variable

# How many vectors of sums have room in registers, each of high and low bytes.
_SUMS = 10


class BytePart(Part):
    """Writes the code of a part whose form is `in_bytes`.

    Units are rooms of pairs: a float32, and the whole number that sums begin with.
    """

    def __init__(self, code: Code, form: AttentionForm, is_wide: bool) -> None:
        super().__init__(code, form, is_wide)
        keys, values = self._keys, self._values
        self._key_groups, self._value_groups = keys.dim // keys.group, values.dim // values.group
        num_pairs, few = JOB_ROWS * form.group, max(self._few)
        self._query_bytes = num_pairs * keys.dim
        self._queries = code.room(2 * self._query_bytes)
        self._query_units = code.room(num_pairs * self._key_groups * 8)
        self._weight_bytes = few * self._value_groups * PART
        self._weights = code.room(2 * self._weight_bytes)
        self._weight_units = code.room(few * self._value_groups * 8)
        self._scales = code.room(self._value_groups * PART * 4)
        self._lost = code.room(self._value_groups * 4)

    def _store_unit(self, at: Value, unit: Value, total: Value, zero: int) -> None:
        """Store a unit, and what takes `zero` of each of the numbers that `total` adds up away."""
        self._code.store(unit, at, 0)
        self._code.store(self._code.tree_total(total) * -zero, at, 4)

    def _sums_from(self, units: Sequence[Value], count: int) -> list[list[tuple[Variable, ...]]]:
        """Return sums of high and of low bytes' products, [units][count]."""
        code = self._code
        starts = [code.spread(code.load(at, 4, I32), WORD_LANES) for at in units]
        zero = whole(code)
        return [
            [(code.variable(zero), code.variable(start)) for _ in range(count)] for start in starts
        ]

    def _add(self, sums: Sequence[Variable], words: Value, at: Value, to_low: int) -> None:
        """Add products with the word of high bytes at an address, and with that of low ones."""
        code = self._code
        for total, offset in zip(sums, (0, to_low), strict=True):
            factors = code.spread(code.load(at, offset, I32), WORD_LANES)
            total.set(add_byte_products(code, total.get(), words, factors))

    def _in_units(self, sums: Sequence[Variable], unit: Value) -> Value:
        """Return sums as float32, times the unit at an address."""
        code = self._code
        high, low = (total.get() for total in sums)
        factor = code.spread(code.load(unit, 0, F32), WORD_LANES)
        return code.convert("sitofp", (high << 8) + low, FLOATS) * factor

    # Scores

    def _write_queries(self) -> None:
        code, keys = self._code, self._keys
        with code.loop(0, self._num_pairs) as pair, code.loop(0, self._key_groups) as group:
            query = self._query(pair) + group * (keys.group * 4)
            columns = range(0, keys.group, WORD_LANES)
            numbers = [code.load(query, column * 4, FLOATS) for column in columns]
            most = lost = code.floats(0.0, WORD_LANES)
            for number in numbers:
                most, lost = code.greatest(most, size_of(code, number)), lost + number * 0.0
            unit, inverse = unit_of(code, code.maximum(most))
            to = self._queries + pair * keys.dim + group * keys.group
            total = whole(code)
            for column, number in zip(columns, numbers, strict=True):
                number = number * code.spread(inverse, WORD_LANES)
                total = total + store_in_bytes(code, number, to, column, self._query_bytes)
            # What is no number comes back in the unit.
            unit = (unit + code.tree_total(lost)) * code.task.scale
            self._store_unit(self._unit_of_query(pair, group), unit, total, keys.zero)

    def _unit_of_query(self, pair: Value, group: Value) -> Value:
        return self._query_units + (pair * self._key_groups + group) * 8

    def _slots_at_once(self, num_pairs: int) -> int:
        return 2 * WORD_LANES if 2 * num_pairs <= _SUMS else WORD_LANES

    def _products_of_group(
        self,
        pairs: Sequence[Value],
        group: Value,
        count: int,
        words: AbstractContextManager[tuple[Value, list[Value]]],
    ) -> list[list[Value]]:
        keys = self._keys
        units = [self._unit_of_query(pair, group) for pair in pairs]
        sums = self._sums_from(units, count)
        with words as (word, vectors):
            halves = [keys.bytes_of_words(self._code, vector) for vector in vectors]
            for of_places in zip(*halves, strict=True):
                column = group * keys.group + word * WORD_BYTES + of_places[0][0]
                for pair, of_pair in zip(pairs, sums, strict=True):
                    query = self._queries + pair * keys.dim + column
                    for (_, numbers), both in zip(of_places, of_pair, strict=True):
                        self._add(both, numbers, query, self._query_bytes)
        return [
            [self._in_units(both, unit) for both in of_pair]
            for of_pair, unit in zip(sums, units, strict=True)
        ]

    # Sums of values

    def _write_all_sums(self) -> None:
        self._write_scales()
        super()._write_all_sums()

    def _write_scales(self) -> None:
        """Write the scales of the part's values, [groups, slots] float32."""
        code, values, lanes = self._code, self._values, WORD_LANES
        zeros = code.floats(0.0, lanes)
        lost = [code.variable(zeros) for _ in range(self._value_groups)]
        with code.loop(self._first & -lanes, self._end, lanes) as slot:
            heads = self._tokens(code.task.value_scales, values.scale_bytes, slot, lanes)
            for group, scales in enumerate(values.load_scales(code, heads)):
                scales = self._within_slots(scales, zeros, slot, self._first, self._end)
                lost[group].set(lost[group].get() + scales * 0.0)
                code.store(scales, self._scales + group * (PART * 4), (slot - self._start) * 4)
        for group, total in enumerate(lost):
            code.store(code.tree_total(total.get()), self._lost, group * 4)

    def _write_sums(self, pairs: Sequence[Value]) -> None:
        code, values = self._code, self._values
        run = 2 - self._value_groups % 2
        with code.loop(0, len(pairs)) as index, code.loop(0, self._value_groups, run) as group:
            groups = [group + each for each in range(run)]
            self._write_weights_of_groups(pairs[0] + index, index, groups)
        num_halves = values.dim // values.num_bytes
        count = next((each for each in (4, 2) if each * len(pairs) <= _SUMS), 1)
        width = max(1, count // num_halves) * WORD_LANES
        while values.num_bytes % width:
            width //= 2
        of_word = [range(num_halves)] if count >= num_halves else [[0], [1]]
        for halves in of_word:
            with code.loop(0, values.num_bytes, width) as offset:
                self._write_columns(pairs, offset, width, halves)

    def _weights_of_group(self, index: int | Value, group: Value) -> tuple[Value, Value]:
        """Return the addresses of high bytes of one of a few pairs' weights, and of their unit."""
        place = group + self._code.whole(0) + index * self._value_groups
        return self._weights + place * PART, self._weight_units + place * 8

    def _write_weights_of_groups(self, pair: Value, index: Value, groups: Sequence[Value]) -> None:
        """Write weights times the scales of groups, in bytes, and their units."""
        code, lanes = self._code, WORD_LANES
        weights = self._scores_of(pair)
        first, end = self._first - self._start, self._end - self._start
        first = first & -lanes
        places = [self._weights_of_group(index, group) for group in groups]

        def numbers(slot: Value) -> Iterator[Value]:
            weight = code.load(weights, slot * 4, FLOATS)
            for group in groups:
                yield weight * code.load(self._scales + group * (PART * 4), slot * 4, FLOATS)

        most = [code.variable(code.floats(0.0, lanes)) for _ in groups]
        with code.loop(first, end, lanes) as slot:
            for number, of_group in zip(numbers(slot), most, strict=True):
                of_group.set(code.greatest(of_group.get(), size_of(code, number)))
        units = [unit_of(code, code.maximum(of_group.get())) for of_group in most]
        totals = [code.variable(whole(code)) for _ in groups]
        with code.loop(first, end, lanes) as slot:
            for number, (_, inverse), (to, _), total in zip(
                numbers(slot), units, places, totals, strict=True
            ):
                number = number * code.spread(inverse, lanes)
                whole_ones = store_in_bytes(code, number, to, slot, self._weight_bytes)
                total.set(total.get() + whole_ones)
        for group, (unit, _), (_, at), total in zip(groups, units, places, totals, strict=True):
            unit = unit + code.load(self._lost, group * 4, F32)
            self._store_unit(at, unit, total.get(), self._values.zero)

    def _write_columns(
        self, pairs: Sequence[Value], offset: Value, width: int, halves: Sequence[int]
    ) -> None:
        """Write the sums of the columns of `width` bytes, or of a half of their bits."""
        code, values = self._code, self._values
        num_halves = values.dim // values.num_bytes
        runs = range(0, width, WORD_LANES)
        groups = [(offset + run) * num_halves // values.group for run in runs]
        places = [
            [self._weights_of_group(index, group) for group in groups]
            for index in range(len(pairs))
        ]
        sums = [self._sums_from([unit for _, unit in of], len(halves)) for of in places]
        with code.loop(self._first & -LANES, self._end, LANES) as slot:
            tokens = self._tokens(code.task.values, values.num_bytes, slot, LANES)
            for quad in range(0, LANES, WORD_BYTES):
                words = interleaved_bytes(code, tokens[quad : quad + WORD_BYTES], offset, width)
                numbers = [values.bytes_of_words(code, word) for word in words]
                for of_pair, own in zip(places, sums, strict=True):
                    for run, (at, _) in enumerate(of_pair):
                        for half, both in zip(halves, own[run], strict=True):
                            start = at + (slot - self._start + quad)
                            self._add(both, numbers[run][half][1], start, self._weight_bytes)
        for pair, of_pair, own in zip(pairs, places, sums, strict=True):
            to = self._result(pair, Record.SUMS, values.dim)
            for run, (_, unit) in enumerate(of_pair):
                for half, both in zip(halves, own[run], strict=True):
                    column = (offset + runs[run]) * num_halves + half * (values.group // 2)
                    code.store(self._in_units(both, unit), to, column * 4)
