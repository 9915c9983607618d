"""Where lines break."""

import io
import itertools
import os
import pty
import random
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from prompt_toolkit.utils import get_cwidth
from rich.cells import cell_len

from kvchat.terminal.wrap import (
    break_offsets,
    one_row,
    places_of_simple_emoji,
    rows_apart,
    simple_emoji,
    told_rows,
    wrapped_rows,
)


def _rows(line: str, width: int) -> list[str]:
    offsets = [0, *break_offsets(line, width), len(line)]
    return [line[a:b].rstrip(" ") for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize(
    ("line", "width", "rows"),
    [
        ("", 5, [""]),
        ("one two three", 7, ["one two", "three"]),
        ("exact fit", 9, ["exact fit"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("a abcdefgh", 4, ["a", "abcd", "efgh"]),
        ("日本語日本語", 6, ["日本語", "日本語"]),
        ("ab日本", 4, ["ab日", "本"]),
        ("ทำงานดำ" * 2, 6, ["ทำงาน", "ดำทำงา", "นดำ"]),
        ("क्षत्रिय", 2, ["क्ष", "त्रि", "य"]),
        ("first token\u00a084\u00a0ms", 11, ["first", "token\u00a084\u00a0ms"]),
    ],
)
def test_lines_break_at_spaces_and_between_ideographs(line, width, rows):
    assert _rows(line, width) == rows


@pytest.mark.parametrize("width", range(3, 30))
def test_no_row_begins_with_a_vowel_of_the_row_above(width: int) -> None:
    """14 of 21 widths did; no reader of Thai could make sense of them."""
    assert not [row for row in wrapped_rows("ทำงานดำ" * 12, width) if row[:1] == "\u0e33"]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("a🧑\u200d🚀b", "a🧑b"),
        ("❤\ufe0f\u200d🔥!", "❤!"),
        ("👍🏽👍", "👍👍"),
        ("a\u200db", "ab"),
        ("🇨🇭", "CH"),
        ("क्\u200dष", "क्\u200dष"),
        ("a\u1112\u1161\u11ab\u1100\u1173b", "a한그b"),
    ],
)
def test_simple_emoji_say_where_they_come_from(typed: str, shown: str) -> None:
    places = places_of_simple_emoji(typed)
    assert simple_emoji(typed) == shown
    assert len(places) == len(shown) + 1
    if typed[0] == shown[0]:
        assert [typed[a] for a, b in zip(places, shown, strict=False) if typed[a] == b]


def test_no_row_is_too_wide_and_nothing_is_lost() -> None:
    rng = random.Random(2)
    for _ in range(500):
        line = "".join(rng.choices("ab  cd日本é👩-", k=rng.randint(0, 60)))
        width = rng.randint(2, 20)
        rows = _rows(line, width)

        assert all(cell_len(row) <= width for row in rows)
        assert "".join(rows).replace(" ", "") == line.replace(" ", "")


def test_rows_of_a_growing_line_stay_but_for_the_last_word() -> None:
    line = "the quick brown fox jumps over the lazy dog and runs away " * 3
    for end in range(len(line)):
        if line[end] == " ":
            before = break_offsets(line[:end], 20)
            assert break_offsets(line, 20)[: len(before)] == before


@pytest.mark.parametrize("width", [8, 9, 12])
def test_what_should_stay_together_and_cannot_breaks_between_its_words(width: int) -> None:
    # The line of figures was torn as "80% likel" and "y" where the screen was narrow.
    words = ["drafts", "off:", "too", "dear", "for", "it"]

    rows = [row.rstrip("\u00a0") for row in _rows("\u00a0".join(words), width)]

    assert all(len(row) <= width for row in rows)
    assert [word for row in rows for word in row.split("\u00a0")] == words


def test_a_title_that_was_cut_before_gets_one_ellipsis() -> None:
    """Rows of the picker ended in "……"."""
    assert one_row("a title that was cut… · the first message", 22) == "a title that was cut…"


def test_rows_of_different_texts_differ() -> None:
    """In a picker of 40 columns four questions were "What is the c…"."""
    texts = ["What is the capital of France?", "What is the capital of Spain?", "hello"]

    assert rows_apart(texts, 15) == ["…France?", "…Spain?", "hello"]
    assert rows_apart(texts, 17) == ["What is t…France?", "What is t…Spain?", "hello"]
    assert rows_apart(texts, 40) == texts
    assert rows_apart(["x" * 30 + "a", "x" * 30 + "b"], 12) == ["xxxxxxxxxx…a", "xxxxxxxxxx…b"]
    assert rows_apart(["the same text twice"] * 2, 10) == ["the same…"] * 2


def test_emoji_in_lists_take_the_same_cells_everywhere() -> None:
    """A family in a title took 2 cells in tmux and 6 for the prompt: its row kept old letters."""
    family, heart = "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f"
    thumb, flag = "\U0001f44d\U0001f3fd", "\U0001f1eb\U0001f1f7"

    row = one_row(f"{family} {heart} {thumb} {flag}!", 40)

    assert row == "\U0001f469 \u2764 \U0001f44d FR!"
    assert cell_len(row) == get_cwidth(row) == 11
    assert (
        one_row("\u0915\u094d\u200d\u0937", 9) == "\u0915\u094d\u200d\u0937"
    )  # joined letters stay


def test_chats_of_one_title_keep_it_in_the_list() -> None:
    """Beside a long price the rows were "…09ef" and "…bdda", with 20 columns free."""
    chats = [f"My name is Ada. · 25 Nov 15:12 · {end}" for end in ("09ef", "bdda")]

    assert rows_apart(chats, 26) == ["My name is Ada. · 25…09ef", "My name is Ada. · 25…bdda"]


def test_rows_apart_keep_to_their_cells() -> None:
    rng = random.Random(3)
    for _ in range(300):
        texts = ["".join(rng.choices("ab 日", k=rng.randint(0, 30))) for _ in range(5)]
        rows = rows_apart(texts, 9)

        assert all(cell_len(row) <= 9 for row in rows)


@pytest.fixture
def narrow_terminal() -> Iterator[TextIO]:
    """A terminal of 40 columns."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (10, 40))
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def test_an_error_on_a_narrow_terminal_breaks_between_words_and_not_in_a_command(narrow_terminal):
    """The terminal broke it within words, and commands, which are copied, too."""
    rows = told_rows(
        "kvchat: “Holiday plans” is open in another kvchat. Close it there, or go on in a copy: "
        "kvchat -r 20261126-101500-abcd --fork",
        narrow_terminal,
    ).split("\n")
    assert rows == [
        "kvchat: “Holiday plans” is open in",
        "another kvchat. Close it there, or go on",
        "in a copy:",
        "kvchat -r 20261126-101500-abcd --fork",
    ]
    listed = "kvchat: There is no such one. `kvchat sessions` lists them."
    assert told_rows(listed, narrow_terminal).split("\n")[1] == "`kvchat sessions` lists them."
    word = "x" * 50  # left to the terminal: it is copied as one line
    assert told_rows(f"kvchat: {word} y", narrow_terminal).split("\n") == ["kvchat:", word, "y"]


def test_further_rows_of_a_list_hang(narrow_terminal: TextIO) -> None:
    rows = told_rows("one\n  two three four five six seven eight nine", narrow_terminal, 4)
    assert rows.split("\n") == ["one", "  two three four five six seven eight", "    nine"]


def test_an_error_in_a_file_is_one_line() -> None:
    assert told_rows("word " * 50, io.StringIO()) == "word " * 50
    assert told_rows("word " * 50, None) == "word " * 50
