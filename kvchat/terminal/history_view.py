"""Shows a conversation: a turn in one line, the last exchange, all turns, the tree."""

from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

from kvchat.chat.attachment import split_attached
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.thinking import split_thinking, whole_passages
from kvchat.core.text import one_line
from kvchat.terminal.answer_view import AnswerRenderer
from kvchat.terminal.paint import RenderContext, Row
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Role as Look
from kvchat.terminal.view import Page
from kvchat.terminal.wrap import one_row


def turn_summary(turn: Turn, room: int) -> str:
    """Return a turn's text without attached files, in one line of at most `room` cells."""
    if turn.role is Role.ASSISTANT:
        return one_row(split_thinking(turn.text)[1], room)
    names, words = split_attached(turn.text)
    return one_row(words if words.strip() else ", ".join(names), room)


def answer_rows(turn: Turn, page: Page) -> list[Row]:
    """Return the rows of a saved answer, as it looked when it was generated."""
    renderer = AnswerRenderer(page.painter)
    rows: list[Row] = []
    for passage in whole_passages(turn.text):
        rows += renderer.feed(passage.text, passage.is_thinking, page.render_context)
    rows += renderer.finish(page.render_context)
    if turn.is_partial:
        rows.append(page.painter.text("(cut off)", Look.DIM))
    return [*rows, Text(end="")]


def show_turns(turns: list[Turn], page: Page) -> None:
    """Show turns one after another."""
    for turn in turns:
        if turn.role is Role.USER:
            names, words = split_attached(turn.text)
            with_files = f"\nwith {', '.join(names)}" if names else ""
            page.write_turn(f"{words}{with_files}", is_said_now=False)
        else:
            page.write(answer_rows(turn, page))


def show_where_it_stands(conversation: Conversation, page: Page) -> None:
    """Show the last exchange, and the number of earlier messages."""
    path = conversation.path()
    last = next((i for i in range(len(path) - 1, -1, -1) if path[i].role is Role.USER), 0)
    if last:
        note = f"{one_line(conversation.label)}: {plural(last, 'earlier turn')} (/show chat)"
        page.write([*page.painter.wrapped(note, page.render_context.width, Look.DIM), Text(end="")])
    if not path:
        page.write([page.painter.text("This is the beginning.", Look.DIM), Text(end="")])
    show_turns(path[last:], page)


_MIN_TEXT_CELLS = 8


def tree_rows(
    conversation: Conversation, ctx: RenderContext, warmth: Mapping[int, str]
) -> list[Row]:
    """Return one row per turn, parents before children, the tip marked.

    `warmth` has, by turn, where its KV is and what continuing from there costs.
    """
    on_path = {turn.turn_id for turn in conversation.path()}
    rows: list[Row] = []
    # What is still to be drawn, the next one last: a turn, what stands before it, and what stands
    # before its children. A stack, because conversations are deeper than Python's.
    pending = _branches(conversation, ROOT, "", ctx)
    while pending:
        turn, lead, below = pending.pop()
        row = _row(
            turn,
            lead,
            conversation.tip_id,
            turn.turn_id in on_path,
            ctx,
            warmth.get(turn.turn_id, ""),
        )
        rows.append(row)
        pending += _branches(conversation, turn.turn_id, below, ctx)
    return rows


def _branches(
    conversation: Conversation, parent_id: int, lead: str, ctx: RenderContext
) -> list[tuple[Turn, str, str]]:
    """Return the children of a turn to draw, in reverse order."""
    children = conversation.children(parent_id)
    if len(children) < 2:
        return [(child, lead, lead) for child in children]
    glyphs = ctx.painter.look.glyphs
    drawn = [(child, lead + glyphs.branch, lead + glyphs.trunk) for child in children[:-1]]
    drawn.append((children[-1], lead + glyphs.last_branch, lead + " " * len(glyphs.trunk)))
    return drawn[::-1]


def _row(
    turn: Turn, lead: str, tip_id: int, is_on_path: bool, ctx: RenderContext, warmth: str
) -> Row:
    painter = ctx.painter
    style = painter.style(Look.PLAIN if is_on_path else Look.DIM)
    who = "you" if turn.role is Role.USER else "model"
    mark = f" {painter.look.glyphs.tip}" if turn.turn_id == tip_id else ""
    cut = " (cut off)" if turn.is_partial else ""
    cut += f"{painter.look.glyphs.separator}{warmth}" if warmth else ""
    head = f"{turn.turn_id} {who}: "
    room = max(_MIN_TEXT_CELLS, ctx.width - cell_len(lead + head + mark + cut) - 1)
    row = Text(end="").append(lead, painter.style(Look.DIM))
    row.append(head, painter.style(Look.DIM)).append(turn_summary(turn, room), style)
    row.append(cut, painter.style(Look.DIM)).append(mark, painter.style(Look.HEADING))
    return row
