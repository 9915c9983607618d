"""The text side of a model that a `kvchat serve` of this machine has loaded.

A chat asks the server to encode, to write turns and to decode, and so reads neither tokenizer nor
chat template: that takes longer than a short answer. `text_facts` and `text_answer` are the
server's half, `served_model` is the chat's. Once the server is lost, the chat reads them itself.
"""

import codecs
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.fields import Fields
from kvchat.chat.template import AnswerForm, NewTurn, Strategy
from kvchat.chat.template_tools import Spaces, ToolForm
from kvchat.chat.text_codec import LONG_TEXT, Segment
from kvchat.chat.text_stream import TextStream
from kvchat.chat.thinking import Think, ThinkSwitch
from kvchat.chat.tool_calls import CALL_FORMATS
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, ToolUse
from kvchat.core.errors import UsageError

# Tokens whose bytes are asked for at once. Low ids are common: few pages have most of a text.
_PAGE = 1024
# Ids before a stream that decide how its first text is written.
_STREAM_CONTEXT = 8

# Asks a question by its name; raises OSError where the server is lost.
Ask = Callable[[str, Mapping[str, Any]], Any]


# The server's half


def text_facts(model: ChatModel) -> dict[str, Any]:
    """Return what a chat has to know of a model's text side before its first question, as JSON.

    Raises UsageError for a model whose tokenizer another server has.
    """
    from kvchat.chat.tokenizer import ChatTokenizer

    codec, form = model.tokenizer, model.format
    if not isinstance(codec, ChatTokenizer):
        raise UsageError("Another server has this model's tokenizer.")
    return {
        "digest": codec.digest,
        "hidden_ids": sorted(codec.hidden_ids),
        "is_bytewise": codec.is_bytewise,
        "codec_stop_ids": sorted(codec.stop_token_ids),
        "stop_ids": sorted(model.stop_token_ids),
        "sampling": model.sampling_defaults,
        "max_context": model.max_context,
        "vocab_size": model.vocab_size,
        "strategy": form.strategy.value,
        "switch": asdict(form.switch),
        "answer": asdict(form.answer),
    }


def text_answer(model: ChatModel, name: str, given: Mapping[str, Any]) -> Any:
    """Return the answer to a question of `served_model`, as JSON.

    Raises FieldFault for a question that is none, ModelError where tokenizer or template fail.
    """
    if name not in _ANSWERS:
        raise Fields({"question": name}).fault("question", "must be one of this version's")
    try:
        return _ANSWERS[name](model, given)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Fields(given).fault("question", f"has an unknown form ({error!r:.80})") from error


def _tools(model: ChatModel, given: Mapping[str, Any]) -> dict[str, Any] | None:
    form = model.format.tools
    if form is None:
        return None
    rest = {name: getattr(form, name) for name in _TOOL_FIELDS}
    return {**rest, "calls": CALL_FORMATS.index(form.calls), "spaces": asdict(form.spaces)}


def _stream(model: ChatModel, given: Mapping[str, Any]) -> str:
    stream = model.tokenizer.new_stream(given["context"])
    text = "".join(map(stream.feed, given["ids"]))
    return text + stream.flush() if given["is_last"] else text


def _page(model: ChatModel, given: Mapping[str, Any]) -> list[str]:
    start = int(given["start"])
    ids = range(start, start + _PAGE)
    return [model.tokenizer.token_bytes(token_id).decode("latin-1") for token_id in ids]


_TOOL_FIELDS = ("has_text_arguments", "escapes_results", "closing")
_ANSWERS: dict[str, Callable[[ChatModel, Mapping[str, Any]], Any]] = {
    "encode": lambda m, g: m.tokenizer.encode(_segments(g)),
    "encode_after": lambda m, g: m.tokenizer.encode_after(g["last_id"], _segments(g)),
    "encode_front": lambda m, g: m.tokenizer.encode_front(str(g["text"]), int(g["most"])),
    "encode_raw": lambda m, g: m.tokenizer.encode_raw(str(g["text"])),
    "exceeds": lambda m, g: m.tokenizer.exceeds(str(g["text"]), int(g["limit"])),
    "decode": lambda m, g: m.tokenizer.decode(g["ids"]),
    "token_id": lambda m, g: m.tokenizer.token_id(str(g["token"])),
    "bytes": _page,
    "stream": _stream,
    "opening": lambda m, g: m.format.opening(_turn(g)),
    "following": lambda m, g: m.format.following(_turn(g), g["last_id"]),
    "given_calls": lambda m, g: _told_segments(
        m.format.given_calls(str(g["text"]), _calls(g["calls"]))
    ),
    "tools": _tools,
}


