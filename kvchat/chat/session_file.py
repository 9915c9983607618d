"""The session file: JSON lines, one event a line, appended as they happen.

Writes a conversation's lines and reads them back, also after an incomplete last line.
`sessions/README.md` describes the format.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.errors import KvchatError, StoreError
from kvchat.core.types import FinishReason

FORMAT_VERSION = 1
MAGIC = "session"
# The beginning of every line but the first, the kinds that follow it, and the text that only an
# answer's turn line contains.
_OPENING = b'{"type":"'
_KINDS = frozenset(
    (
        *(b"turn", b"more", b"end", b"tip", b"title", b"system", b"tools", b"model", b"waiting"),
        *(b"adopted", b"settings"),
    )
)
_ANSWER = b'"role":"assistant"'
# The most turns of a conversation that a script began and nothing has gone on with.
_ONE_SHOT_TURNS = 2
# The beginning of a turn's line, a key that only the turns of a summary have, and a tip's line.
# `int` raises ValueError for thousands of digits: a longer number is for the parser of JSON.
_NUMBER = rb"(\d{1,18})"
_TURN_LINE = re.compile(
    rb'\{"type":"turn","id":' + _NUMBER + rb',"parent":' + _NUMBER + rb',"role":"(user|assistant)",'
)
_SUMMARY = b',"summary_of":'
# What a turn has that holds results of tools and no text of the user.
_RESULTS, _NO_TEXT = b',"results":', b'"role":"user","text":"",'
_TIP_LINE = re.compile(rb'\{"type":"tip","id":' + _NUMBER + rb"\}$")


@dataclass(frozen=True, slots=True)
class ReadSession:
    """A conversation read from a file; `notes` are sentences for the user on what was lost.

    `model` is the name of the model that answered last, or else of the one it was begun with.
    `is_one_shot` says that a script began it, and nothing has gone on with it.
    """

    conversation: Conversation
    model: str
    notes: tuple[str, ...]
    is_one_shot: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """A session's entry in a list: its title or first words, and its number of turns.

    A turn is here a message of the user on the path to the tip, with its answer if it has one.
    `model` and `is_one_shot` are as in ReadSession.
    """

    label: str
    num_turns: int
    has_answer: bool
    model: str = ""
    is_one_shot: bool = False


def header_line(conversation: Conversation, model: str, is_one_shot: bool = False) -> str:
    """Return the first line of a session file; `is_one_shot` if a script began it."""
    header: dict[str, Any] = {
        "kvchat": MAGIC,
        "version": FORMAT_VERSION,
        "id": conversation.session_id,
        "created": conversation.created_s,
        "system": conversation.system,
        "model": model,
    }
    return _line({**header, "one_shot": True} if is_one_shot else header)


def turn_line(turn: Turn) -> str:
    """Return the line that adds a turn; an answer's is written at its start, without its end."""
    event: dict[str, Any] = {
        "type": "turn",
        "id": turn.turn_id,
        "parent": turn.parent_id,
        "role": turn.role.value,
        "text": turn.text,
        "ids": list(turn.token_ids),
        "tokenizer": turn.tokenizer,
        "at": turn.created_s,
    }
    results = [[result.name, result.text] for result in turn.results] or None
    optional = {
        "system": turn.system,
        "copy_of": turn.copy_of,
        "summary_of": turn.summary_of,
        "results": results,
    }
    event.update((key, value) for key, value in optional.items() if value is not None)
    return _line(event)


def whole_turn(turn: Turn) -> str:
    """Return the lines of a complete turn: what adds it, and what ends an answer."""
    if turn.finish is None:
        return turn_line(turn)
    return turn_line(turn) + end_line(turn.turn_id, turn.finish, {}, turn.calls)


def conversation_lines(conversation: Conversation) -> str:
    """Return what follows the first line: the tools, all turns and the tip."""
    tools = tools_line(conversation.tools) if conversation.tools is not None else ""
    turns = "".join(map(whole_turn, conversation.turns()))
    return tools + turns + tip_line(conversation.tip_id)


