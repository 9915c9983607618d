"""How attention reads keys and values: words of many slots side by side, and numbers of one slot.

Keys are loaded as words of 32 bits and transposed as such, whatever numbers are in them: a vector
has the same word of 8 or 16 slots. Numbers become float32 where they are used, while products of
others are computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from kvchat_kernels.cpu.code import F32, I8, I16, I32, LANES, Code, Value
from kvchat_kernels.cpu.maths import Stored, as_floats, load_floats
from kvchat_kernels.kv_code import SCALE_BYTES, Form, NumberCode, group_size

WORD_BYTES = 4
# Whole numbers of a word are moved to its upper end and stay there.
_UNITS = {Form.INT8: 2.0**-24, Form.INT4: 2.0**-28}
_UPPER_HALF = -1 << 16
# Of a float of 8 bits: its sign, and the rest at the end of a float32's exponent.
_E4M3_BITS = 0x87F00000 - (1 << 32)


@dataclass(frozen=True, slots=True)
class HeadNumbers:
    """The numbers of a head of `dim` as a pool has them: floats, or those of a code."""

    stored: Stored | NumberCode
    dim: int

    @property
    def _form(self) -> Form | None:
        return self.stored.form if isinstance(self.stored, NumberCode) else None

    @property
    def num_bytes(self) -> int:
        """The bytes of a head without its scales, a multiple of 8."""
        own = self.stored
        return own.width(self.dim) if isinstance(own, NumberCode) else self.dim * own.num_bytes

    @property
    def group(self) -> int:
        """How many numbers have a scale in common: of floats all, of which it is 1."""
        return self.dim if self._form is None else group_size(self.dim)

    @property
    def scale_bytes(self) -> int:
        return 0 if self._form is None else self.dim // self.group * SCALE_BYTES

    @property
    def unit(self) -> float:
        """What numbers of `of_words` are multiplied with, beside scales."""
        return 1.0 if self._form is None else _UNITS.get(self._form, 1.0)

    @property
    def columns_of_word(self) -> int:
        """How many columns a group's next word begins behind a word's first."""
        return 4 if self._form is not None else WORD_BYTES // (self.num_bytes // self.dim)

    def of_words(self, code: Code, words: Value) -> list[tuple[int, Value]]:
        """Return the numbers of a vector of words as floats, each with its column behind the
        word's first. They are to be multiplied with `unit` and what `load_scales` returns.
        """
        if isinstance(self.stored, Stored):
            return list(enumerate(_floats_of_words(code, words, self.stored)))
        if self._form is Form.E4M3:
            ends = (words << 24 - 8 * index for index in range(4))
            return [(index, _e4m3(code, end.shifted_down(4))) for index, end in enumerate(ends)]
        if self._form is Form.INT8:
            return [(index, _whole(code, words, 8, index)) for index in range(4)]
        signed = words ^ -0x77777778  # what is stored is 8 more: the opposite of the sign's bit
        return [
            (index // 2 + index % 2 * self.group // 2, _whole(code, signed, 4, index))
            for index in range(8)
        ]

    @property
    def has_bytes(self) -> bool:
        """Whether `bytes_of_words` has bytes of the numbers, and 16 neighbours one scale."""
        run = {Form.INT8: 16, Form.INT4: 32}
        return self._form in run and self.dim % run[self._form] == 0

    @property
    def zero(self) -> int:
        """The byte of `bytes_of_words` that stands for zero."""
        return 128 if self._form is Form.INT8 else 8

    def bytes_of_words(self, code: Code, words: Value) -> list[tuple[int, Value]]:
        """Return whole numbers of a vector of words as words of four bytes without signs, each with
        its column behind the word's first.
        """
        if self._form is Form.INT8:
            return [(0, words ^ -0x7F7F7F80)]
        return [(half * self.group // 2, (words >> 4 * half) & 0x0F0F0F0F) for half in (0, 1)]

    def shorts_of_words(self, code: Code, words: Value) -> list[Value]:
        """Return whole numbers of words of two bytes in 16 bits each: as words of these.

        Of 4 bits they are two numbers, half a group apart.
        """
        if self._form is Form.INT8:
            return [words]
        kind = ir.VectorType(I16, 2 * words.type.count)
        shorts = code.as_bits(words, kind)
        return [code.as_bits((shorts >> bits & 15) - 8, words.type) for bits in (0, 4)]

    def load_scales(self, code: Code, heads: Sequence[Value]) -> list[Value]:
        """Return every group's scales of all heads, whose addresses are `heads`."""
        num_groups = self.dim // self.group
        if num_groups % 2:
            return [
                as_floats(
                    code,
                    code.gathered([code.load(at, index * SCALE_BYTES, I16) for at in heads]),
                    Stored.BFLOAT,
                )
                for index in range(num_groups)
            ]
        return [
            scale
            for _, word in words_of(code, heads, self.scale_bytes)
            for scale in _floats_of_words(code, word, Stored.BFLOAT)
        ]

    def lanes(self, most: int) -> int:
        """Return how many numbers `load_vectors` loads at once: all have one scale."""
        run = self.group // 2 if self._form is Form.INT4 else self.group
        return most if run % most == 0 else LANES

    def vector_columns(self, lanes: int) -> list[int]:
        """Return the first column of each vector of `lanes` numbers that `load_vectors` loads."""
        if self._form is not Form.INT4:
            return list(range(0, self.dim, lanes))
        half = self.group // 2
        return [
            first + part + upper
            for first in range(0, self.dim, self.group)
            for part in range(0, half, lanes)
            for upper in (0, half)
        ]

    def load_vectors(
        self, code: Code, at: Value, scales: Value | None, columns: Sequence[int], lanes: int
    ) -> list[Value]:
        """Return the numbers of the head at an address that begin at `columns`, a few neighbours of
        `vector_columns`; of 4 bits these are pairs.
        """
        if isinstance(self.stored, Stored):
            size = self.num_bytes // self.dim
            return [load_floats(code, at, column * size, self.stored, lanes) for column in columns]
        assert scales is not None
        factors = [_spread_scale(code, scales, column // self.group, lanes) for column in columns]
        if self._form is not Form.INT4:
            numbers = (self._load_bytes(code, at, column, lanes) for column in columns)
            return [number * factor for number, factor in zip(numbers, factors, strict=True)]
        found = []
        for column, factor in zip(columns[::2], factors[::2], strict=True):
            first = column // self.group * self.group
            place = first // 2 + column - first
            loaded = code.load(at, place, ir.VectorType(I8, lanes))
            wide = code.convert("zext", loaded, ir.VectorType(I32, lanes))
            for level in (wide & 15, wide >> 4):
                number = code.convert("sitofp", level, factor.type)
                found.append(number * factor - factor * 8.0)
        return found

    def _load_bytes(self, code: Code, at: Value, column: int, lanes: int) -> Value:
        if self._form is Form.INT8:
            return load_floats(code, at, column, Stored.INT8, lanes)
        loaded = code.load(at, column, ir.VectorType(I8, lanes))
        return _e4m3(code, code.convert("sext", loaded, ir.VectorType(I32, lanes)) << 20)


def words_of(code: Code, heads: Sequence[Value], num_bytes: int) -> Iterator[tuple[int, Value]]:
    """Yield the number of every word of heads of `num_bytes`, and that word of all heads.

    As many words as there are heads are loaded at once where possible.
    """
    done, count = 0, len(heads)
    while (rest := num_bytes // WORD_BYTES - done) > 0:
        while count > rest:
            count //= 2
        words = load_words(code, heads, done * WORD_BYTES, count)
        yield from enumerate(words, done)
        done += count


def load_words(code: Code, heads: Sequence[Value], offset: Value | int, count: int) -> list[Value]:
    """Load `count` words of each address; return the first of all, the second of all, and so on.

    Both are powers of two, `count` the lesser. In a round vectors of one half alternate with those
    of the other, which moves every bit of an element's place up by one.
    """
    lanes, half = len(heads), count // 2
    kind = ir.VectorType(I32, count) if half else I32
    loaded = [code.load(address, offset, kind) for address in heads]
    run = lanes // count
    vectors = [code.chain(loaded[first : first + run]) for first in range(0, lanes, run)]
    low = [lane // 2 + lanes * (lane % 2) for lane in range(lanes)]
    high = [lane + lanes // 2 for lane in low]
    for _ in range(lanes.bit_length() - 1 if half else 0):
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [code.shuffled(*pair, order) for pair in pairs for order in (low, high)]
    return vectors


def _floats_of_words(code: Code, words: Value, stored: Stored) -> list[Value]:
    """Return the one or two floats of each word, as float32."""
    count = words.type.count
    floats = ir.VectorType(F32, count)
    if stored is Stored.FLOAT:
        return [code.as_bits(words, floats)]
    if stored is Stored.BFLOAT:
        return [code.as_bits(bits, floats) for bits in (words << 16, words & _UPPER_HALF)]
    shorts = code.as_bits(words, ir.VectorType(I16, 2 * count))
    halves = (code.picked(shorts, range(first, 2 * count, 2)) for first in (0, 1))
    return [as_floats(code, half, stored) for half in halves]


def _whole(code: Code, words: Value, bits: int, index: int) -> Value:
    """Return a signed number of so many bits of each word, the `index`th from below, as floats of
    the word's upper end.
    """
    moved = words << 32 - bits * (index + 1)
    return code.convert("sitofp", moved & -1 << 32 - bits, ir.VectorType(F32, words.type.count))


def _e4m3(code: Code, ends: Value) -> Value:
    """Return floats of 8 bits as float32: 20 bits are below them in a word, sign bits above."""
    floats = ir.VectorType(F32, ends.type.count)
    return code.as_bits(ends & _E4M3_BITS, floats) * 2.0**120  # its exponents are 120 less


def _spread_scale(code: Code, scales: Value, group: int, lanes: int) -> Value:
    """Return a scale, the upper half of a float32, in all lanes."""
    scale = code.load(scales, group * SCALE_BYTES, I16)
    bits = code.as_bits(code.spread(scale, 2 * lanes), ir.VectorType(I32, lanes)) & _UPPER_HALF
    return code.as_bits(bits, ir.VectorType(F32, lanes))
