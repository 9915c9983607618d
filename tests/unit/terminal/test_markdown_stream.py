"""Streaming Markdown: rows come once, in order, and do not depend on how the text was cut."""

import random
import re
import textwrap

import pytest

from kvchat.terminal.markdown import MarkdownStream
from kvchat.terminal.paint import Painter, RenderContext
from kvchat.terminal.theme import Look
from support.soak_sizes import short_and_long

_PAINTER = Painter(Look())
_ATOMS = [
    *("word", "word ", "**", "*", "_", "__", "`", "``", "```", "~~", "~~~", "[", "](", ")", "("),
    *("](http://x.y)", "http://x.y/z", "<", ">", "<http://a.b>", "\n", "\n\n", "  ", " ", " "),
    *("    ", "- ", "* ", "1. ", "2) ", "10. ", "# ", "## ", "---", "|", "| a | b |", "|---|---|"),
    *("a longer run of words here ", "and some more of it, ", "> ", "\\", "&amp;", "!", "[x]"),
    *("\t", "\r\n", "\x1b[31m", "日本語", "python", "def f():", '"""', "/*", "*/", "a*b*c"),
    *("漢字を読む", "天地玄黄宇宙洪荒日月盈昃辰宿列张，", "한국어 "),
    *("snake_case", "_em_ ", "**bold** ", "`code` ", "| x", "- [ ] "),
    *("\ndef f(x):\n", "\n    return __x__\n", "\nif (a) {\n", "\n}\n", "\n{\n", "\n  x = 1\n"),
    *("\\(", "\\)", "\\[", "\\]", "$$", "\n\\[\n", "\n$$\n", "\n  verse"),
]


def _render(
    pieces: list[str], width: int, looks_ahead: bool = False, look: Look | None = None
) -> str:
    painter = Painter(look) if look is not None else _PAINTER
    stream, ctx = MarkdownStream(), RenderContext(painter, width)
    rows = []
    for piece in pieces:
        rows += stream.feed(piece, ctx)
        if looks_ahead:
            stream.tail(ctx)
    return painter.ansi(rows + stream.finish(ctx))


def _cut(text: str, rng: random.Random, longest: int) -> list[str]:
    pieces = []
    while text:
        size = rng.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def _plain(markdown: str, width: int = 60) -> str:
    """What is shown, without colours."""
    shown = _render([textwrap.dedent(markdown)], width)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_into_pieces_gives_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choices(_ATOMS, k=rng.randint(1, 60)))
        width = rng.choice([10, 20, 40, 80])
        whole = _render([text], width)

        for longest in (1, 3, 12):
            pieces = _cut(text, rng, longest)
            assert _render(pieces, width, looks_ahead=longest == 3) == whole, (text, width)


_DEEP_ATOMS = [
    *(">" * 9, ">" * 20, "- " * 9, "- " * 20, "1. " * 20, "2) " * 7, "* - " * 6, "> > ", "7. "),
    *("\n", "\n\n", "word ", "    ", "# ", "---", "```\n", "| a | b |\n|---|---|\n", "- "),
    "a longer run of words here and some more of it, ",
]


@pytest.mark.parametrize("marker", [">", "> ", "- ", "1. ", "* > "])
def test_markers_nested_without_end_are_text_from_a_depth_on(marker: str) -> None:
    """A line of 200 markers used to overflow Python's stack, when it came and whenever its
    conversation was opened again."""
    line = f"{marker * 2000}words\n"

    shown = _plain(line * 2, 200)

    assert shown.replace("\n", " ").count(marker.strip()[-1]) >= 3900
    assert _render(_cut(line * 2, random.Random(1), 900), 200, looks_ahead=True) == _render(
        [line * 2], 200
    )


@short_and_long(15, 400)
def test_any_cut_of_deeply_nested_text_gives_the_same_bytes(size: int) -> None:
    """A line of 200 markers used to overflow Python's stack; where markers stop to count, the
    beginning of a line must be judged as the whole line is."""
    rng = random.Random(3)
    for _ in range(size):
        text = "".join(rng.choices(_DEEP_ATOMS, k=rng.randint(1, 25))) + ">" * 200
        whole = _render([text], 40)
        for longest in (1, 12, 40):
            assert _render(_cut(text, rng, longest), 40, looks_ahead=longest == 12) == whole, text


