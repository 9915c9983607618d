"""Markdown and code as HTML that runs no script and loads nothing.

HTML in a text is shown as it was written. Links go to http, https and mailto only; a picture is a
link to it.
"""

import time
from collections.abc import MutableMapping, Sequence
from functools import cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token as Mark
from markdown_it.utils import OptionsDict
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String  # type: ignore[import-untyped]

from kvchat.chat.lexing import TokenType, find_lexer, has_time_limit, is_too_long, tokens_of
from kvchat.core.text import sanitize

# A text that is longer, or takes more of the processor's time, is shown as it is: the work on a
# hostile one grows with the square of its length. The time grows with the length, so that a long
# conversation takes no more for it.
_MAX_MARKDOWN_CHARS = 200_000
_SPARE_S, _SECONDS_PER_CHAR = 0.5, 2e-5
_END = "end_s"  # when the reader gives up, by `time.thread_time`
_PAGE = "page"  # whose text is read
# The constructs that look, at each line, whether one of another kind begins there.
_ENDED_BY_OTHERS = ("paragraph", "reference", "blockquote", "list", "table")
_MAX_COLOURED_CHARS = 50_000
# The lexers of all code on a page have so long; then its code has no colours.
_PAGE_LEXING_S = 5.0
_SAFE_LINKS = ("http://", "https://", "mailto:")
# The class of each kind of token in page.css.
_CLASSES: tuple[tuple[TokenType, str], ...] = (
    (Comment, "comment"),
    (Keyword, "keyword"),
    (Name.Function, "name"),
    (Name.Class, "name"),
    (Name.Tag, "keyword"),
    (Name.Builtin, "builtin"),
    (Name.Decorator, "builtin"),
    (Name.Attribute, "builtin"),
    (Name.Exception, "builtin"),
    (String, "string"),
    (Number, "number"),
    (Operator.Word, "keyword"),
    (Generic.Deleted, "deleted"),
    (Generic.Inserted, "inserted"),
    (Generic.Heading, "name"),
)


class _TooSlowError(Exception):
    """The reader does not come to an end in its time."""


def from_plain(text: str) -> str:
    """Return a text as HTML that keeps its lines and spaces."""
    return f'<p class="plain">{escape(sanitize(text))}</p>\n'


class PageText:
    """The texts of one page, whose lexers share `lexing_s` seconds."""

    def __init__(self, lexing_s: float = _PAGE_LEXING_S) -> None:
        self._left_s = lexing_s

    def from_markdown(self, text: str) -> str:
        """Return Markdown as HTML; a text that is very long or takes too long as plain text."""
        text = sanitize(text)
        if len(text) > _MAX_MARKDOWN_CHARS:
            return from_plain(text)
        end_s = time.thread_time() + _SPARE_S + _SECONDS_PER_CHAR * len(text)
        try:
            rendered: str = _reader().render(text, {_END: end_s, _PAGE: self})
        except _TooSlowError:
            return from_plain(text)
        return rendered

    def from_code(self, text: str, language: str = "") -> str:
        """Return code as HTML, in colours where its language is known."""
        return f"<pre><code>{self._coloured(sanitize(text), language)}</code></pre>\n"

    def _coloured(self, code: str, language: str) -> str:
        """Return code as HTML, without colours where a lexer could not be stopped."""
        is_long = len(code) > _MAX_COLOURED_CHARS or any(map(is_too_long, code.splitlines()))
        if is_long or self._left_s <= 0.0 or not has_time_limit():
            return escape(code)
        began_s = time.monotonic()
        lexer = find_lexer(language)
        tokens = tokens_of(lexer, code, ["root"], self._left_s) if lexer is not None else None
        self._left_s -= time.monotonic() - began_s
        if tokens is None:
            return escape(code)
        return "".join(_span(_class_of(kind), value) for kind, value in tokens)


@cache
def _reader() -> MarkdownIt:
    reader = MarkdownIt("js-default", {"html": False, "linkify": False}).disable("image")
    reader.validateLink = _is_safe  # type: ignore[method-assign]
    for name in ("link_open", "th_open", "td_open"):
        reader.add_render_rule(name, _open_tag)
    reader.add_render_rule("fence", _fence)
    # Rules that never match, before all others: they see each step of the reader.
    reader.inline.ruler.before("text", "time", lambda state, _: _look_at_time(state))
    reader.block.ruler.before(
        "table", "time", lambda state, *_: _look_at_time(state), {"alt": list(_ENDED_BY_OTHERS)}
    )
    return reader


def _look_at_time(state: StateBlock | StateInline) -> bool:
    if time.thread_time() > state.env[_END]:
        raise _TooSlowError
    return False


def _is_safe(url: str) -> bool:
    return url.strip().lower().startswith(_SAFE_LINKS)


def _open_tag(
    renderer: RendererHTML,
    marks: Sequence[Mark],
    place: int,
    options: OptionsDict,
    env: MutableMapping[str, Any],
) -> str:
    """Open a link, which tells the other site nothing and gives it no hold of this page, or a cell
    of a table: no page may have a style in an attribute, so a class aligns it.
    """
    mark = marks[place]
    if mark.tag == "a":
        mark.attrSet("rel", "noreferrer noopener")
        mark.attrSet("target", "_blank")
    elif side := str(mark.attrs.pop("style", "")).removeprefix("text-align:"):
        mark.attrSet("class", side)
    return renderer.renderToken(marks, place, options, env)


def _fence(
    renderer: RendererHTML,
    marks: Sequence[Mark],
    place: int,
    options: OptionsDict,
    env: MutableMapping[str, Any],
) -> str:
    page: PageText = env[_PAGE]
    language, *_ = marks[place].info.split() or [""]
    return page.from_code(marks[place].content, language)


def _span(name: str, text: str) -> str:
    return f'<span class="{name}">{escape(text)}</span>' if name else escape(text)


def _class_of(kind: TokenType) -> str:
    return next((name for known, name in _CLASSES if kind in known), "")