def more_line(
    turn_id: int, text: str, token_ids: Iterable[int], tokenizer: str | None = None
) -> str:
    """Return the line that appends text and ids to an answer.

    With `tokenizer`, the ids are all of the answer's ids, and replace those of another model.
    """
    event = {"type": "more", "id": turn_id, "text": text, "ids": list(token_ids)}
    if tokenizer is not None:
        event["tokenizer"] = tokenizer
    return _line(event)


def adopted_line(turn: Turn) -> str:
    """Return the line that says which ids another model's turn has with the present tokenizer.

    The turn keeps its own ids: KV of both is found by them when the conversation is deleted.
    """
    event = {"id": turn.turn_id, "ids": list(turn.token_ids), "tokenizer": turn.tokenizer}
    return _line({"type": "adopted", **event})


def end_line(
    turn_id: int,
    reason: FinishReason,
    facts: dict[str, object],
    calls: Iterable[ToolCall] = (),
    text: str | None = None,
) -> str:
    """Return the line that ends an answer; `facts` (usage, timing) are for human readers.

    With calls, `text` replaces the text before it, in which they stand as the model wrote them.
    """
    called = [[call.name, dict(call.arguments)] for call in calls]
    made: dict[str, object] = {"calls": called} if called else {}
    if called and text is not None:
        made["text"] = text
    return _line({"type": "end", "id": turn_id, "finish": reason.value, **made, **facts})


def tools_line(tools: ToolSet | None) -> str:
    """Return the line that sets the tools of later contexts."""
    return _line({"type": "tools", "functions": tools.functions if tools is not None else []})


def model_line(name: str) -> str:
    """Return the line that says which model gives the answers that follow."""
    return _line({"type": "model", "name": name})


def settings_line(settings: Mapping[str, Any]) -> str:
    """Return the line that says with which values of parameters the conversation goes on."""
    return _line({"type": "settings", "values": dict(settings)})


def tip_line(turn_id: int) -> str:
    """Return the line that moves the tip."""
    return _line({"type": "tip", "id": turn_id})


def title_line(title: str) -> str:
    """Return the line that sets the conversation's title."""
    return _line({"type": "title", "title": title})


def waiting_line(texts: Iterable[str]) -> str:
    """Return the line that says which messages are typed and not sent yet."""
    return _line({"type": "waiting", "texts": list(texts)})


def system_line(system: str | None) -> str:
    """Return the line that sets the system prompt of later turns."""
    return _line({"type": "system", "system": system})


def _line(event: dict[str, Any]) -> str:
    # Lone surrogates, from undecodable input, stay readable as escapes.
    return json.dumps(event, ensure_ascii=True, separators=(",", ":")) + "\n"


def read_session(data: bytes, name: str) -> ReadSession:
    """Rebuild a conversation from a file's bytes; `name` is the file's name in messages.

    An incomplete last line is dropped and noted. So is a damaged line, together with the turns
    below its turn. Raises StoreError if the file is not a session or has an unknown version.
    """
    *lines, torn = data.split(b"\n")
    header = _event(lines[0]) if lines else None
    conversation, model = _begin(header, name)
    damaged = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            event = _event(line) or {"type": "damaged"}
            _apply(conversation, event)
            model = str(event["name"]) if event["type"] == "model" else model
        except (KeyError, TypeError, ValueError, ArithmeticError):
            damaged.append(number)
    notes = [_damage(damaged, name)] if damaged else []
    if torn:
        notes.append(f"The last line of {name} was torn and was dropped.")
    is_one_shot = header is not None and header.get("one_shot") is True
    is_one_shot = is_one_shot and len(conversation) <= _ONE_SHOT_TURNS
    return ReadSession(conversation, model, tuple(notes), is_one_shot)