def test_the_tail_shows_what_finishing_now_would_give() -> None:
    rng = random.Random(5)
    ctx = RenderContext(_PAINTER, 40)
    for _ in range(100):
        text = "".join(rng.choices(_ATOMS, k=20))
        stream = MarkdownStream()
        for piece in _cut(text, rng, 8):
            stream.feed(piece, ctx)
            tail = _PAINTER.ansi(stream.tail(ctx))
            assert _PAINTER.ansi(stream.tail(ctx)) == tail, "looking ahead changes nothing"
        assert _PAINTER.ansi(stream.finish(ctx)) == tail


def test_no_word_is_lost_or_doubled_when_the_width_changes_in_between() -> None:
    words = [f"word{number}" for number in range(300)]
    rng = random.Random(3)
    stream, rows = MarkdownStream(), []
    for word in words:
        ctx = RenderContext(_PAINTER, rng.choice([20, 33, 60, 80]))
        end = "\n" if rng.random() < 0.1 else " "
        rows += stream.feed(f"**{word}**{end}" if rng.random() < 0.2 else word + end, ctx)
    rows += stream.finish(RenderContext(_PAINTER, 50))

    assert " ".join(row.plain for row in rows).split() == words


def test_running_text_is_given_row_by_row_before_its_paragraph_ends() -> None:
    stream, ctx = MarkdownStream(), RenderContext(_PAINTER, 40)

    rows = stream.feed("all of these words belong to one long paragraph that goes on and on", ctx)

    assert [row.plain for row in rows] == ["all of these words belong to one long"]
    assert [row.plain for row in stream.tail(ctx)] == ["paragraph that goes on and on"]


@pytest.mark.parametrize("width", [30, 40, 80])
def test_text_without_spaces_is_given_row_by_row_too(width: int) -> None:
    """An answer in Chinese showed "12 rows so far" in place of its text until its paragraph ended:
    only white space was taken for the end of a word.
    """
    stream, ctx = MarkdownStream(), RenderContext(_PAINTER, width)
    text = "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 20
    rows = []
    for character in text:
        rows += stream.feed(character, ctx)
        assert len(stream.tail(ctx)) <= 3

    assert len(rows) >= 800 // width - 1
    assert "".join(row.plain for row in [*rows, *stream.finish(ctx)]) == text


def test_code_is_given_line_by_line() -> None:
    stream, ctx = MarkdownStream(), RenderContext(_PAINTER, 40)

    rows = stream.feed("```python\nx = 1\ny = ", ctx)

    assert [row.plain for row in rows][1:] == ["x = 1"]


def test_a_table_is_held_until_it_is_complete() -> None:
    stream, ctx = MarkdownStream(), RenderContext(_PAINTER, 40)

    assert stream.feed("| a | b |\n|---|---|\n| 1 | 2 |\n", ctx) == []
    rows = stream.feed("| a much wider cell | 4 |\n\nafter", ctx)

    assert "a much wider cell" in "\n".join(row.plain for row in rows)


