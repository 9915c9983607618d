"""Code coloured line by line looks as if it had been coloured whole."""

import pytest
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from rich.text import Text

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
