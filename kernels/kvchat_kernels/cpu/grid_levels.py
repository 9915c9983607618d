"""Weights that are points of a grid (`linear/grids.py`), looked up in registers or in memory.

With instructions that permute bytes of two registers of 512 bits, a table of codes is some
registers: 64 points are looked up at once, and their codes become bytes by shifts of another width
for each byte. Other processors load the numbers of 4 columns for each block of a group.
"""

from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from kvchat_kernels.cpu.block_levels import bits_at
from kvchat_kernels.cpu.code import F32, I8, I16, I32, I64, Code, Value, constant, has_feature
from kvchat_kernels.linear.grids import (
    BLOCKS,
    DIGITS,
    FREE_BITS,
    PASS_POINTS,
    WORD,
    WORDS,
    Grid,
    Moves,
    Signs,
    digits_of,
)

_REGISTER = 64
_WORD_BYTES = 4
_INTS, _FLAGS = (ir.VectorType(kind, BLOCKS) for kind in (I32, ir.IntType(1)))
_FLOATS = ir.VectorType(F32, BLOCKS)
_TWO_IN_EACH_BYTE = 0x0202_0202


class Records:
    """The records of one group of 8 blocks, of a row or of two side by side: their addresses."""

    def __init__(self, code: Code, grid: Grid, at: Sequence[Value]) -> None:
        self.code, self.grid, self.at = code, grid, at
        self._codes: dict[int, tuple[Value, Value]] = {}
        self._points_loaded: dict[int, list[Value]] = {}
        self._rooms: dict[tuple[Value, int], Value] = {}
        self._sign_bits: Value | None = None
        self._digit_codes: dict[Value, tuple[Value, Value]] = {}

    def numbers(self, word: int, zero: int = 0) -> Value:
        """Return the numbers of a word of 4 columns of all blocks, plus `zero`: bytes.

        A vector has the blocks of the first row, then those of the other.
        """
        if self.grid.is_ternary:
            return self._digits(word, zero - 1)
        start = zero - (self.grid.moves is not Moves.NONE)
        if _has_permutations():
            numbers = self._permuted(word, start)
        else:
            numbers = self._loaded(word, start)
        if self.grid.signs is not Signs.NONE:
            return self._with_signs(word, numbers)
        return numbers if start == zero else self._moved(word, numbers)

    def scales(self, part: int) -> Value:
        """Return the scales of the first or second halves of the first row's blocks."""
        if self.grid.is_ternary:
            return self.code.floats(1.0, BLOCKS)
        stored = self._nibbles(self.at[0], part) & self.grid.scale_mask
        return self.code.convert("sitofp", stored * 2 + 1, _FLOATS)

    # Digits

    def _digits(self, word: int, zero: int) -> Value:
        """Return the digits of a word of columns, plus `zero`."""
        digits = [self._digits_of_row(at, word) for at in self.at]
        whole = self.code.chain(digits)
        return whole + zero if zero else whole

    def _digits_of_row(self, at: Value, word: int) -> Value:
        first, second, third = DIGITS
        if word < first[2]:
            return self._digit_of(at, first, word)
        place = 2 * (word - first[2])
        one = self._digit_of(at, second, place)
        if place + 1 < second[2]:
            return self.code.joined(one, self._digit_of(at, second, place + 1))
        few = [self._digit_of(at, third, digit) for digit in range(third[2])]
        return self.code.joined(one, self.code.chain(few))

    def _digit_of(self, at: Value, run: tuple[int, int, int], digit: int) -> Value:
        """Return a digit of each byte of a run of a record.

        With permutations the bytes of a record are looked up, in 2 bits a digit. A byte times 3 to
        the power of n, without what is above a byte, is below 86 where digit n is 0, and above 170
        where it is 2.
        """
        code, (start, count, _) = self.code, run
        if _has_permutations():
            low, high = self._codes_of_digits(at)
            lanes = range(start, start + count)
            if digit == WORD:
                return code.picked(high, lanes)
            return bits_at(code, code.picked(low, lanes), 2, 2 * digit, 0)
        powers = code.load(at, start, ir.VectorType(I8, count))
        for _ in range(digit):
            powers = powers + powers + powers
        one, two, none = (Value(code, constant(number, powers.type)) for number in (1, 2, 0))
        is_two, is_some = (
            Value(code, code.builder.icmp_unsigned(">", powers.raw, constant(least, powers.type)))
            for least in (170, 85)
        )
        return code.select(is_two, two, code.select(is_some, one, none))

    def _codes_of_digits(self, at: Value) -> tuple[Value, Value]:
        """Return the first four digits of the bytes of a record, and the fifth ones."""
        if at not in self._digit_codes:
            code = self.code
            first, second, third = (
                code.load(at, start, ir.VectorType(I8, count)) for start, count, _ in DIGITS
            )
            padded = code.picked(third, [*range(third.type.count)] * WORD)
            stored = code.joined(first, code.joined(second, padded))
            digits = digits_of(np.arange(256, dtype=np.uint8)[:, None], WORD + 1)
            low = (digits[:, :WORD] << np.arange(0, 2 * WORD, 2, dtype=np.uint8)).sum(axis=1)
            self._digit_codes[at] = (
                _looked_up(code, low.tolist(), stored, ()),
                _looked_up(code, digits[:, WORD].tolist(), stored, ()),
            )
        return self._digit_codes[at]

    # Points in registers

    def _permuted(self, word: int, zero: int) -> Value:
        number = word * self.grid.num_passes // WORDS
        if number not in self._codes:
            self._codes[number] = self._codes_of_pass(number)
        return self._spread(word, *self._codes[number], zero)

    def _codes_of_pass(self, number: int) -> tuple[Value, Value]:
        """Return the low and the high bytes of the codes of a pass, of all rows."""
        code, grid = self.code, self.grid
        at = number * PASS_POINTS
        kind = ir.VectorType(I8, PASS_POINTS)
        points = code.chain([code.load(row, at, kind) for row in self.at])
        size = points.type.count
        if size < _REGISTER:
            points = code.joined(points, points)
        flags = [self._flags(self._high_at(bit, number), size) for bit in range(grid.high_bits)]
        half = grid.width // 2 * grid.code_bits
        both = []
        for byte in range(2):
            shift, mask = byte * half, (1 << half) - 1
            table = [(point >> shift) & mask for point in grid.points]
            found = _looked_up(code, table, points, flags)
            both.append(found if size == _REGISTER else code.picked(found, range(size)))
        return both[0], both[1]

    def _high_at(self, bit: int, number: int) -> int:
        size = self.grid.num_points // 8
        return self.grid.high_at + bit * size + number * (PASS_POINTS // 8)

    def _flags(self, offset: int, size: int) -> Value:
        """Load bits of all rows, a bit a lane; of a single row twice."""
        bits = self._bits(offset)
        if size < _REGISTER:
            bits = _twice(self.code, bits)
        return self.code.as_bits(bits, ir.VectorType(ir.IntType(1), _REGISTER))

    def _bits(self, offset: int) -> Value:
        """Load 32 bits of each row, as one number."""
        code = self.code
        each = [code.load(at, offset, I32) for at in self.at]
        if len(each) == 1:
            return each[0]
        low, high = (code.convert("zext", bits, I64) for bits in each)
        return low | (high << 32)

    def _spread(self, word: int, low: Value, high: Value, zero: int) -> Value:
        """Return the numbers of a word of columns, of codes: two neighbouring blocks a qword."""
        code, grid = self.code, self.grid
        count = low.type.count
        if grid.width == 2 * WORD:
            source = high if word % 2 else low
            places = [2 * (word // 2) + side for side in range(2)]
            shifts = [8 * place + grid.code_bits * n for place in places for n in range(WORD)]
        else:
            half, of_pair = word % WORD // 2, word % 2
            lanes = [
                start + 8 * half + lane // 2 + count * (lane % 2)
                for start in range(0, count, 16)
                for lane in range(16)
            ]
            source = code.shuffled(low, high, lanes)
            shifts = [
                16 * (2 * of_pair + side) + 8 * (n // 2) + grid.code_bits * (n % 2)
                for side in range(2)
                for n in range(WORD)
            ]
        control = Value(code, ir.Constant(source.type, shifts * (count // 8)))
        name = f"llvm.x86.avx512.pmultishift.qb.{8 * count}"
        codes = code.call(name, source.type, control, source)
        each = [_byte(number + zero) for number in grid.numbers]
        table = Value(code, ir.Constant(source.type, each * (count // len(each))))
        return code.call(f"llvm.x86.avx512.permvar.qi.{8 * count}", source.type, table, codes)

    # Points in memory

    def _loaded(self, word: int, zero: int) -> Value:
        """Return the numbers of a word of columns, which are loaded for each block."""
        number = word * WORD // self.grid.width
        if number not in self._points_loaded:
            self._points_loaded[number] = self._load_points(number, zero)
        words = self._points_loaded[number]
        return words[word % len(words)]

    def _load_points(self, number: int, zero: int) -> list[Value]:
        """Return the words of the points of this number in each block."""
        code, grid = self.code, self.grid
        table, wide = _table(code, grid, zero), ir.IntType(8 * grid.width)
        places = [grid.place(block, number) for block in range(BLOCKS)]
        vectors = []
        for at in self.at:
            points = self._numbers_of_points(at, places)
            each = [code.load(table, point * grid.width, wide) for point in points]
            halves = [code.gathered(half) for half in (each[:4], each[4:])]
            vectors.append(code.as_bits(code.joined(*halves), ir.VectorType(I32, 2 * grid.width)))
        whole, step = code.chain(vectors), grid.width // WORD
        count = whole.type.count
        kind = ir.VectorType(I8, WORD * count // step)
        return [
            code.as_bits(code.picked(whole, range(word, count, step)), kind) for word in range(step)
        ]

    def _numbers_of_points(self, at: Value, places: Sequence[int]) -> list[Value]:
        """Load the numbers of the points at some places of a pass."""
        code = self.code
        if not self.grid.high_bits:
            return [code.convert("zext", code.load(at, place, I8), I64) for place in places]
        number = places[0] // PASS_POINTS
        if (at, number) not in self._rooms:
            self._rooms[at, number] = self._written_points(at, number)
        room, first = self._rooms[at, number], number * PASS_POINTS
        offsets = [2 * (place - first) for place in places]
        return [code.convert("zext", code.load(room, offset, I16), I64) for offset in offsets]

    def _written_points(self, at: Value, number: int) -> Value:
        """Write the numbers of the points of a pass to memory, 16 bits each."""
        code, room = self.code, self.code.room(2 * PASS_POINTS)
        shorts = ir.VectorType(I16, PASS_POINTS)
        low = code.load(at, number * PASS_POINTS, ir.VectorType(I8, PASS_POINTS))
        points = code.convert("zext", low, shorts)
        for bit in range(self.grid.high_bits):
            bits = code.load(at, self._high_at(bit, number), I32)
            flags = code.as_bits(bits, ir.VectorType(ir.IntType(1), PASS_POINTS))
            points = points | (code.convert("zext", flags, shorts) << (8 + bit))
        code.store(points, room, 0)
        return room

    # Signs, moves and scales

    def _with_signs(self, word: int, numbers: Value) -> Value:
        code = self.code
        if self._sign_bits is None:
            self._sign_bits = code.as_bits(self._signs(), numbers.type)
        bits, zero = self._sign_bits & _byte(1 << word), constant(0, numbers.type)
        are_below = Value(code, code.builder.icmp_signed("!=", bits.raw, zero))
        return code.select(are_below, Value(code, zero) - numbers, numbers)

    def _signs(self) -> Value:
        """Return the signs of each block of all rows, 32 bits each."""
        signs = self.code.chain([self._load_signs(at) for at in self.at])
        if self.grid.signs is Signs.ALL:
            return signs
        own = signs & (~FREE_BITS & 0xFFFF_FFFF)
        parity = own ^ (own >> 16)
        parity = parity ^ (parity >> 8)
        parity = (parity ^ (parity >> 1)) << 25
        return own | (parity & FREE_BITS)

    def _load_signs(self, at: Value) -> Value:
        return self.code.load(at, self.grid.signs_at, _INTS)

    def _moved(self, word: int, numbers: Value) -> Value:
        """Return numbers that are moved by 1 up or down, of those that are moved down."""
        code, flags = self.code, []
        for at in self.at:
            if self.grid.moves is Moves.BLOCKS:
                flags.append(self._nibbles(at, 0) < BLOCKS)
            else:
                stored = code.load(at, self.grid.moves_at + word // 2, I8)
                flags.append(code.as_bits(stored ^ -1, _FLAGS))
        kind = ir.VectorType(I32, BLOCKS * len(self.at))
        two, zero = (Value(code, constant(each, kind)) for each in (_TWO_IN_EACH_BYTE, 0))
        return numbers + code.as_bits(code.select(code.chain(flags), two, zero), numbers.type)

    def _nibbles(self, at: Value, part: int) -> Value:
        """Return the 4 bits of each block that are the scale of a part, 32 bits each."""
        code, offset = self.code, self.grid.part_at(part)
        if offset is None:
            bits = (self._load_signs(at) >> 25) & 0x55
            bits = (bits | (bits >> 1)) & 0x33
            return (bits | (bits >> 2)) & 15
        bits = code.load(at, offset, I32)
        shifts = Value(code, ir.Constant(_INTS, list(range(0, 32, 4))))
        return (code.spread(bits, BLOCKS) >> shifts) & 15


def _has_permutations() -> bool:
    return has_feature("avx512vbmi") and has_feature("avx512vl")


def _twice(code: Code, bits: Value) -> Value:
    """Return 32 bits twice, as one number."""
    wide = code.convert("zext", bits, I64)
    return wide | (wide << 32)


def _looked_up(code: Code, table: Sequence[int], low: Value, flags: Sequence[Value]) -> Value:
    """Return the bytes of a table at places whose low 8 bits are `low`, the others `flags`."""
    if flags:
        half = len(table) // 2
        parts = [_looked_up(code, part, low, flags[:-1]) for part in (table[:half], table[half:])]
        return code.select(flags[-1], parts[1], parts[0])
    halves = []
    for start in range(0, len(table), 2 * _REGISTER):
        one, other = (
            Value(code, ir.Constant(low.type, [_byte(n) for n in table[at : at + _REGISTER]]))
            for at in (start, start + _REGISTER)
        )
        halves.append(code.call("llvm.x86.avx512.vpermi2var.qi.512", low.type, one, low, other))
    return code.select(low < 0, halves[1], halves[0])


def _table(code: Code, grid: Grid, zero: int) -> Value:
    """Return the address of the numbers of all points, a byte each."""
    name, module = f"points {grid.name} {zero}", code.builder.module
    table = module.globals.get(name)
    if table is None:
        numbers = (grid.numbers_of_points.astype(np.int16) + zero).astype(np.uint8)
        words = numbers.view(np.uint32).flatten()
        kind = ir.ArrayType(I32, len(words))
        table = ir.GlobalVariable(module, kind, name)
        table.initializer = ir.Constant(kind, words.tolist())
        table.global_constant, table.linkage = True, "internal"
    return Value(code, code.builder.ptrtoint(table, I64))


def _byte(number: int) -> int:
    return (number + 128) % 256 - 128
