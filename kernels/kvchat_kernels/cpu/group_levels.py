"""Reads the levels of stored groups of columns into block weights, each word once.

The bytes are those that torch's operations make of them (`kvchat/model/packed/unpacking.py`),
interleaved if asked for. Words that hold several rows, or lie beside those of other rows, are
turned in registers: 8 of them and 8 blocks at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from kvchat_kernels.cpu.block_rows import alternating, each_group, transposed
from kvchat_kernels.cpu.code import I8, I16, I32, Code, Value, kernel
from kvchat_kernels.cpu.task import Memory, Task
from kvchat_kernels.linear.blocks import COLUMNS
from kvchat_kernels.linear.stored_groups import AWQ_ROWS, WORD_BITS, WordOrder

_HALF = COLUMNS // 2
_WORD_BYTES = WORD_BITS // 8
# Blocks and words of a row of words that are turned at once.
_TURNED_AT_ONCE = 8
# Levels of 8 bits are signed in blocks: the highest bit of each byte of a word.
_SIGNS = -0x7F7F7F80


class LevelsTask(Task):
    """Levels to read: sizes are in words, blocks of 32 columns, and bytes (`word_row`).

    num_lines    the rows of the matrix; of AWQ the words of 8 rows
    words        as the file has them; `word_row` is how far a row of words is from the next
    levels       written, as BlockWeights has them
    chunk        lines of a unit
    """

    num_lines: int
    num_blocks: int
    words: Memory
    word_row: int
    levels: Memory
    chunk: int


@kernel("group levels", LevelsTask)
def group_levels_kernel(code: Code, order: WordOrder, bits: int, is_interleaved: bool) -> None:
    """Write the kernel that reads levels that are packed so. Units: chunks of lines."""
    start, end = code.chunk(code.task.num_lines)
    if order is WordOrder.ROWS:
        with code.loop(start, end) as row:
            for index, size in _groups(code, is_interleaved):
                _copy_row(code, row, index, size, bits)
        return
    copy = _copy_awq if order is WordOrder.AWQ else _copy_turned_4 if bits == 4 else _copy_turned_8
    for index, size in _groups(code, is_interleaved):
        middle = start
        if size == _TURNED_AT_ONCE:
            middle = start + (end - start) // size * size
            with code.loop(start, middle, size) as line:
                copy(code, _Tile(code, line, size, index, size))
        with code.loop(middle, end) as line:  # few: the last lines, and the last blocks of each
            copy(code, _Tile(code, line, 1, index, size))


def _groups(code: Code, is_interleaved: bool) -> Iterator[tuple[Value, int]]:
    """Write loops over the blocks of a row that are stored together: alone, if not interleaved."""
    count = code.task.num_blocks
    if is_interleaved:
        yield from each_group(code, count)
        return
    with code.loop(0, count) as index:
        yield index, 1


# Words of one row


def _copy_row(code: Code, row: Value, index: Value, size: int, bits: int) -> None:
    block_bytes = COLUMNS * bits // 8
    words = code.task.words + row * code.task.word_row
    read, word = (_nibbles, I32) if bits == 4 else (_bytes, I16)
    kind = ir.VectorType(word, block_bytes * 8 // word.width)
    blocks = [read(code, words, (index + number) * block_bytes) for number in range(size)]
    levels = alternating(code, [code.as_bits(block, kind) for block in blocks])
    place = (row * code.task.num_blocks + index) * block_bytes
    code.store(levels, code.task.levels, place)


def _nibbles(code: Code, address: Value, offset: Value) -> Value:
    """Return 32 neighbouring levels as a block has them: the first 16 in the low bits."""
    pairs = code.load(address, offset, ir.VectorType(I8, _HALF))
    even, odd = pairs & 15, pairs >> 4
    first, second = (
        code.shuffled(even, odd, [lane // 2 + _HALF * (lane % 2) for lane in range(at, at + _HALF)])
        for at in (0, _HALF)
    )
    return first | (second << 4)


def _bytes(code: Code, address: Value, offset: Value) -> Value:
    return code.load(address, offset, ir.VectorType(I8, COLUMNS)) ^ -128


# Words that are turned


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some neighbouring lines of some neighbouring blocks: the numbers of the first of each."""

    code: Code
    line: Value
    lanes: int
    index: Value
    size: int

    def load(self, word_row: Value) -> Value:
        """Load the words of the lines in a row of words."""
        code = self.code
        offset = word_row * code.task.word_row + self.line * _WORD_BYTES
        return code.load(code.task.words, offset, ir.VectorType(I32, self.lanes))

    def store(
        self, words: Sequence[Value], place: Value | int, bits: int, step: int = 1, row: int = 0
    ) -> None:
        """Store a word of each block: the one that is `place`th in its block.

        Each of `words` has a lane for each line; a line has `step` rows, of which `row` is meant.
        """
        code, size = self.code, self.size
        word_bytes, block_bytes = words[0].type.element.width // 8, COLUMNS * bits // 8
        row_bytes = code.task.num_blocks * block_bytes
        first = (self.line * step + row) * row_bytes + self.index * block_bytes
        offset = first + code.whole(size * word_bytes) * place
        for part in transposed(code, words) if self.lanes > 1 else [alternating(code, words)]:
            code.store(part, code.task.levels, offset)
            offset = offset + row_bytes * step


