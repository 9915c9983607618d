"""Line breaking: greedy, at spaces and between ideographs, inside a word only if necessary.

Greedy breaking does not look ahead, so only the last row of a growing text can change. Also cuts
text to one row, and several texts so that their rows differ.
"""

import os
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import TextIO

from rich.cells import cell_len, get_character_cell_size

from kvchat.core.text import sanitize

# A word that may not be broken, or one ideograph or kana, after which a line may end. A no-break
# space is part of a word.
_IDEOGRAPH = (
    "\u2e80-\u303e\u3041-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003fffd"
)
_EMOJI = "\u2190-\u2bff\U0001f000-\U0001faff"
_FLAG_A = 0x1F1E6
_FLAG_LETTER = re.compile("[\U0001f1e6-\U0001f1ff]")
_VARIANT = "\ufe0e\ufe0f\U0001f3fb-\U0001f3ff"  # variation selectors and skin tones
# What of an emoji is not its first part; a lone skin tone is an emoji of its own. Other scripts
# join letters; between those of ASCII, a joiner joins nothing.
_FURTHER_PARTS = re.compile(
    f"(?<=[{_EMOJI}])[{_VARIANT}]*(?:\u200d[{_EMOJI}][{_VARIANT}]*)+"
    f"|[\ufe0e\ufe0f]|(?<=[{_EMOJI}])[{_VARIANT}]|(?<=[ -~])\u200d"
)
_UNSURE = re.compile("[\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U0001f1e6-\U0001f1ff]")
# A syllable in its letters, which terminals draw in one place or in three.
_SYLLABLE = re.compile("[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?")
_MIN_HEAD_CELLS = 8  # less of a text's beginning tells nothing
NO_BREAK = "\N{NO-BREAK SPACE}"
_BETWEEN = re.compile(rf"(?<=[{_IDEOGRAPH}])(?=[{_IDEOGRAPH}])")
_WORD = re.compile(rf"[^ \t{_IDEOGRAPH}]+|[{_IDEOGRAPH}]")


def is_between_ideographs(text: str, position: int) -> bool:
    """Return whether a line may end at a position although no white space is there."""
    return _BETWEEN.match(text, position) is not None


def last_between_ideographs(text: str, start: int, end: int) -> int:
    """Return the last such position from `start` to `end`; `start` if there is none."""
    places = (match.start() for match in _BETWEEN.finditer(text, start, end + 1))
    return max(places, default=start)


def break_offsets(line: str, width: int) -> list[int]:
    """Return where the second and later rows of one line begin, in characters."""
    offsets: list[int] = []
    column = 0
    end = 0
    for match in _WORD.finditer(line):
        gap = cell_len(line[end : match.start()])
        cells = cell_len(match.group())
        has_room = end == 0 and gap + get_character_cell_size(match.group()[0]) <= width
        if column + gap + cells > width and not has_room:
            offsets.append(match.start())
            column = gap = 0
        if cells > width - gap:
            folds, column = _fold(match.group(), width, gap)
            offsets += [match.start() + fold for fold in folds]
        else:
            column += gap + cells
        end = match.end()
    return offsets


def _fold(word: str, width: int, column: int) -> tuple[list[int], int]:
    """Break a word wider than a row; return where, and the cells used in its last row.

    It breaks after a no-break space where the row has one: better there than inside a real word.
    """
    folds: list[int] = []
    joint = 0  # where the row could end, if that is behind the last fold
    for index, character in enumerate(word):
        size = get_character_cell_size(character)
        if column + size > width and index:
            before = folds[-1] if folds else 0
            start = joint if joint > before else _unit_start(word, index, before)
            folds.append(start)
            column = cell_len(word[start:index])
        column += size
        if character == NO_BREAK:
            joint = index + 1
    return folds, column


# Vowels that are drawn with the letter before them, but have a cell of their own: Thai and Lao.
_VOWELS = "\u0e33\u0eb3"
_VIRAMA = 9  # the combining class of what joins two letters of an Indic script


def _unit_start(word: str, index: int, before: int) -> int:
    """Return where the letter begins that a character is a part of; not `before` or earlier.

    A row that begins with a vowel of the letter above it cannot be read.
    """
    start = index
    while start > before and _joins(word, start):
        start -= 1
    return start if start > before else index


def _joins(word: str, index: int) -> bool:
    character, last = word[index], word[index - 1]
    return (
        character in _VOWELS
        or get_character_cell_size(character) == 0
        or last == "\u200d"
        or unicodedata.combining(last) == _VIRAMA
    )


