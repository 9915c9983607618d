"""Messages of a JSON request: their parts are read, and they become the turns of a chat."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvchat.chat.conversation import Role
from kvchat.chat.fields import FieldFault, Fields, shortened
from kvchat.chat.resent_chat import KeptPart, Message, ResentChat, joined, resent_chat
from kvchat.chat.tools import ToolCall, ToolResult, ToolSet, read_arguments
from kvchat.core.errors import UsageError

# What a user sends and the model cannot read is refused. What a tool returned stays in a
# conversation for ever, so a note takes its place there.

_TEXTS = ("text", "input_text", "output_text")
# Answers have these too; their ids are known with the answer's, or another server ran them.
THOUGHTS = ("thinking", "redacted_thinking")
_NAMES = {
    "image": "An image",
    "image_url": "An image",
    "input_image": "An image",
    "document": "A document",
    "file": "A file",
    "input_file": "A file",
    "audio": "A recording",
    "input_audio": "A recording",
}

Refer = Callable[[str], str]


def message_text(message: Fields, name: str = "content", besides: tuple[str, ...] = ()) -> str:
    """Return the text of a message's field; raises ApiError for what the model cannot read.

    Parts of the types `besides` are left out.
    """
    texts = []
    for part in _parts(message, name):
        if part.text("type") in besides:
            continue
        text = _text_of(part)
        if text is None:
            raise part.fault("type", "must be text; the model reads nothing else")
        texts.append(text)
    return "".join(texts)


def returned_text(result: Fields, name: str, refer: Refer | None = None) -> str:
    """Return the text of what a tool returned, with a note for each part that is no text.

    `refer` returns what stands for a reference to a tool, by the tool's name.
    """
    texts, is_plain = [], True
    for part in _parts(result, name):
        kind, text = part.text("type"), _text_of(part)
        is_plain = is_plain and kind in _TEXTS
        if text is None:
            is_tool = refer is not None and kind == "tool_reference"
            text = refer(part.text("tool_name") or "") if refer and is_tool else _note(part)
        texts.append(text)
    return ("" if is_plain else "\n").join(texts)


def failed_text(text: str) -> str:
    """Return what the model reads of a call that failed: templates have no place to say so."""
    return f"The tool failed.\n{text}".strip()


def _parts(holder: Fields, name: str) -> list[Fields]:
    """Return the parts of a content; a text is one part."""
    content = holder.raw(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content})]
    return holder.objects_if_any(name)


def _text_of(part: Fields) -> str | None:
    """Return what the model reads of a part, None if it cannot read it."""
    kind = part.text("type")
    if kind in _TEXTS:
        return part.text("text") or ""
    if kind == "refusal":
        return part.text("refusal") or ""
    if kind == "search_result":
        head = [part.text("title"), part.text("source"), message_text(part)]
        return "\n".join(line for line in head if line)
    if kind == "document":
        return _document(part)
    return None


def _document(part: Fields) -> str | None:
    """Return the text of a document, None for a file."""
    source = part.nested("source")
    kind = source.text("type")
    if kind == "text":
        text = source.text("data")
    elif kind == "content":
        text = returned_text(source, "content")
    else:
        return None
    head = [part.text("title"), part.text("context"), text]
    return "\n".join(line for line in head if line)


def _note(part: Fields) -> str:
    """Return what stands in the place of a part that the model cannot read."""
    kind = part.text("type") or ""
    name = _NAMES.get(kind, f"A part of the type {json.dumps(shortened(kind))}")
    about = [part.raw("title"), part.raw("filename"), *_media_types(part)]
    facts = ", ".join(shortened(fact) for fact in about if isinstance(fact, str) and fact)
    return f"[{name}{f' ({facts})' if facts else ''}, which this model cannot read]"


def _media_types(part: Fields) -> list[object]:
    source = part.raw("source")
    return [source.get("media_type")] if isinstance(source, dict) else []


@dataclass(slots=True)
class _OpenCall:
    call_id: str
    call: ToolCall
    texts: list[str] = field(default_factory=list)
    item: int = 0  # where the client sent the first result


class OpenCalls:
    """Finds the call of each result by its id; calls with equal ids get theirs by order."""

    def __init__(self) -> None:
        self._calls: list[_OpenCall] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def have_results(self) -> bool:
        return any(each.texts for each in self._calls)

    def add(self, call_id: str, call: ToolCall) -> None:
        self._calls.append(_OpenCall(call_id, call))

    def add_result(self, call_id: str, text: str, item: int = 0) -> bool:
        """Add a result; return whether there is a call with this id.

        More results than calls of an id are parts of the last one's.
        """
        known = [each for each in self._calls if each.call_id == call_id]
        if not known:
            return False
        place = next((each for each in known if not each.texts), known[-1])
        if not place.texts:
            place.item = item
        place.texts.append(text)
        return True

    def without_result(self) -> ToolCall | None:
        """Return the first call that has no result."""
        return next((each.call for each in self._calls if not each.texts), None)

    def take_results(self) -> list[tuple[int, ToolResult]]:
        """Return all results in the order of their calls, each with its item, and forget all."""
        results = [
            (each.item, ToolResult(each.call.name, "\n".join(each.texts)))
            for each in self._calls
            if each.texts
        ]
        self._calls.clear()
        return results


_MESSAGES = "messages"


class IncomingChat:
    """The messages so far. Add them in their order, then take `chat`, or `turns`.

    needs_results   whether every call has to have a result
    """

    def __init__(self, needs_results: bool = True) -> None:
        self._needs_results = needs_results
        self._systems: list[str] = []
        self._messages: list[Message] = []
        self._indexes: list[int] = []
        self._num_items = 0
        self._open_calls = OpenCalls()
        self._kept: list[tuple[int, float, str | None]] = []

    def next_item(self) -> None:
        """Begin the next item of the client's list: what is added until the next call is from it.

        What is added before the first item counts as of the first.
        """
        self._num_items += 1

    def instruct(self, text: str, joins_first: bool = False) -> None:
        """Add to the system prompt; an instruction after the first message stands where it came.

        With `joins_first` one directly behind the first message joins the system prompt too.
        """
        is_first = not self._messages or (joins_first and len(self._messages) == 1)
        if not is_first:
            self.ask(text)
        elif text:
            self._systems.append(text)

    def ask(self, text: str) -> None:
        """Add a message of the user."""
        self._end_calls()
        self._add(Message(Role.USER, text))

    def answer(self, text: str, calls: Iterable[tuple[str, ToolCall]] = ()) -> None:
        """Add an answer, with calls by the ids that the client gave them."""
        if self._open_calls.have_results:
            self._end_calls()
        if not self._messages:  # templates want a message of the user before it: an empty one
            self.ask("")
        named = list(calls)
        for call_id, call in named:
            self._open_calls.add(call_id, call)
        self._add(Message(Role.ASSISTANT, text, tuple(call for _, call in named)))

    def add_result(self, item: Fields, id_field: str, text: str) -> None:
        """Add the result of a call; raises FieldFault if the item's id names no call before it."""
        call_id = item.text(id_field)
        if call_id is None or not self._open_calls.add_result(call_id, text, self._index):
            raise item.fault(id_field, "names no call of the answer before it")

    def keep_so_far(self, ttl_s: float, text: str | None = None) -> None:
        """Keep the KV of all that was added for so many seconds.

        text   the beginning of the last message's text to which it reaches; None for its end
        """
        self._kept.append((len(self._messages) + self._open_calls.have_results, ttl_s, text))

    @property
    def system(self) -> str:
        """The system prompt so far, "" without any."""
        return "\n\n".join(self._systems)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that was added, but results of calls that may still get others."""
        return tuple(self._messages)

    def turns(self) -> tuple[Message, ...]:
        """Return the messages as turns: results, and the user's text after them, are one."""
        self._end_calls()
        turns: list[Message] = []
        for message in self._messages:
            last = turns[-1] if turns else message
            if last.results and not last.text and message.role is Role.USER:
                turns[-1] = joined([last, message])
            else:
                turns.append(message)
        return tuple(turns)

    def chat(self, tools: ToolSet | None = None) -> ResentChat:
        """Return the conversation, or raise FieldFault for one that cannot be answered.

        Instructions alone are the user's message: templates want one.
        """
        self._end_calls()
        if not self._messages and self._systems:
            self.ask(self._systems.pop())
        try:
            chat = resent_chat(self.system, self._messages, tools, self._indexes)
            kept = tuple(self._joined(*part) for part in self._kept)
            return replace(chat, kept=kept)
        except UsageError as error:
            raise FieldFault(str(error), _MESSAGES) from error

    def _joined(self, num_messages: int, ttl_s: float, text: str | None) -> KeptPart:
        """Return what to keep, counted in messages whose neighbours of one role are joined."""
        messages = self._messages[:num_messages]
        groups = [list(group) for _, group in groupby(messages, lambda message: message.role)]
        if text is None:
            return KeptPart(len(groups), ttl_s)
        before = groups[-1][:-1]
        cut = joined([*before, replace(groups[-1][-1], text=text)])
        return KeptPart(len(groups), ttl_s, cut.text)

    @property
    def _index(self) -> int:
        return max(0, self._num_items - 1)

    def _add(self, message: Message, index: int | None = None) -> None:
        self._messages.append(message)
        self._indexes.append(self._index if index is None else index)

    def _end_calls(self) -> None:
        """Add the results of the last calls, in the order of the calls."""
        if not self._open_calls:
            return
        call = self._open_calls.without_result()
        if call is not None and self._needs_results:
            sentence = f"The call of {call.name!r} has no result."
            raise FieldFault(sentence, _MESSAGES, "invalid_value")
        for index, result in self._open_calls.take_results():
            self._add(Message(Role.USER, "", results=(result,)), index)