def _damage(numbers: list[int], name: str) -> str:
    """Return one sentence on which lines could not be read."""
    if len(numbers) == 1:
        return f"Line {numbers[0]} of {name} is damaged and was skipped."
    rest = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    listed = ", ".join(str(number) for number in numbers[:3])
    return f"Lines {listed}{rest} of {name} are damaged and were skipped."


def read_summary(data: bytes, name: str) -> Summary:
    """Return a session's summary; raises StoreError as `read_session` does.

    Lines are recognised by their first bytes, as this module writes them, and only a few lines are
    parsed: ten times as fast. If a line begins otherwise, the whole file is parsed.
    """
    lines = data.split(b"\n")[:-1]
    first_turn = title = waiting = model = b""
    path, has_answer, num_lines = _PathCount(), False, 0
    for line in lines[1:]:
        kind = line[len(_OPENING) : line.find(b'"', len(_OPENING))]
        if kind not in _KINDS or not line.startswith(_OPENING) or not line.endswith(b"}"):
            return _whole_summary(read_session(data, name))
        if not path.take(kind, line):
            return _whole_summary(read_session(data, name))
        if kind == b"turn":
            first_turn = first_turn or line
            num_lines += 1
            has_answer = has_answer or _ANSWER in line
        elif kind == b"title":
            title = line
        elif kind == b"waiting":
            waiting = line
        elif kind == b"model":
            model = line
    # Parse only these lines, as if they were a whole file.
    wanted = (*lines[:1], first_turn or waiting, title, model)
    few = _whole_summary(read_session(b"".join(line + b"\n" for line in wanted if line), name))
    is_one_shot = few.is_one_shot and num_lines <= _ONE_SHOT_TURNS
    return replace(few, num_turns=path.num_turns, has_answer=has_answer, is_one_shot=is_one_shot)


def _whole_summary(read: ReadSession) -> Summary:
    conversation = read.conversation
    has_answer = any(turn.role is Role.ASSISTANT for turn in conversation.turns())
    num_turns = sum(turn.is_message for turn in conversation.path())
    return Summary(conversation.label, num_turns, has_answer, read.model, read.is_one_shot)


class _PathCount:
    """Counts the user's messages on the path to the tip, from lines of a session file."""

    def __init__(self) -> None:
        self._counts = {ROOT: 0}  # by turn: the messages on its path
        self._tip = ROOT

    @property
    def num_turns(self) -> int:
        return self._counts[self._tip]

    def take(self, kind: bytes, line: bytes) -> bool:
        """Take the next line; false if the count is not certain with it."""
        if kind == b"tip":
            match = _TIP_LINE.match(line)
            self._tip = int(match[1]) if match is not None else -1
            return self._tip in self._counts
        if kind == b"turn":
            match = _TURN_LINE.match(line)
            parent = int(match[2]) if match is not None else -1
            if match is None or parent not in self._counts:
                return False
            is_typed = _RESULTS not in line or _NO_TEXT not in line
            is_message = match[3] == b"user" and _SUMMARY not in line and is_typed
            self._tip = int(match[1])
            self._counts[self._tip] = self._counts[parent] + is_message
        return True


def without_turns(data: bytes, gone: set[int], keeps_title: bool) -> bytes:
    """Return a session file's bytes without the lines of some turns.

    `keeps_title` false removes titles too, because they may quote the first turn. Of the messages
    that wait to be sent, those with the text of a removed turn are removed.
    """
    first, *lines = data.split(b"\n")[:-1]
    kept = [line for line in lines if _stays(_event(line) or {}, gone, keeps_title)]
    if waiting := _waiting_without(data, gone):
        kept.append(waiting_line(waiting).encode().rstrip(b"\n"))
    return b"".join(line + b"\n" for line in (first, *kept))


def without_waiting(data: bytes) -> bytes:
    """Return a session file's bytes without the lines on messages that wait to be sent."""
    lines = data.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(_OPENING + b'waiting"'))


