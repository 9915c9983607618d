"""Attention over whole numbers of 8 and 4 bits, in products of bytes.

What a query has of a group of columns is rounded to 16 bits, and so are a part's weights times the
scales of a group of values: in units of their own, in which the largest is 32,639 or 32,767. Sums
of products are whole numbers and exact, so a row's result does not depend on the rows beside it.

Keys are bytes without signs, more than their numbers by the same for all. So the sum of what they
are multiplied with, so many times, is taken away again.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from kvchat_kernels.cpu.attention import Part
from kvchat_kernels.cpu.attention_reading import WORD_BYTES
from kvchat_kernels.cpu.attention_task import JOB_ROWS, PART, AttentionForm, Record
from kvchat_kernels.cpu.byte_products import (
    FLOATS,
    MOST_IN_BYTES,
    MOST_SHORT,
    WORD_LANES,
    add_byte_products,
    add_short_products,
    interleaved_bytes,
    size_of,
    store_in_bytes,
    store_short,
    unit_of,
    whole,
)
from kvchat_kernels.cpu.code import F32, I32, LANES, Code, Value

# How many vectors of sums have room in registers.
_SUMS = 20


class BytePart(Part):
    """Writes the code of a part whose form is `in_bytes`.

    `_query_units` has pairs: a float32, and the whole number that sums begin with.
    """

    def __init__(self, code: Code, form: AttentionForm, is_wide: bool) -> None:
        super().__init__(code, form, is_wide)
        keys, values = self._keys, self._values
        self._key_groups, self._value_groups = keys.dim // keys.group, values.dim // values.group
        num_pairs, few = JOB_ROWS * form.group, max(self._few)
        self._query_bytes = num_pairs * keys.dim
        self._queries = code.room(2 * self._query_bytes)
        self._query_units = code.room(num_pairs * self._key_groups * 8)
        self._weights = code.room(few * self._value_groups * PART * 2)
        self._weight_units = code.room(few * self._value_groups * 4)
        self._scales = code.room(self._value_groups * PART * 4)
        self._lost = code.room(self._value_groups * 4)

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
            unit, inverse = unit_of(code, code.maximum(most), MOST_IN_BYTES)
            to = self._queries + pair * keys.dim + group * keys.group
            total = whole(code)
            for column, number in zip(columns, numbers, strict=True):
                number = number * code.spread(inverse, WORD_LANES)
                total = total + store_in_bytes(code, number, to, column, self._query_bytes)
            # What is no number comes back in the unit.
            unit = (unit + code.tree_total(lost)) * code.task.scale
            at = self._unit_of_query(pair, group)
            code.store(unit, at, 0)
            code.store(code.tree_total(total) * -keys.zero, at, 4)

    def _unit_of_query(self, pair: Value, group: Value) -> Value:
        return self._query_units + (pair * self._key_groups + group) * 8

    def _slots_at_once(self, num_pairs: int) -> int:
        return 2 * WORD_LANES if 4 * num_pairs <= _SUMS else WORD_LANES

    def _products_of_group(
        self,
        pairs: Sequence[Value],
        group: Value,
        count: int,
        words: AbstractContextManager[tuple[Value, list[Value]]],
    ) -> list[list[Value]]:
        code, keys, lanes = self._code, self._keys, WORD_LANES
        units = [self._unit_of_query(pair, group) for pair in pairs]
        starts = [code.spread(code.load(unit, 4, I32), lanes) for unit in units]
        high = [[code.variable(whole(code)) for _ in range(count)] for _ in pairs]
        low = [[code.variable(start) for _ in range(count)] for start in starts]
        with words as (word, vectors):
            halves = [keys.bytes_of_words(code, vector) for vector in vectors]
            for of_places in zip(*halves, strict=True):
                column = group * keys.group + word * WORD_BYTES + of_places[0][0]
                for pair, *of_pair in zip(pairs, high, low, strict=True):
                    query = self._queries + pair * keys.dim + column
                    for sums, offset in zip(of_pair, (0, self._query_bytes), strict=True):
                        factors = code.spread(code.load(query, offset, I32), lanes)
                        for (_, numbers), total in zip(of_places, sums, strict=True):
                            total.set(add_byte_products(code, total.get(), numbers, factors))
        return [
            [
                self._in_unit((one.get() << 8) + other.get(), unit)
                for one, other in zip(*of_pair, strict=True)
            ]
            for unit, *of_pair in zip(units, high, low, strict=True)
        ]

    def _in_unit(self, wholes: Value, unit: Value) -> Value:
        """Return whole numbers as float32, times the unit at an address."""
        factor = self._code.spread(self._code.load(unit, 0, F32), WORD_LANES)
        return self._code.convert("sitofp", wholes, FLOATS) * factor

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
        most = _SUMS * WORD_LANES // (values.dim // values.num_bytes * len(pairs))
        fits = (each for each in (64, 32) if each <= most and not values.num_bytes % each)
        width = next(fits, WORD_LANES)
        with code.loop(0, values.num_bytes, width) as offset:
            self._write_columns(pairs, offset, width)

    def _weights_of_group(self, index: int | Value, group: Value) -> tuple[Value, Value]:
        """Return the addresses of weights of one of a few pairs, and of their unit."""
        place = group + self._code.whole(0) + index * self._value_groups
        return self._weights + place * (PART * 2), self._weight_units + place * 4

    def _write_weights_of_groups(self, pair: Value, index: Value, groups: Sequence[Value]) -> None:
        """Write weights times the scales of groups, and their units."""
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
        units = [unit_of(code, code.maximum(of_group.get()), MOST_SHORT) for of_group in most]
        with code.loop(first, end, lanes) as slot:
            for number, (_, inverse), (to, _) in zip(numbers(slot), units, places, strict=True):
                store_short(code, number * code.spread(inverse, lanes), to, slot * 2)
        for group, (unit, _), (_, at) in zip(groups, units, places, strict=True):
            code.store(unit + code.load(self._lost, group * 4, F32), at, 0)

    def _write_columns(self, pairs: Sequence[Value], offset: Value, width: int) -> None:
        """Write the sums of the columns of `width` bytes."""
        code, values, lanes = self._code, self._values, WORD_LANES
        num_halves = values.dim // values.num_bytes
        runs = range(0, width, lanes)
        groups = [(offset + run) * num_halves // values.group for run in runs]
        places = [
            [self._weights_of_group(index, group) for group in groups]
            for index in range(len(pairs))
        ]
        sums = [
            [[code.variable(whole(code)) for _ in range(num_halves)] for _ in runs] for _ in pairs
        ]
        with code.loop(self._first & -LANES, self._end, LANES) as slot:
            tokens = self._tokens(code.task.values, values.num_bytes, slot, LANES)
            for first in range(0, LANES, 2):
                words = interleaved_bytes(code, tokens[first : first + 2], offset, width)
                numbers = [values.shorts_of_words(code, word) for word in words]
                for of_pair, own in zip(places, sums, strict=True):
                    for (at, _), of_run, totals in zip(of_pair, numbers, own, strict=True):
                        weights = code.load(at, (slot - self._start + first) * 2, I32)
                        for of_half, total in zip(of_run, totals, strict=True):
                            factors = code.spread(weights, lanes)
                            total.set(add_short_products(code, total.get(), of_half, factors))
        for pair, of_pair, own in zip(pairs, places, sums, strict=True):
            to = self._result(pair, Record.SUMS, values.dim)
            for run, (_, unit), totals in zip(runs, of_pair, own, strict=True):
                for half, total in enumerate(totals):
                    column = (offset + run) * num_halves + half * (values.group // 2)
                    code.store(self._in_unit(total.get(), unit), to, column * 4)
