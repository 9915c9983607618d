"""Messages as ids without a vocabulary, for a server that takes messages and not token ids.

A conversation is a list of ids wherever kvchat keeps one. Here an id is one to four characters of
text, or a mark between two messages, so that ids can always be turned back into the messages. The
number of ids is an estimate of the number of tokens: about four characters are one token.
"""

import json
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

# An id of ASCII characters has their number in bits 28 to 30, and seven bits for each below.
_LENGTH_BIT = 28
_MOST_CHARS = 4
_PIECES = re.compile(r"[\x00-\x7f]{1,4}|.", re.S)

THINKING, AFTER_THINKING = "<think>\n", "\n</think>\n\n"
CALL, AFTER_CALL = "<tool_call>\n", "\n</tool_call>"
_THOUGHT = re.compile(r"\A\s*<think>.*?(?:</think>\s*|\Z)", re.S)
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


class Mark(IntEnum):
    """What begins a part of a context. A part is as long as no other mark follows.

    TOOLS and RESULT are followed by JSON. The marks from THINK_ON on say how much the next answer
    thinks; without one the server decides.
    """

    SYSTEM = 1
    USER = 2
    ANSWER = 3
    END = 4
    TOOLS = 5
    RESULT = 6
    THINK_ON = 8
    THINK_OFF = 9
    THINK_LOW = 10
    THINK_MEDIUM = 11
    THINK_HIGH = 12


_MARKS = frozenset(Mark)
_THINKS = frozenset(mark for mark in Mark if mark >= Mark.THINK_ON)


def text_ids(text: str) -> list[int]:
    """Return the ids of a text; they contain no mark."""
    ids = []
    for piece in _PIECES.findall(text):
        if piece.isascii():
            packed = len(piece)
            for character in piece.ljust(_MOST_CHARS, "\0"):
                packed = packed << 7 | ord(character)
            ids.append(packed)
        else:
            ids.append(ord(piece))
    return ids


def id_text(token_id: int) -> str:
    """Return the text of an id, "" for a mark."""
    length = token_id >> _LENGTH_BIT
    if length:
        shifts = range(_LENGTH_BIT - 7, _LENGTH_BIT - 7 - 7 * length, -7)
        return "".join(chr(token_id >> shift & 0x7F) for shift in shifts)
    return "" if token_id in _MARKS else chr(token_id)


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids, without the marks."""
    return "".join(map(id_text, ids))


def parts(ids: Sequence[int]) -> Iterator[tuple[Mark, str]]:
    """Yield the marks of a context, each with the text that follows it."""
    mark, start = None, 0
    for place, token_id in enumerate(ids):
        if token_id in _MARKS:
            if mark is not None:
                yield mark, text_of(ids[start:place])
            mark, start = Mark(token_id), place + 1
    if mark is not None:
        yield mark, text_of(ids[start:])


class Messages:
    """A context in the form that OpenAI's chat interface takes.

    messages   the conversation; its last one is the user's, a tool's result, or the beginning of an
               answer that is to be continued
    tools      the definitions of the tools, in order
    think      how much the next answer thinks, None if the server decides
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.think: Mark | None = None
        self._num_calls = 0
        self._unanswered: list[str] = []
        for mark, text in parts(ids):
            self._add(mark, text)
        if self.messages and self.messages[-1] == {"role": "assistant", "content": ""}:
            self.messages.pop()

    @property
    def is_continued(self) -> bool:
        """Whether the last message is the beginning of an answer."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _add(self, mark: Mark, text: str) -> None:
        if mark in _THINKS:
            self.think = mark
        elif mark is Mark.TOOLS:
            self.tools = json.loads(text)
        elif mark is Mark.SYSTEM:
            self.messages.append({"role": "system", "content": text})
        elif mark is Mark.USER:
            self.messages.append({"role": "user", "content": text})
            self.think = None
        elif mark is Mark.RESULT:
            self._add_result(text)
        elif mark is Mark.ANSWER:
            self._add_answer(text)

    def _add_answer(self, text: str) -> None:
        text = _THOUGHT.sub("", text, count=1)
        calls = [call for found in _CALLS.findall(text) if (call := _read_call(found)) is not None]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tools and calls:
            message["content"] = _CALLS.sub("", text).strip()
            message["tool_calls"] = [self._call(*call) for call in calls]
        self.messages.append(message)

    def _call(self, name: str, arguments: Any) -> dict[str, Any]:
        self._num_calls += 1
        call_id = f"call{self._num_calls:05}"
        self._unanswered.append(call_id)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": call_id, "type": "function", "function": function}

    def _add_result(self, text: str) -> None:
        result = json.loads(text)
        call_id = self._unanswered.pop(0) if self._unanswered else "call00000"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result["text"]})


def _read_call(text: str) -> tuple[str, Any] | None:
    try:
        call = json.loads(text)
        json.dumps(
            call, ensure_ascii=False, allow_nan=False
        ).encode()  # what cannot be sent is text
        return str(call["name"]), call["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def call_text(name: str, arguments: str) -> str:
    """Return how a call stands in the text of an answer; `arguments` are JSON, perhaps broken."""
    inside = f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}'
    inside = inside.replace("</", "<\\/")  # the same to JSON, and no end of a call
    return f"{CALL}{inside}{AFTER_CALL}"