# A turn's id and the ids that it had, for the turns on a path.
RecordedPath = list[tuple[int, tuple[int, ...]]]


def recorded_paths(data: bytes) -> list[RecordedPath]:
    """Return the paths of a session file with all ids that their turns have, or have had.

    A path has the ids of one tokenizer, as far as there are any. Raises StoreError as
    `read_session` does.
    """
    header, *lines = data.split(b"\n")
    found: list[RecordedPath] = []
    ids: dict[str, dict[int, tuple[int, ...]]] = {}  # by tokenizer and turn
    conversation, _ = _begin(_event(header), "")
    for line in lines:
        with suppress(KeyError, TypeError, ValueError, ArithmeticError):
            event = _event(line) or {"type": "damaged"}
            if event["type"] == "more" and "tokenizer" in event:
                turn = conversation.turn(_number(event["id"]))
                ids.setdefault(turn.tokenizer, {})[turn.turn_id] = turn.token_ids
                found.append([(t.turn_id, t.token_ids) for t in conversation.path(turn.turn_id)])
            _apply(conversation, event)
            if event["type"] == "adopted":
                ids.setdefault(str(event["tokenizer"]), {})[_number(event["id"])] = _ids(event)
    for turn in conversation.turns():
        ids.setdefault(turn.tokenizer, {})
    for tokenizer, known in ids.items():
        for leaf in conversation.leaves():
            path: RecordedPath = []
            for turn in conversation.path(leaf.turn_id):
                own = turn.token_ids if turn.tokenizer == tokenizer else None
                if (added := known.get(turn.turn_id, own)) is None:
                    break
                path.append((turn.turn_id, added))
            found.append(path)
    return found


def _stays(event: dict[str, Any], gone: set[int], keeps_title: bool) -> bool:
    kind = event.get("type")
    if kind in ("turn", "more", "end", "tip", "adopted"):
        return event.get("id") not in gone
    # An unreadable line may belong to a removed turn, so it is removed as well; what was typed
    # ahead may be the text of one, and what waits still is written anew.
    return kind not in (None, "waiting") and (keeps_title or kind != "title")


def _waiting_without(data: bytes, gone: set[int]) -> tuple[str, ...]:
    """Return the messages that wait to be sent, but for those with the text of a removed turn."""
    conversation = read_session(data, "").conversation
    removed = {turn.text for turn in conversation.turns() if turn.turn_id in gone}
    return tuple(text for text in conversation.waiting if text not in removed)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _begin(header: dict[str, Any] | None, name: str) -> tuple[Conversation, str]:
    if header is None or header.get("kvchat") != MAGIC:
        raise StoreError(
            f"{name} is not a kvchat session.",
            "`kvchat sessions` lists all; --resume goes on with another.",
        )
    if header.get("version") != FORMAT_VERSION:
        raise StoreError(
            f"{name} has the format {header.get('version')}, which this kvchat cannot read.",
            "Upgrade kvchat to open it.",
        )
    try:
        created_s = float(header["created"])
        datetime.fromtimestamp(created_s)  # must be a possible date: templates receive it
        conversation = Conversation(str(header["id"]), created_s, _system(header))
    except (KeyError, TypeError, ValueError, ArithmeticError, OSError) as error:
        raise StoreError(f"The first line of {name} is damaged.") from error
    return conversation, str(header.get("model", ""))