# Forms of both halves


def _told_segments(segments: Sequence[Segment]) -> list[list[Any]]:
    return [[segment.text, segment.is_inert] for segment in segments]


def _segments(given: Mapping[str, Any]) -> list[Segment]:
    return [Segment(str(text), bool(is_inert)) for text, is_inert in given["segments"]]


def _told_calls(calls: Sequence[ToolCall]) -> list[list[Any]]:
    return [[call.name, call.arguments] for call in calls]


def _calls(told: Sequence[Sequence[Any]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(str(name), dict(arguments)) for name, arguments in told)


def _told_turn(turn: NewTurn) -> dict[str, Any]:
    tools = turn.tools.functions if turn.tools is not None else None
    return {
        "text": turn.text,
        "clock": turn.clock.isoformat(),
        "system": turn.system,
        "think": turn.think.value,
        "is_answered": turn.is_answered,
        "tools": tools,
        "calls": _told_calls(turn.use.calls),
        "results": [[result.name, result.text] for result in turn.use.results],
    }


def _turn(given: Mapping[str, Any]) -> NewTurn:
    results = tuple(ToolResult(str(name), str(text)) for name, text in given["results"])
    return NewTurn(
        str(given["text"]),
        datetime.fromisoformat(given["clock"]),
        given["system"],
        Think(given["think"]),
        bool(given["is_answered"]),
        ToolSet(given["tools"]) if given["tools"] is not None else None,
        ToolUse(_calls(given["calls"]), results),
    )


# The chat's half


class TextQuestions:
    """Asks a server; once it is lost another that `find` finds, else the model's own files.

    find       returns how to ask the server that runs now, None without one
    read_own   reads the text side of the model from its files; raises ModelError
    """

    def __init__(
        self, ask: Ask, find: Callable[[], Ask | None], read_own: Callable[[], ChatModel]
    ) -> None:
        self._ask = ask
        self._find = find
        self._read_own = read_own
        self._own: ChatModel | None = None
        self._lock = threading.Lock()

    def answer(self, name: str, **given: Any) -> Any:
        """Return the answer to a question; raises ModelError if there is none."""
        with self._lock:
            if self._own is None:
                try:
                    return self._ask(name, given)
                except OSError:
                    pass
                if (again := self._find()) is not None:
                    self._ask = again
                    try:
                        return self._ask(name, given)
                    except OSError:
                        pass
                self._own = self._read_own()
            return text_answer(self._own, name, given)


def served_model(name: str, facts: Mapping[str, Any], questions: TextQuestions) -> ChatModel:
    """Return the text side of a model whose server gave these facts.

    Raises KeyError, TypeError or ValueError for facts of another form.
    """
    codec = ServedCodec(facts, questions)
    return ChatModel(
        name=name,
        tokenizer=codec,
        format=ServedFormat(facts, questions),
        stop_token_ids=frozenset(facts["stop_ids"]),
        sampling_defaults=dict(facts["sampling"]),
        max_context=int(facts["max_context"]),
        vocab_size=facts["vocab_size"],
    )


class ServedCodec:
    """Has of a ChatTokenizer what a chat uses; `answers.grammars` are the server's own."""

    def __init__(self, facts: Mapping[str, Any], questions: TextQuestions) -> None:
        self._questions = questions
        self.digest = str(facts["digest"])
        self.stop_token_ids = frozenset(facts["codec_stop_ids"])
        self.hidden_ids = frozenset(facts["hidden_ids"])
        self.is_bytewise = bool(facts["is_bytewise"])
        self._ids: dict[str, int | None] = {}
        self._pages: dict[int, list[bytes]] = {}

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        return list(self._questions.answer("encode", segments=_told_segments(segments)))

    def encode_after(self, last_id: int | None, segments: Sequence[Segment]) -> list[int]:
        told = _told_segments(segments)
        return list(self._questions.answer("encode_after", last_id=last_id, segments=told))

    def encode_front(self, text: str, most: int) -> list[int]:
        return list(self._questions.answer("encode_front", text=text, most=most))

    def encode_raw(self, text: str) -> list[int]:
        return list(self._questions.answer("encode_raw", text=text))

    def exceeds(self, text: str, limit: int) -> bool:
        if len(text) <= max(4 * limit, LONG_TEXT):
            return False
        return bool(self._questions.answer("exceeds", text=text, limit=limit))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._questions.answer("decode", ids=list(token_ids)))

    def new_stream(self, context_ids: Sequence[int]) -> TextStream:
        if self.is_bytewise:
            return ByteStream(self)
        return AskedStream(self, context_ids, self._questions)

    def token_id(self, token: str) -> int | None:
        if token not in self._ids:
            self._ids[token] = self._questions.answer("token_id", token=token)
        return self._ids[token]

    def is_hidden(self, token_id: int) -> bool:
        return token_id in self.hidden_ids

    def token_bytes(self, token_id: int) -> bytes:
        number, place = divmod(token_id, _PAGE)
        if number not in self._pages:
            page = self._questions.answer("bytes", start=number * _PAGE)
            self._pages[number] = [text.encode("latin-1") for text in page]
        return self._pages[number][place]

    @property
    def grammars(self) -> Any:
        raise UsageError("The server compiles the formats of answers.")


