"""Code coloured line by line looks as if it had been coloured whole."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pygments.lexer import Lexer, RegexLexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Text as TextToken  # type: ignore[import-untyped]
from rich.text import Text

from kvchat.chat import lexing
from kvchat.terminal import code_lines
from kvchat.terminal.code_lines import CodeLines, _style
from kvchat.terminal.theme import Look

_SAMPLES = {
    "python": '''
class Foo(Bar):
    """A doc string
    with the words class and def in it.
    """

    def f(self, x: int = 3) -> str:  # comment
        return f"{x}" + 'abc' + """more
than one line"""
''',
    "javascript": """
/* a comment
   function of several lines */
const f = async (a) => { return `x${a}y`; }; // end
let b = "str" /* inline */ + 'x';
""",
    "c": """
#include <stdio.h>
/* one
 * two
 */
int main(void) { return 0; /* c */ }
""",
    "rust": """
fn main() {
    let s = "a string
over lines";
    /* block */ println!("{}", s);
}
""",
    "bash": """
for f in /tmp/*.txt; do echo "$f"; done  # /* no comment
""",
    "html": """
<!-- a comment
over lines -->
<div class="a"
     id="b">text &amp; more</div>
""",
    "json": """
{"a": [1, 2.5, true, null], "b": "text"}
""",
    "sql": """
SELECT a, count(*) FROM t WHERE b = 'x' -- comment
GROUP BY a;
""",
}


def _styles(line: Text) -> list[tuple[str, object]]:
    """Each visible character and its style."""
    styles: list[object] = [None] * len(line.plain)
    for span in line.spans:
        for index in range(span.start, span.end):
            styles[index] = span.style or None
    return [(c, style) for c, style in zip(line.plain, styles, strict=True) if not c.isspace()]


def _whole(language: str, code: str) -> list[list[tuple[str, object]]]:
    lines: list[list[tuple[str, object]]] = [[]]
    for kind, value in get_lexer_by_name(language, stripnl=False).get_tokens(code):
        for character in value:
            if character == "\n":
                lines.append([])
            elif not character.isspace():
                lines[-1].append((character, _style(kind) or None))
    return lines[: len(code.split("\n"))]


@pytest.mark.parametrize("language", _SAMPLES)
def test_lines_are_coloured_as_the_whole_is(language: str) -> None:
    code = _SAMPLES[language].strip("\n")
    lines = CodeLines(language, Look())
    coloured = [_styles(lines.add(line)) for line in code.split("\n")]

    assert [c for line in coloured for c, _ in line] == [c for c in code if not c.isspace()]
    assert coloured == _whole(language, code)


def test_a_block_comment_is_a_comment_from_its_first_line_on() -> None:
    lines = CodeLines("javascript", Look())

    styles = {style for _, style in _styles(lines.add("/* function"))}
    styles |= {style for _, style in _styles(lines.add("   return 1 */"))}

    assert len(styles) == 1
    assert len({style for _, style in _styles(lines.add("return 1;"))}) > 1


def test_a_copy_goes_its_own_way() -> None:
    lines = CodeLines("python", Look())
    lines.add('x = """open')

    lines.copy().add('closed"""')

    assert {style for _, style in _styles(lines.add("class Foo:"))} == {_style_of_a_string()}


def _style_of_a_string() -> object:
    return CodeLines("python", Look()).add('"""open').spans[0].style


@pytest.mark.parametrize("language", ["", "no-such-language", "py thon"])
def test_an_unknown_language_is_plain(language: str) -> None:
    assert CodeLines(language, Look()).add("class Foo:").spans == []


def test_no_colours_means_no_lexing() -> None:
    assert CodeLines("python", Look(has_colour=False)).add("class Foo:").spans == []


@contextmanager
def _coming_to_an_end() -> Iterator[None]:
    """Fail where the block takes this process more than some seconds of its own time."""

    def fail(*_: object) -> None:
        raise AssertionError("does not come to an end")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _Standing(RegexLexer):  # type: ignore[misc]
    tokens = {"root": [(r"\w+", TextToken), (r"(?=!)", TextToken)]}  # noqa: RUF012


class _Pushing(RegexLexer):  # type: ignore[misc]
    tokens = {"root": [(r"\w+", TextToken), (r"(?=!)", TextToken, "#push")]}  # noqa: RUF012


class _Backtracking(RegexLexer):  # type: ignore[misc]
    tokens = {"root": [(r"(\w+)+\?", TextToken), (r"\w+", TextToken)]}  # noqa: RUF012


class _Repeating(Lexer):  # type: ignore[misc]
    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        while True:
            yield 0, TextToken, ""


class _Silent(Lexer):  # type: ignore[misc]
    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        while text:
            pass
        yield 0, TextToken, text


class _Failing(Lexer):  # type: ignore[misc]
    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        raise IndexError("no such group")


def test_a_language_whose_lexer_stands_still_is_plain() -> None:
    """The lexer of `mcschema` matches nothing for ever at `<!--`, which hung the program before
    the first line of such a block, deaf to Ctrl-C."""
    with _coming_to_an_end():
        assert CodeLines("mcschema", Look()).add("<!-- x").spans == []


@pytest.mark.parametrize(
    "lexer", [_Standing, _Pushing, _Backtracking, _Repeating, _Silent, _Failing]
)
def test_no_lexer_can_hang_or_end_an_answer(monkeypatch, lexer):
    """A lexer that did not come to an end stopped the event loop, and one that raised ended the
    answer; now its block goes on plain, the look ahead as well."""
    monkeypatch.setattr(code_lines, "find_lexer", lambda language: lexer())
    monkeypatch.setattr(code_lines, "_comment_marks", lambda lexer: ())
    monkeypatch.setattr(lexing, "_MAX_LEXING_S", 0.1)
    with _coming_to_an_end():
        lines = CodeLines("any", Look())
        ahead = lines.copy()

        for line in ("!", "a" * 60 + "!", "more"):
            assert (lines.add(line).plain, ahead.add(line).plain) == (line, line)


def test_the_time_limit_leaves_no_alarm_behind() -> None:
    """An alarm that outlives the line it was set for would end the program somewhere else."""
    CodeLines("python", Look()).add("x = 1")

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