INPUT = "input"  # the only argument of a custom tool


def add_messages(chat: IncomingChat, fields: Fields) -> None:
    """Add the messages of a body; raises FieldFault for a bad one."""
    for message in fields.objects("messages"):
        chat.next_item()
        _add_message(chat, message)


def _add_message(chat: IncomingChat, message: Fields) -> None:
    message.refuse("audio")
    role = message.text("role")
    if role in ("system", "developer"):
        chat.instruct(message_text(message))
    elif role == "user":
        chat.ask(message_text(message))
    elif role == "assistant":
        text = message_text(message) or message.text("refusal") or ""
        calls = [_call(item) for item in message.objects_if_any("tool_calls")]
        if "function_call" in message:  # the form before `tool_calls`: a call has no id
            earlier = _given_call(message.nested("function_call"))
            calls.append((earlier.name, earlier))
        chat.answer(text, calls)
    elif role == "tool":
        chat.add_result(message, "tool_call_id", returned_text(message, "content"))
    elif role == "function":
        chat.add_result(message, "name", returned_text(message, "content"))
    else:
        raise message.fault("role", "must be system, developer, user, assistant or tool")


def _call(item: Fields) -> tuple[str, ToolCall]:
    call_id = item.text("id") or ""
    if item.text("type") == "custom":
        custom = item.nested("custom")
        return call_id, custom_call(required_name(custom), custom.text("input") or "")
    if item.text("type", "function") != "function":
        raise item.fault("type", "must be function or custom")
    return call_id, _given_call(item.nested("function"))


def _given_call(function: Fields) -> ToolCall:
    """Return an earlier call from its name and its arguments, which are JSON text."""
    return ToolCall(required_name(function), read_arguments(function.raw("arguments")))


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def required_name(holder: Fields) -> str:
    """Return the model's name of the tool that an item names."""
    name = holder.text("name")
    if not name:
        raise holder.fault("name", "is missing")
    return model_name(name, holder.text("namespace"))


def custom_call(name: str, text: str) -> ToolCall:
    """Return the model's call of a custom tool."""
    return ToolCall(name, {INPUT: text})