def test_a_document_looks_as_it_should() -> None:
    shown = _plain(
        """
        # Title
        Text with **bold**, `code` and <tags>.
        Another line.
        1. first item that is long enough to need a second row of its own
        2. second
           - nested
             ```sh
             ls
             ```
        ---
        > quoted
        > words

        | a | b |
        |--:|---|
        | 1 | x |
        """,
        40,
    )

    assert shown == (
        "Title\n"
        "\n"
        "Text with bold, code and <tags>.\n"
        "Another line.\n"
        "1. first item that is long enough to\n"
        "   need a second row of its own\n"
        "2. second\n"
        "   • nested\n"
        "\n"
        "     ─── sh ────────────────────────────\n"
        "     ls\n"
        "     ───────────────────────────────────\n"
        "\n"
        "────────────────────────────────────────\n"
        "\n"
        "▎ quoted\n"
        "▎ words\n"
        "\n"
        "a   b\n"
        "─────\n"
        "1   x\n"
    )


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("a paragraph\n---\nnext", ["a paragraph", "", "─" * 48, "", "next"]),
        ("- a\n\n- b", ["• a", "", "• b"]),
        ("3. c\n4. d", ["3. c", "4. d"]),
        ("1. a\n\n```\nx\n```\n\n1. b", ["1. a", "", "─" * 48, "x", "─" * 48, "", "1. b"]),
        ("in the year\n1986. It was", ["in the year", "1986. It was"]),
        ("- a\nlazy", ["• a", "  lazy"]),
        ("```\nnever closed", ["─" * 48, "never closed", "─" * 48]),
        ("text\n    code *or* verse", ["text", "    code *or* verse"]),
        (".\n\n    code\n      more\n\ntext", [".", "", "    code", "      more", "", "text"]),
        ("Above\n one goes,\n  two stay", ["Above", "one goes,", "  two stay"]),
        ("Steps:\n    1. *one*\n    2. two", ["Steps:", "1. one", "2. two"]),
        ("1. one\n    more\n2. two", ["1. one", "   more", "2. two"]),
        ("| not a table\ntext", ["| not a table", "text"]),
        ("#hashtag", ["#hashtag"]),
        ("**bold\n\nnext**", ["**bold", "", "next**"]),
    ],
)
def test_small_cases(markdown: str, shown: list[str]) -> None:
    assert _plain(markdown).splitlines() == shown


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    y = a_b_ * 2 * x\n\n    # two\n    return y\n\nprint(f(3))",
        "class A:\n  def __init__(self):\n    self.x = __name__\n\n  def g(self): pass",
        "function f() {\n  return _x_;\n}",
        '{\n  "_a_": [\n    1\n  ]\n}',
        "for i in range(3):\n    print(*i, *j)",
        'if __name__ == "__main__":\n    main()',
        "#include <stdio.h>\nint main(void) {\n  return *p * *q;\n}",
        "\\[\n\\begin{aligned}\na_1 &= b_1 \\\\\n+ c\n\\end{aligned}\n\\]",
        "$$\n- x^* + y^*\n$$",
    ],
)
def test_code_without_a_fence_and_formulas_are_shown_as_they_are(code: str) -> None:
    """The lines of a function stood at the left edge, and __init__ was bold without its marks."""
    shown = _plain(f"As code:\n{code}\n\nIt *works*.").splitlines()

    assert shown == ["As code:", *code.split("\n"), "", "It works."]


def test_prose_right_below_code_is_prose() -> None:
    shown = _plain("def f(x):\n    return x\nThis *is* all.\n1. Then:\nimport os\n2. Next")
    assert shown.splitlines() == [
        *("def f(x):", "    return x", "This is all.", "1. Then:", "import os", "2. Next")
    ]


def test_only_styles_of_our_own_reach_the_terminal() -> None:
    evil = (
        "\x1b]0;t\x07 **\x1b[2J** `\x9b1m` [a\x1b](http://\x1b]8;;x) \u202e\n"
        "```\n\x1b]52;c;x\x07\n```"
    )
    for longest in (1, 2, 5):
        shown = _render(_cut(evil, random.Random(longest), longest), 60)
        rest = re.sub(r"\x1b\[[0-9;]*m", "", shown)

        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", rest)


def test_a_spoken_look_has_no_escape_sequence_and_says_what_boxes_would_show() -> None:
    look = Look(has_colour=False, is_plain=True, is_spoken=True)
    shown = _render(["```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | **2** |\n"], 60, look=look)

    assert shown == "Code, py:\nx = 1\nEnd of code.\n\na: 1; b: 2\n"


def test_parsing_a_long_answer_takes_a_time_linear_in_its_length() -> None:
    """Rendering everything again with every piece would be quadratic: 16 times the work for 4
    times the text."""

    class CountingPainter(Painter):
        num_wrapped = 0

        def wrap(self, text, width):  # type: ignore[no-untyped-def]
            self.num_wrapped += len(text.plain)
            return super().wrap(text, width)

    def work(num_words: int) -> int:
        painter = CountingPainter(Look())
        stream, ctx = MarkdownStream(), RenderContext(painter, 80)
        for number in range(num_words):
            stream.feed(f"word{number % 10} ", ctx)
            stream.tail(ctx)
        return painter.num_wrapped

    assert work(2000) < 5 * work(500)
