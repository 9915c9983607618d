"""Markdown and code as HTML that runs no script and loads nothing.

HTML in a text is shown as it was written. Links go to http, https and mailto only; a picture is a
link to it.
"""

from collections.abc import MutableMapping, Sequence
from functools import cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token as Mark
from markdown_it.utils import OptionsDict
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String  # type: ignore[import-untyped]

from kvchat.chat.lexing import TokenType, find_lexer, has_time_limit, is_too_long, tokens_of
from kvchat.core.text import sanitize

# A longer text is shown as it is: the work on a hostile one grows faster than its length.
_MAX_MARKDOWN_CHARS = 200_000
_MAX_COLOURED_CHARS = 50_000
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


def from_markdown(text: str) -> str:
    """Return Markdown as HTML; a very long text as plain text."""
    text = sanitize(text)
    if len(text) > _MAX_MARKDOWN_CHARS:
        return from_plain(text)
    rendered: str = _reader().render(text)
    return rendered


def from_plain(text: str) -> str:
    """Return a text as HTML that keeps its lines and spaces."""
    return f'<p class="plain">{escape(sanitize(text))}</p>\n'


def from_code(text: str, language: str = "") -> str:
    """Return code as HTML, in colours where its language is known."""
    return f"<pre><code>{_coloured(sanitize(text), language)}</code></pre>\n"


@cache
def _reader() -> MarkdownIt:
    reader = MarkdownIt("js-default", {"html": False, "linkify": False}).disable("image")
    reader.validateLink = _is_safe  # type: ignore[method-assign]
    reader.options["highlight"] = lambda code, language, _: _coloured(code, language)
    reader.add_render_rule("link_open", _link)
    for name in ("th_open", "td_open"):
        reader.add_render_rule(name, _cell)
    return reader


def _is_safe(url: str) -> bool:
    return url.strip().lower().startswith(_SAFE_LINKS)


def _link(
    renderer: RendererHTML,
    marks: Sequence[Mark],
    place: int,
    options: OptionsDict,
    env: MutableMapping[str, Any],
) -> str:
    """Open a link that tells the other site nothing, and gives it no hold of this page."""
    marks[place].attrSet("rel", "noreferrer noopener")
    marks[place].attrSet("target", "_blank")
    return renderer.renderToken(marks, place, options, env)


def _cell(
    renderer: RendererHTML,
    marks: Sequence[Mark],
    place: int,
    options: OptionsDict,
    env: MutableMapping[str, Any],
) -> str:
    """Open a cell of a table: no page may have a style in an attribute, so a class aligns it."""
    side = str(marks[place].attrs.pop("style", "")).removeprefix("text-align:")
    if side:
        marks[place].attrSet("class", side)
    return renderer.renderToken(marks, place, options, env)


def _coloured(code: str, language: str) -> str:
    """Return code as HTML, without colours where a lexer could not be stopped."""
    is_long = len(code) > _MAX_COLOURED_CHARS or any(map(is_too_long, code.splitlines()))
    lexer = find_lexer(language) if has_time_limit() and not is_long else None
    tokens = tokens_of(lexer, code, ["root"]) if lexer is not None else None
    if tokens is None:
        return escape(code)
    return "".join(_span(_class_of(kind), value) for kind, value in tokens)


def _span(name: str, text: str) -> str:
    return f'<span class="{name}">{escape(text)}</span>' if name else escape(text)


def _class_of(kind: TokenType) -> str:
    return next((name for known, name in _CLASSES if kind in known), "")