def _copy_turned_4(code: Code, tile: _Tile) -> None:
    """A block is 4 words of 8 columns; columns 16 to 31 become the high bits of 0 to 15."""
    blocks = []
    for number in range(tile.size):
        first = (tile.index + number) * 4
        low, next_low, high, next_high = (tile.load(first + place) for place in range(4))
        blocks.append([*_pairs(low, high), *_pairs(next_low, next_high)])
    for place, words in enumerate(zip(*blocks, strict=True)):
        tile.store(words, place, 4)


def _pairs(low: Value, high: Value) -> list[Value]:
    """Return two words of bytes: the levels of `low` in the low bits, of `high` in the others."""
    halves = [(low & 0xFFFF, high & 0xFFFF), (low >> 16, high >> 16)]
    return [_spread(one) | (_spread(other) << 4) for one, other in halves]


def _spread(levels: Value) -> Value:
    """Return 4 levels of 4 bits as bytes."""
    levels = (levels | (levels << 8)) & 0x00FF00FF
    return (levels | (levels << 4)) & 0x0F0F0F0F


def _copy_turned_8(code: Code, tile: _Tile) -> None:
    """A block is 8 words of 4 columns; blocks alternate by 16 bits."""
    shorts = ir.VectorType(I16, tile.lanes)
    with code.loop(0, 8) as place:
        words = [tile.load((tile.index + n) * 8 + place) ^ _SIGNS for n in range(tile.size)]
        for half in range(2):
            parts = [code.convert("trunc", word >> 16 if half else word, shorts) for word in words]
            tile.store(parts, place * 2 + half, 8)


def _copy_awq(code: Code, tile: _Tile) -> None:
    """A block is 32 words of 8 rows; 8 of these become a word of each row."""
    with code.loop(0, COLUMNS // 8) as place:
        blocks = []
        for number in range(tile.size):
            first = (tile.index + number) * COLUMNS + place * 4
            columns = [first + (n // 2 + _HALF * (n % 2)) for n in range(8)]
            blocks.append(_turned(code, [tile.load(column) for column in columns]))
        for row, words in zip(AWQ_ROWS, zip(*blocks, strict=True), strict=True):
            tile.store(words, place, 4, step=8, row=row)


def _turned(code: Code, words: list[Value]) -> list[Value]:
    """Return 8 words whose 4 bits `n` are those `word` of the word `n`, for each `word` of 8."""
    words = list(words)
    for step, mask in ((1, 0x0F0F0F0F), (2, 0x00FF00FF), (4, 0x0000FFFF)):
        for one in (n for n in range(8) if not n & step):
            changed = ((words[one] >> (4 * step)) ^ words[one + step]) & mask
            words[one + step] = words[one + step] ^ changed
            words[one] = words[one] ^ (changed << (4 * step))
    return words
