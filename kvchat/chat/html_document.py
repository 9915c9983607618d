"""A conversation as one HTML page: all branches, in light and dark, without script.

The page loads nothing and sends nothing: its policy allows its own style alone.
"""

import base64
import hashlib
from datetime import datetime
from html import escape
from importlib.resources import files

from kvchat.chat.attachment import attached_files, split_attached
from kvchat.chat.compaction import OPENING
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.html_text import PageText, from_plain
from kvchat.chat.messages import MessageTree, TreeNode
from kvchat.chat.thinking import split_thinking
from kvchat.core.text import one_line, sanitize

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{digest}'">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="kvchat">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def page_style() -> str:
    """Return the style sheet of all pages."""
    return files("kvchat.chat").joinpath("page.css").read_text(encoding="utf-8")


def digest_of(content: str) -> str:
    """Return the digest by which a page's policy allows a style or a script."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def to_html(conversation: Conversation, model: str = "") -> str:
    """Return a whole conversation as a page. `model` is the name of what answered last."""
    style, title = page_style(), escape(one_line(conversation.label or conversation.session_id))
    body = conversation_html(conversation, model)
    return _PAGE.format(digest=digest_of(style), title=title, style=style, body=body)


def conversation_html(conversation: Conversation, model: str = "") -> str:
    """Return a conversation as HTML without a page around it: the path to the tip is open, other
    branches are folded.
    """
    tree = MessageTree(conversation)
    page = PageText()
    on_path = {id(node) for node in tree.path()}
    parts = [_header(conversation, model), "<main>\n"]
    # A stack, because conversations are deeper than Python's. Texts close what was opened.
    pending: list[TreeNode | str] = [tree.root]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            parts.append(node)
            continue
        parts.append(_node(node, page))
        pending += _below(node, on_path)
    return "".join([*parts, "</main>\n"])


def _header(conversation: Conversation, model: str) -> str:
    title = escape(one_line(conversation.label or conversation.session_id))
    when = f"{datetime.fromtimestamp(conversation.created_s):%Y-%m-%d %H:%M}"
    facts = " · ".join(filter(None, (escape(one_line(model)), when)))
    return f'<header>\n<h1>{title}</h1>\n<p class="facts">{facts}</p>\n</header>\n'


def _below(node: TreeNode, on_path: set[int]) -> list[TreeNode | str]:
    """Return what follows a node, the last first: other branches folded, then the open one."""
    if not node.children:
        return []
    main = next((child for child in node.children if id(child) in on_path), node.children[-1])
    others = [child for child in node.children if child is not main]
    below: list[TreeNode | str] = [main]
    for child in reversed(others):
        opened = f'<details class="branch">\n<summary>{_branch_name(child)}</summary>\n'
        below += ["</details>\n", child, opened]
    return below


def _branch_name(node: TreeNode) -> str:
    if node.turn is None:
        return "Another beginning"
    if node.turn.role is Role.ASSISTANT:
        words = split_thinking(node.turn.text)[1]
        return f"Another answer: {escape(one_line(words, 60))}"
    return f"Another message: {escape(one_line(split_attached(node.turn.text)[1], 60))}"


def _node(node: TreeNode, page: PageText) -> str:
    if node.turn is not None:
        write = _answer if node.turn.role is Role.ASSISTANT else _message
        return write(node.turn, page)
    if node.parent is None:
        return ""
    if node.opening.summary_of is not None:
        return '<p class="note">A summary stands for what is above.</p>\n'
    return _folded("System prompt", from_plain(node.opening.system or "(none)"))


def _message(turn: Turn, page: PageText) -> str:
    results = "".join(_folded(f"Result of {r.name}", page.from_code(r.text)) for r in turn.results)
    if not turn.is_message:
        return f'<article class="tool">\n{results}</article>\n'
    attached = attached_files(turn.text)
    files = "".join(
        _folded(name, page.from_code(_without_fence(whole))) for name, whole in attached
    )
    words = split_attached(turn.text)[1].removeprefix(OPENING)
    return _article("user", "You", f"{results}{files}{from_plain(words)}")


def _answer(turn: Turn, page: PageText) -> str:
    thinking, words = split_thinking(turn.text)
    parts = [_folded("Thinking", from_plain(thinking.strip()))] if thinking.strip() else []
    parts += [page.from_markdown(words)] if words.strip() else []
    parts += [
        _folded(f"Calls {call.name}", page.from_code(call.arguments_text, "json"))
        for call in turn.calls
    ]
    parts += ['<p class="note">(cut off)</p>\n'] if turn.is_partial else []
    return _article("assistant", "Assistant", "".join(parts))


def _article(kind: str, name: str, content: str) -> str:
    return f'<article class="{kind}">\n<h2 class="who">{name}</h2>\n{content}</article>\n'


def _folded(name: str, content: str) -> str:
    return (
        f"<details>\n<summary>{escape(one_line(sanitize(name)))}</summary>\n{content}</details>\n"
    )


def _without_fence(whole: str) -> str:
    """Return the text of an attached file without its name and its fence."""
    return "\n".join(whole.strip().split("\n")[2:-1]) + "\n"