def simple_emoji(text: str) -> str:
    """Return text whose emoji take the same number of cells everywhere.

    Terminals and libraries disagree on joined emoji (2 cells or 6 for a family), on skin tones and
    on flags. A joined emoji becomes its first part, and a flag the letters of its country. They
    disagree on letters of Hangul too, which become the sign of their syllable.
    """
    text = _SYLLABLE.sub(lambda match: unicodedata.normalize("NFC", match[0]), text)
    if not _UNSURE.search(text):
        return text
    text = _FURTHER_PARTS.sub("", text)
    return _FLAG_LETTER.sub(lambda match: chr(ord(match[0]) - _FLAG_A + ord("A")), text)


def places_of_simple_emoji(text: str) -> list[int]:
    """Return the place in a text of each character of `simple_emoji(text)`, and of its end."""
    dropped = {place for match in _FURTHER_PARTS.finditer(text) for place in range(*match.span())}
    for match in _SYLLABLE.finditer(text):
        dropped.update(range(match.start() + 1, match.end()))
    return [place for place in range(len(text) + 1) if place not in dropped]


def _line(text: str) -> str:
    return " ".join(simple_emoji(sanitize(text)).split())


def one_row(text: str, max_cells: int) -> str:
    """Return text as `one_line` does, cut to what a row of the screen has room for."""
    line = _line(text)
    if cell_len(line) <= max_cells:
        return line
    return first_cells(line, max_cells - 1).rstrip(" …") + "…"  # it may have been cut before


def rows_apart(texts: Sequence[str], max_cells: int) -> list[str]:
    """Return each text in one row, as `one_row` does, so that rows of different texts differ.

    Texts that would be cut to the same row lose words from what they begin with in common: of it,
    only as much stays as there is room for.
    """
    rows = [one_row(text, max_cells) for text in texts]
    alike: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row, []).append(place)
    for places in alike.values():
        lines = [_line(texts[place]) for place in places]
        columns = enumerate(zip(*lines, strict=False))
        end = next((n for n, column in columns if len(set(column)) > 1), min(map(len, lines)))
        start = lines[0].rfind(" ", 0, end) + 1 or end
        if len(set(lines)) == 1 or not start:
            continue
        rests = rows_apart([line[start:] for line in lines], max_cells - 1)
        rests = [rest.removeprefix("…") for rest in rests]
        room = max_cells - 1 - max(map(cell_len, rests))
        head = first_cells(lines[0][:start], room).rstrip(" ·") if room >= _MIN_HEAD_CELLS else ""
        for place, rest in zip(places, rests, strict=True):
            rows[place] = f"{head}…{rest}"
    return rows


def wrapped_rows(text: str, width: int) -> list[str]:
    """Return text as `one_line` does, broken into rows of at most `width` cells."""
    line = _line(text)
    starts = [0, *break_offsets(line, width), len(line)]
    return [line[a:b].rstrip() for a, b in pairwise(starts)]


# A word, or a command with its options, which is copied as a whole.
_UNIT = re.compile(r"(?:`[^`]*`|kvchat(?: -\S+(?: [^-\s]\S*)?)+|\S)+")


def columns_of(stream: TextIO | None) -> int | None:
    """Return the width of a stream's terminal in cells, None if it has none."""
    if stream is None:
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # no terminal
        return None


def has_room(text: str, columns: int) -> bool:
    return cell_len(text) <= columns


def told_rows(text: str, stream: TextIO | None, hanging: int = 0) -> str:
    """Return safe text for a stream, broken for the width of its terminal if it has one.

    The terminal itself would break it within words. A command is not broken, and what is wider than
    a row is left to the terminal, so that it can be copied. Further rows of a line are indented by
    `hanging` cells.
    """
    width = columns_of(stream)
    if width is None:
        return text
    rows = (row for line in text.split("\n") for row in _unit_rows(line, width, hanging))
    return "\n".join(rows)


def _unit_rows(line: str, width: int, hanging: int) -> list[str]:
    rows, start, end, lead = [], 0, 0, ""
    for match in _UNIT.finditer(line):
        if end and cell_len(lead + line[start : match.end()]) > width:
            rows.append(lead + line[start:end])
            start, lead = match.start(), " " * hanging
        end = match.end()
    return [*rows, lead + line[start:end]]


def first_cells(text: str, max_cells: int) -> str:
    """Return the longest prefix of a text that fits into a width in cells."""
    cells = 0
    for index, character in enumerate(text):
        cells += get_character_cell_size(character)
        if cells > max_cells:
            return text[:index]
    return text


def last_cells(text: str, max_cells: int) -> str:
    """Return the longest ending of a text that fits into a width in cells."""
    return first_cells(text[::-1], max_cells)[::-1]
