"""Shows a conversation: a turn in one line, the last exchange, all turns, the tree."""

from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

from kvchat.chat.attachment import split_attached
from kvchat.chat.compaction import OPENING, is_cut
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.messages import MessageNumbers, MessageTree, TreeNode, answer_place, in_words
from kvchat.chat.thinking import split_thinking, whole_passages
from kvchat.core.text import one_line
from kvchat.terminal.answer_view import AnswerRenderer
from kvchat.terminal.paint import RenderContext, Row
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Role as Look
from kvchat.terminal.tool_use import result_in_words
from kvchat.terminal.view import Page, tell
from kvchat.terminal.wrap import one_row
from kvchat.tools.toolbox import call_in_words


def turn_summary(turn: Turn, room: int) -> str:
    """Return a turn's text without attached files, in one line of at most `room` cells."""
    if turn.role is Role.ASSISTANT:
        calls = (call_in_words(call) for call in turn.calls)
        return one_row(" ".join((split_thinking(turn.text)[1], *calls)), room)
    if not turn.is_message and turn.results:
        return one_row("; ".join(map(result_in_words, turn.results)), room)
    names, words = split_attached(turn.text)
    return one_row(words if words.strip() else ", ".join(names), room)


def answer_rows(turn: Turn, page: Page) -> list[Row]:
    """Return the rows of a saved answer, as it looked when it was generated."""
    renderer = AnswerRenderer(page.painter)
    rows: list[Row] = []
    for passage in whole_passages(turn.text):
        rows += renderer.feed(passage.text, passage.is_thinking, page.render_context)
    rows += renderer.finish(page.render_context)
    rows += [page.painter.text(call_in_words(call), Look.TITLE) for call in turn.calls]
    if turn.is_partial:
        rows.append(page.painter.text("(cut off)", Look.DIM))
    return [*rows, Text(end="")]


def show_turns(turns: list[Turn], page: Page) -> None:
    """Show turns one after another, and a summary as a note."""
    for turn in turns:
        names, words = split_attached(turn.text)
        with_files = f"\nwith {', '.join(names)}" if names else ""
        if turn.role is Role.ASSISTANT:
            if turn.summary_of is None:
                page.write(answer_rows(turn, page))
        elif turn.summary_of is not None:
            heading = "Summary of earlier messages: " if words.startswith(OPENING) else ""
            tell(page, f"{heading}{words.removeprefix(OPENING)}{with_files}")
        elif turn.is_message:
            page.write_turn(f"{words}{with_files}", is_said_now=False)
        else:
            for result in turn.results:
                tell(page, result_in_words(result))


def show_where_it_stands(conversation: Conversation, page: Page) -> None:
    """Show the last exchange, and how many there are on this branch if it has others."""
    path = conversation.path()
    last = next((i for i in range(len(path) - 1, -1, -1) if path[i].is_message), 0)
    num_turns = sum(turn.is_message for turn in path)  # as lists of conversations count them
    if num_turns > 1:
        separator = page.painter.look.glyphs.separator
        turns = f"last of {plural(num_turns, 'turn')} (/show chat)"
        note = f"{one_line(conversation.label)}{separator}{turns}"
        page.write([*page.painter.wrapped(note, page.render_context.width, Look.DIM), Text(end="")])
    if not path:
        page.write([page.painter.text("This is the beginning.", Look.DIM), Text(end="")])
    show_turns(path[last:], page)
    if path and path[-1].role is Role.USER:
        tell(page, "This message has no answer yet: /continue answers it.")


def unsent_in_words(count: int) -> str:
    """Return what to say of messages that were typed in an earlier chat and never sent."""
    if count == 1:
        return (
            "A message of yours was not sent. It is in the prompt again: typing replaces it, Esc "
            "twice drops it."
        )
    return (
        f"{count} messages of yours were not sent. They come into the prompt again, one after "
        "another: typing replaces it, Esc twice drops it."
    )


_MIN_TEXT_CELLS = 8


