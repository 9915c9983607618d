"""Shows what a conversation holds already: a turn, the last exchange, all of it.

Knows turns and faces; changes nothing.
"""

from rich.text import Text

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.thinking import whole_passages
from kvchat.terminal.answer_view import Speech
from kvchat.terminal.desk import Desk
from kvchat.terminal.face import Page
from kvchat.terminal.gist import split_attached
from kvchat.terminal.paint import Row
from kvchat.terminal.sanitize import one_line
from kvchat.terminal.status import format_count, plural
from kvchat.terminal.theme import Role as Look


def answer_rows(turn: Turn, face: Page) -> list[Row]:
    """Return a saved answer as it looked when it came."""
    speech = Speech(face.painter)
    rows: list[Row] = []
    for passage in whole_passages(turn.text):
        rows += speech.feed(passage.text, passage.is_thinking, face.sheet)
    rows += speech.finish(face.sheet)
    if turn.is_partial:
        rows.append(face.painter.text("(cut off)", Look.DIM))
    return [*rows, Text(end="")]


def show_turns(turns: list[Turn], face: Page) -> None:
    """Show turns one after another."""
    for turn in turns:
        if turn.role is Role.USER:
            names, words = split_attached(turn.text)
            with_files = f"\nwith {', '.join(names)}" if names else ""
            face.write_turn(f"{words}{with_files}", is_said_now=False)
        else:
            face.write(answer_rows(turn, face))


def show_where_it_stands(conversation: Conversation, face: Page) -> None:
    """Show the last exchange, and how much lies before it."""
    path = conversation.path()
    last = next((i for i in range(len(path) - 1, -1, -1) if path[i].role is Role.USER), 0)
    if last:
        note = f"{one_line(conversation.label)}: {plural(last, 'earlier turn')} (/show chat)"
        face.write([*face.painter.wrapped(note, face.sheet.width, Look.DIM), Text(end="")])
    if not path:
        face.write([face.painter.text("This is the beginning.", Look.DIM), Text(end="")])
    show_turns(path[last:], face)


def describe_model(desk: Desk) -> str:
    """Return what is known of the model, a fact a line."""
    model, ready = desk.host.model, desk.host.ready
    facts = [("model", one_line(model.name)), ("template", str(model.format.strategy))]
    if ready is not None:
        facts += [
            ("device", f"{ready.device}, {ready.dtype}"),
            ("draft", one_line(ready.draft) if ready.draft else "none"),
            ("context", f"{format_count(ready.context_limit)} tokens"),
            ("identity", ready.identity),
            ("loaded in", f"{ready.load_s:.1f} s"),
        ]
    return "\n".join(f"{name:<10} {value}" for name, value in facts)