class ByteStream:
    """Decodes ids by the bytes of each, where a text is its tokens' bytes in a row."""

    def __init__(self, codec: ServedCodec) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if self._codec.is_hidden(token_id):
            return ""
        return self._decoder.decode(self._codec.token_bytes(token_id))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class AskedStream:
    """Decodes ids by asking, each with those before it that are no whole text yet."""

    def __init__(
        self, codec: ServedCodec, context_ids: Sequence[int], questions: TextQuestions
    ) -> None:
        self._codec = codec
        self._questions = questions
        self._context = list(context_ids[-_STREAM_CONTEXT:])
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        if self._codec.is_hidden(token_id):
            return ""
        self._pending.append(token_id)
        if text := self._asked(is_last=False):
            self._context = [*self._context, *self._pending][-_STREAM_CONTEXT:]
            self._pending.clear()
        return text

    def flush(self) -> str:
        text = self._asked(is_last=True) if self._pending else ""
        self._pending.clear()
        return text

    def _asked(self, is_last: bool) -> str:
        given = {"context": self._context, "ids": self._pending, "is_last": is_last}
        return str(self._questions.answer("stream", **given))


class ServedFormat:
    """Writes turns as the server's chat template does."""

    def __init__(self, facts: Mapping[str, Any], questions: TextQuestions) -> None:
        self._questions = questions
        self.strategy = Strategy(facts["strategy"])
        switch, answer = facts["switch"], dict(facts["answer"])
        self.switch = ThinkSwitch(**{**switch, "toggles": tuple(switch["toggles"])})
        self.answer = AnswerForm(**{**answer, "spaces": Spaces(**answer["spaces"])})

    def opening(self, turn: NewTurn) -> list[int]:
        return list(self._questions.answer("opening", **_told_turn(turn)))

    def following(self, turn: NewTurn, last_id: int | None) -> list[int]:
        return list(self._questions.answer("following", last_id=last_id, **_told_turn(turn)))

    def given_calls(self, text: str, calls: Sequence[ToolCall]) -> list[Segment]:
        told = self._questions.answer("given_calls", text=text, calls=_told_calls(calls))
        return _segments({"segments": told})

    @cached_property
    def tools(self) -> ToolForm | None:
        told = self._questions.answer("tools")
        if told is None:
            return None
        spaces, calls = Spaces(**told.pop("spaces")), CALL_FORMATS[told.pop("calls")]
        return replace(ToolForm(calls, **told), spaces=spaces)