def tree_rows(
    conversation: Conversation, ctx: RenderContext, warmth: Mapping[int, str]
) -> list[Row]:
    """Return one row per message, answer and label, parents before children, the tip marked.

    `warmth` has, by turn, where its KV is and what continuing from there costs.
    """
    tree = MessageTree(conversation)
    rows = _TreeRows(conversation, tree, ctx, warmth)
    # What is still to be drawn, the next one last: a node, what stands before it, and what stands
    # before its children. A stack, because conversations are deeper than Python's.
    pending = _branches(tree.root, "", ctx)
    drawn: list[Row] = []
    while pending:
        node, lead, below = pending.pop()
        drawn.append(rows.row(node, lead))
        pending += _branches(node, below, ctx)
    return drawn


def _branches(parent: TreeNode, lead: str, ctx: RenderContext) -> list[tuple[TreeNode, str, str]]:
    """Return the children of a node to draw, in reverse order."""
    children = parent.children
    if len(children) < 2:
        return [(child, lead, lead) for child in children]
    glyphs = ctx.painter.look.glyphs
    drawn = [(child, lead + glyphs.branch, lead + glyphs.trunk) for child in children[:-1]]
    drawn.append((children[-1], lead + glyphs.last_branch, lead + " " * len(glyphs.trunk)))
    return drawn[::-1]


class _TreeRows:
    """Draws the nodes of one tree."""

    def __init__(
        self,
        conversation: Conversation,
        tree: MessageTree,
        ctx: RenderContext,
        warmth: Mapping[int, str],
    ) -> None:
        self._warmth = warmth
        self._conversation = conversation
        self._numbers = MessageNumbers(conversation)
        self._on_path = {id(node) for node in tree.path()}
        self._tip = tree.tip
        self._ctx = ctx

    def row(self, node: TreeNode, lead: str) -> Row:
        painter = self._ctx.painter
        style = painter.style(Look.PLAIN if id(node) in self._on_path else Look.DIM)
        mark = f" {painter.look.glyphs.tip}" if node is self._tip else ""
        cut = " (cut off)" if node.turn is not None and node.turn.is_partial else ""
        warmth = self._warmth.get(node.turn_id, "")
        told = f"{painter.look.glyphs.separator}{warmth}" if warmth else ""
        head = self._head(node)
        left = self._ctx.width - cell_len(lead + head + mark) - 1
        # On a narrow screen the row does not say all, so that it stays one row.
        fits = (end for end in (cut + told, told) if left - cell_len(end) >= _MIN_TEXT_CELLS)
        cut = next(fits, "")
        room = max(_MIN_TEXT_CELLS, left - cell_len(cut))
        text = turn_summary(node.turn, room) if node.turn is not None else self._label(node, room)
        row = Text(end="").append(lead, painter.style(Look.DIM))
        row.append(head, painter.style(Look.DIM)).append(text, style)
        row.append(cut, painter.style(Look.DIM)).append(mark, painter.style(Look.HEADING))
        return row

    def _head(self, node: TreeNode) -> str:
        """Return what stands before a node's text: the number of a message, and who speaks."""
        turn = node.turn
        if turn is None:
            return self._label_head(node)
        number = self._numbers.of(turn)
        if turn.role is Role.USER and turn.results and not turn.is_message:
            return "  result: "
        if turn.role is Role.USER:
            return f"{number} you: "
        place, count = answer_place(self._conversation, turn)
        return f"{number}.{place} model: " if count > 1 else "  model: "

    def _label_head(self, node: TreeNode) -> str:
        """Return what stands before a label: what its branch has in place of earlier messages."""
        summarised = node.opening.summary_of
        if summarised is None:
            return "system: "
        openings = (t for t in self._conversation.children(ROOT) if t.summary_of == summarised)
        return "without " if any(map(is_cut, openings)) else "summary of "

    def _label(self, node: TreeNode, room: int) -> str:
        summarised = node.opening.summary_of
        if summarised is None:
            return one_row(node.opening.system or "none", room)
        path = self._conversation.path(summarised)
        numbers = sorted({self._numbers.of(turn) for turn in path if turn.is_message})
        return one_row(f"messages {in_words(numbers)}", room)