def _apply(conversation: Conversation, event: dict[str, Any]) -> None:
    """Apply a line to a conversation; raises KeyError, TypeError or ValueError if it is invalid."""
    kind = event["type"]
    if kind == "turn":
        turn = _new_turn(conversation, event)
        conversation.add(turn)
        conversation.waiting = _without(conversation.waiting, turn)
    elif kind == "more":
        conversation.replace(_grown(conversation.turn(_number(event["id"])), event))
    elif kind == "end":
        turn = conversation.turn(_number(event["id"]))
        finish, calls = FinishReason(event["finish"]), _calls(event)
        text = str(event["text"]) if calls and "text" in event else turn.text
        conversation.replace(replace(turn, finish=finish, calls=calls, text=text))
    elif kind == "tip":
        conversation.move_tip(_known(conversation, event["id"]))
    elif kind == "title":
        conversation.title = str(event["title"])
    elif kind == "system":
        conversation.system = _system(event)
    elif kind == "tools":
        conversation.tools = _tools(event)
    elif kind == "waiting":
        conversation.waiting = _texts(event)
    elif kind == "settings":
        conversation.settings = {str(name): value for name, value in dict(event["values"]).items()}
    elif kind == "adopted":
        conversation.adopted.add((_number(event["id"]), str(event["tokenizer"])))
    elif kind == "damaged":
        raise ValueError
    # Other kinds come from later releases with the same format version, and are ignored.


def _texts(event: dict[str, Any]) -> tuple[str, ...]:
    texts = event["texts"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return tuple(texts)


def _without(waiting: tuple[str, ...], turn: Turn) -> tuple[str, ...]:
    """Return the messages that still wait once a turn is sent: its text may follow its files.

    The copies that /compact makes of earlier turns send nothing.
    """
    if not turn.is_message or turn.copy_of is not None:
        return waiting
    with_files = (text for text in waiting if turn.text.endswith(f"```\n\n{text}"))
    sent = turn.text if turn.text in waiting else next(with_files, None)
    if sent is None:
        return waiting
    index = waiting.index(sent)
    return waiting[:index] + waiting[index + 1 :]


def _new_turn(conversation: Conversation, event: dict[str, Any]) -> Turn:
    turn_id, parent_id = _number(event["id"]), _known(conversation, event["parent"])
    if turn_id < conversation.next_turn_id:
        raise ValueError("turns are numbered in the order they are added")
    return Turn(
        turn_id=turn_id,
        parent_id=parent_id,
        role=Role(event["role"]),
        text=str(event["text"]),
        token_ids=_ids(event),
        tokenizer=str(event["tokenizer"]),
        created_s=float(event["at"]),
        system=_system(event),
        copy_of=_number(event["copy_of"]) if "copy_of" in event else None,
        summary_of=_number(event["summary_of"]) if "summary_of" in event else None,
        results=tuple(ToolResult(str(n), str(text)) for n, text in event.get("results", ())),
    )


def _grown(turn: Turn, event: dict[str, Any]) -> Turn:
    """Return an answer after a `more` line: the line's ids are appended, or replace all ids."""
    text = turn.text + event["text"]
    if "tokenizer" in event:
        return replace(turn, text=text, token_ids=_ids(event), tokenizer=str(event["tokenizer"]))
    return replace(turn, text=text, token_ids=(*turn.token_ids, *_ids(event)))


def _known(conversation: Conversation, turn_id: object) -> int:
    """Return the id of an existing turn, or ROOT; raises KeyError or TypeError for others."""
    number = _number(turn_id)
    return number if number == ROOT else conversation.turn(number).turn_id


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _ids(event: dict[str, Any]) -> tuple[int, ...]:
    ids = tuple(event["ids"])
    if not set(map(type, ids)) <= {int}:
        raise TypeError
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError
    return ids


def _calls(event: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = [(name, arguments) for name, arguments in event.get("calls", ())]
    if not all(isinstance(name, str) and isinstance(given, dict) for name, given in calls):
        raise TypeError
    return tuple(ToolCall(name, arguments) for name, arguments in calls)


def _tools(event: dict[str, Any]) -> ToolSet | None:
    functions = event["functions"]
    if not isinstance(functions, list) or not all(isinstance(f["name"], str) for f in functions):
        raise TypeError
    try:
        return ToolSet(functions) if functions else None
    except KvchatError as error:
        raise ValueError from error


def _system(event: dict[str, Any]) -> str | None:
    system = event.get("system")
    if system is not None and not isinstance(system, str):
        raise TypeError
    return system
