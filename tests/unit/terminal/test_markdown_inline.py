"""Inline Markdown: against markdown-it as the oracle, and what may be shown early."""

import random

import pytest
from markdown_it import MarkdownIt

from kvchat.terminal.markdown_inline import parse_inline
from kvchat.terminal.paint import Painter
from kvchat.terminal.theme import Look, Role

_PAINTER = Painter(Look())
_ORACLE = MarkdownIt("commonmark", {"html": False}).enable("strikethrough")
_ROLES = {"strong": Role.STRONG, "em": Role.EMPHASIS, "s": Role.STRIKE, "link": Role.LINK}


def _styled(source: str) -> list[tuple[str, frozenset[Role]]]:
    """Our reading: every shown character with the roles it has."""
    return [
        (character, frozenset(piece.roles) - {Role.DIM})
        for piece in parse_inline(source).pieces
        for character in piece.text
    ]


def _shown(source: str) -> str:
    return "".join(piece.text for piece in parse_inline(source).pieces)


def _oracle(source: str) -> list[tuple[str, frozenset[Role]]]:
    """markdown-it's reading of the same, targets written as we write them."""
    shown: list[tuple[str, frozenset[Role]]] = []
    roles: list[Role] = []
    links: list[tuple[str, int]] = []
    for token in _ORACLE.parseInline(source)[0].children or []:
        name = token.type.removesuffix("_open").removesuffix("_close")
        if token.type == "code_inline":
            shown += [(c, frozenset([*roles, Role.CODE])) for c in token.content]
        elif token.type in ("softbreak", "hardbreak"):
            shown.append(("\n", frozenset(roles)))
        elif token.type.endswith("_open"):
            roles.append(_ROLES[name])
            if name == "link":
                links.append((str(token.attrs["href"]), len(shown)))
        elif token.type.endswith("_close"):
            roles.remove(_ROLES[name])
            if name == "link":
                url, start = links.pop()
                label = "".join(c for c, _ in shown[start:])
                if url and url != label:
                    shown += [(c, frozenset(roles)) for c in f" ({url})"]
        else:
            shown += [(c, frozenset(roles)) for c in token.content]
    return shown


@pytest.mark.parametrize(
    "source",
    [
        "plain words",
        "**bold** and *italic* and ***both***",
        "__bold__ and _italic_ but snake_case_name and __init__.py",
        "2 * 3 * 4 = 24 and a*b*c",
        "`code` and ``a ` b`` and ` x `",
        "**bold with `code` inside**",
        "*a **b** c*",
        "**unclosed and *half*",
        "[text](https://example.org/a_b) and [not a link] and [x](y z)",
        "**[bold link](http://a.b)**",
        "<https://example.org> and <div> and a < b > c",
        "~~gone~~ and ~one~",
        r"\*not\* \_emphasis\_ \\ \q",
        "&amp; &lt;b&gt; &#65; &copy; &nosuch;",
        "5 > 3 && 2 < 4 [1] [^2] ![",
        "a**b**c and **a** b",
        "first line\nsecond *line*",
        "",
    ],
)
def test_reads_as_commonmark_does(source: str) -> None:
    assert _styled(source) == _oracle(source)


_ATOMS = [
    *("word ", "two words ", "**", "*", "_", "__", "`", "``", "[", "](", "](http://a.b) ", ")"),
    *("日本語", "天地玄黄", "<http://例え.日本", "，", ">"),
    *("~~", " ", ". ", "\n", "<http://c.d> ", "\\", "&amp; ", "snake_case ", "(x) ", "!", "**b** "),
    *("\\(", "\\)", "\\[", "\\]", "$$", "$", "$5", "x$", "y*z"),
]


def test_what_is_settled_never_changes_whatever_follows() -> None:
    rng = random.Random(11)
    for _ in range(1500):
        beginning = "".join(rng.choices(_ATOMS, k=rng.randint(1, 12)))
        inline = parse_inline(beginning)
        shown = inline.text(_PAINTER, inline.settled)
        following = beginning + "".join(rng.choices(_ATOMS, k=rng.randint(1, 6)))
        later = parse_inline(following).text(_PAINTER)[: len(shown)]

        assert later.plain == shown.plain, (beginning, following)
        for index in range(len(shown)):
            before = shown.get_style_at_offset(_PAINTER._console, index)
            after = later.get_style_at_offset(_PAINTER._console, index)
            assert before == after, (beginning, following, index)


def test_a_growing_plain_text_is_settled_up_to_its_last_word() -> None:
    assert parse_inline("some words and a half").settled == len("some words and a ")
    assert parse_inline("a **bold beginning of").settled == len("a ")
    assert parse_inline("3 * 4 is twelve ").settled == len("3 * 4 is twelve ")
    assert parse_inline("word 日本語").settled == len("word 日本")
    assert parse_inline("word 日本語**太").settled == len("word 日本")


def test_code_keeps_its_backticks_where_nothing_else_marks_it() -> None:
    text = parse_inline("run `ls -l`", keeps_ticks=True).text(_PAINTER)

    assert text.plain == "run `ls -l`"


@pytest.mark.parametrize(
    "formula",
    [
        r"\(a \ge b\)",
        r"\(x_1 * y_1 * z\)",
        r"\[ \frac{a}{b} \]",
        "$$x^*_i y^*$$",
        r"$\{x\,*y*\}$",
        r"\(open",
    ],
)
def test_a_formula_is_shown_as_it_is_written(formula: str) -> None:
    r"""\( lost its backslash, as CommonMark has it: the formula was no formula any more."""
    assert _shown(f"*Hence* {formula}.") == f"Hence {formula}."


def test_prices_and_variables_of_a_shell_are_no_formulas() -> None:
    assert _shown("from $5 *to* $6, or $HOME *and* $PATH") == "from $5 to $6, or $HOME and $PATH"
    assert _shown(f"$x {'*word* ' * 40}$") == f"$x {'word ' * 40}$"


def test_a_hidden_target_is_shown() -> None:
    """Rich shows `[https://good](https://evil)` as a link that says good and leads to evil."""
    shown = parse_inline("[https://good](https://evil)").text(_PAINTER).plain

    assert shown == "https://good (https://evil)"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("a&#8238;b&#x2066;c", "abc"),
        ("a&#8203;b&ZeroWidthSpace;c&#xFEFF;d", "abcd"),
        ("a&#12;b&#9;c&Tab;d&#13;e", "ab c d\ne"),
    ],
)
def test_a_character_reference_cannot_bring_in_what_a_terminal_obeys(source, shown):
    """References used to become characters behind the sanitising of the text they stood in, and
    `&#8238;` turned the rest of the line around."""
    assert parse_inline(source).text(_PAINTER).plain == shown
