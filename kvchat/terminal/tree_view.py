"""The tree of a conversation as rows: branches indented, runs of turns straight down.

Knows turns; knows no screen.
"""

from rich.cells import cell_len
from rich.text import Text

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.terminal.gist import gist
from kvchat.terminal.leaves import Sheet
from kvchat.terminal.paint import Row
from kvchat.terminal.theme import Role as Look

_MIN_TEXT_CELLS = 16


def tree_rows(conversation: Conversation, sheet: Sheet) -> list[Row]:
    """Return one row per turn, parents before children, the tip marked."""
    on_path = {turn.turn_id for turn in conversation.path()}
    rows: list[Row] = []
    # What is still to be drawn, the next one last: a turn, what stands before it, and what stands
    # before its children. A stack, because conversations are deeper than Python's.
    pending = _branches(conversation, ROOT, "", sheet)
    while pending:
        turn, lead, below = pending.pop()
        rows.append(_row(turn, lead, conversation.tip_id, turn.turn_id in on_path, sheet))
        pending += _branches(conversation, turn.turn_id, below, sheet)
    return rows


def _branches(
    conversation: Conversation, parent_id: int, lead: str, sheet: Sheet
) -> list[tuple[Turn, str, str]]:
    """Return the children of a turn to be drawn, the first one last."""
    children = conversation.children(parent_id)
    if len(children) < 2:
        return [(child, lead, lead) for child in children]
    glyphs = sheet.painter.look.glyphs
    drawn = [(child, lead + glyphs.branch, lead + glyphs.trunk) for child in children[:-1]]
    drawn.append((children[-1], lead + glyphs.last_branch, lead + " " * len(glyphs.trunk)))
    return drawn[::-1]


def _row(turn: Turn, lead: str, tip_id: int, is_on_path: bool, sheet: Sheet) -> Row:
    painter = sheet.painter
    style = painter.style(Look.PLAIN if is_on_path else Look.DIM)
    who = "you" if turn.role is Role.USER else "model"
    mark = f" {painter.look.glyphs.tip}" if turn.turn_id == tip_id else ""
    cut = " (cut off)" if turn.is_partial else ""
    head = f"{turn.turn_id} {who}: "
    room = max(_MIN_TEXT_CELLS, sheet.width - cell_len(lead + head + mark + cut) - 1)
    row = Text(end="").append(lead, painter.style(Look.DIM))
    row.append(head, painter.style(Look.DIM)).append(gist(turn, room), style)
    row.append(cut, painter.style(Look.DIM)).append(mark, painter.style(Look.HEADING))
    return row
