"""Reads the messages and the tools of Anthropic's interface."""

import json
import re
from functools import partial
from typing import Any

from kvchat.chat.fields import Fields, shortened
from kvchat.chat.incoming import (
    THOUGHTS,
    IncomingChat,
    failed_text,
    message_text,
    required_name,
    returned_text,
)
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.tools import ToolCall, read_arguments
from kvchat.server.api_errors import ApiError
from kvchat.server.offered_tools import OfferedTools, ToolReader
from kvchat.server.tool_fields import anthropic_choice

_FIELD = "cache_control"
_MOST = 4
_TTLS_S = {"5m": 300.0, "1h": 3600.0}


class CacheMarks:
    """The marks of one request. Read the blocks in the order in which the model reads them."""

    def __init__(self, chat: IncomingChat) -> None:
        self._chat = chat
        self._num_marks = 0
        self._least_ttl_s = max(_TTLS_S.values())

    def read_all(self, holder: Fields, name: str) -> None:
        """Read the marks of a list of blocks; a field of another kind has none."""
        if isinstance(holder.raw(name), list):
            for block in holder.objects_if_any(name):
                self.read(block)

    def read_message(self, message: Fields, name: str) -> None:
        """Read the marks of the blocks of a message that was added; each ends with its block.

        One on the result of a tool reaches to where the text of the message begins.
        """
        if not isinstance(message.raw(name), list):
            return
        blocks = message.objects_if_any(name)
        texts = [block.text("text") or "" for block in blocks]
        has_text = any(texts)
        for number, block in enumerate(blocks, start=1):
            if _FIELD not in block:  # a text is joined for few blocks: a message may have thousands
                continue
            is_last = number == len(blocks) or block.text("type") == "tool_use"
            is_end = is_last or not has_text
            self.read(block, None if is_end else "".join(texts[:number]))

    def read(self, block: Fields, text: str | None = None) -> None:
        """Read the mark of a block that was added to the chat, if it has one.

        text   the beginning of the last message to which it reaches; None for its end

        Raises ApiError for a bad mark, for more than four, and for an hour after five minutes.
        """
        if _FIELD not in block:
            return
        mark = block.nested(_FIELD)
        if mark.text("type") != "ephemeral":
            raise mark.fault("type", "must be ephemeral")
        ttl_s = _TTLS_S.get(mark.text("ttl", "5m") or "")
        if ttl_s is None:
            raise mark.fault("ttl", f"must be {' or '.join(_TTLS_S)}")
        if ttl_s > self._least_ttl_s:
            raise mark.fault("ttl", "is longer than that of a block before it")
        self._num_marks += 1
        if self._num_marks > _MOST:
            sentence = f"More than {_MOST} blocks have {_FIELD}."
            raise ApiError(400, sentence, block.name_of(_FIELD), "invalid_value")
        self._least_ttl_s = ttl_s
        self._chat.keep_so_far(ttl_s, text)


# A tool that Anthropic's clients run has a type with a date and no schema, for Anthropic's models
# know it. Here it is a function like any other.

_DATED = re.compile(r"(.+)_\d{8}$")


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_LINE = {"type": "integer", "description": "The line behind which the text is inserted, 0 first."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view; -1 is the end of the file.",
}
_EDITS = {
    "path": _text("The absolute path of the file or directory."),
    "file_text": _text("For create: the content of the new file."),
    "old_str": _text("For str_replace: the text to replace, which the file has once."),
    "new_str": _text("For str_replace: the new text."),
    "insert_line": _LINE,
    "insert_text": _text("For insert: the text to insert."),
    "view_range": _RANGE,
}
# What each tool is, by its type without the date: a description and the schema of its arguments.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open.",
        _schema((), command=_text("The command."), restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _schema(
            ("command", "path"),
            command=_commands("view", "create", "str_replace", "insert"),
            **_EDITS,
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories, which later conversations can read.",
        _schema(
            ("command",),
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            old_path=_text("For rename: the path now."),
            new_path=_text("For rename: the new path."),
        ),
    ),
}


def read_tools(fields: Fields, name: str = "tools") -> ToolReader:
    """Return the reader of a request's tools; those that the server would run are left out."""
    reader = ToolReader("input_schema")
    for tool in fields.objects_if_any(name):
        add_tool(reader, tool)
    return reader


def add_tool(reader: ToolReader, tool: Fields) -> list[str]:
    """Add a tool; return the model's name of it, none if it is left out."""
    kind = tool.text("type") or "custom"
    dated = _DATED.fullmatch(kind)
    known = _KNOWN.get(dated[1] if dated else kind)
    if kind == "custom":
        return [reader.add_function(tool)]
    if known is not None:
        return [reader.add_known(tool, *known)]
    reader.leave_out_tool(kind)
    return []


_CALL, _RESULT = "tool_use", "tool_result"
_ADDITION, _REMOVAL = "tool_addition", "tool_removal"
# Blocks of these types are calls of tools that another server ran, or their results.
_FOREIGN = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
_FOREIGN_END = "_tool_result"


def read_chat(fields: Fields, stabilises: bool) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools.

    stabilises   whether an instruction directly behind the first message stands before it, where
                 there are tools
    """
    chat = IncomingChat()
    marks, tools = CacheMarks(chat), read_tools(fields)
    marks.read_all(fields, "tools")
    chat.instruct(message_text(fields, "system"))
    marks.read_all(fields, "system")
    for message in fields.objects("messages"):
        chat.next_item()
        _add_message(chat, message, tools, stabilises)
        marks.read_message(message, "content")
    marks.read(fields)
    offered = tools.offered(anthropic_choice(fields).offered)
    return chat.chat(offered.tools), offered


def _add_message(chat: IncomingChat, message: Fields, tools: ToolReader, stabilises: bool) -> None:
    role = message.text("role")
    if role == "assistant":
        _add_answer(chat, message, tools)
    elif role == "user":
        results = _blocks(message, _RESULT)
        for block in results:
            text = returned_text(block, "content", tools.refer)
            is_failed = block.flag("is_error")
            chat.add_result(block, "tool_use_id", failed_text(text) if is_failed else text)
        text = message_text(message, besides=(_RESULT,))
        if text or not results:
            chat.ask(text)
    elif role == "system":
        _instruct(chat, message, tools, stabilises)
    else:
        raise message.fault("role", "must be user, assistant or system")


def _instruct(chat: IncomingChat, message: Fields, tools: ToolReader, stabilises: bool) -> None:
    """Add an instruction, and the tools that it adds or takes away."""
    texts = [message_text(message, besides=(_ADDITION, _REMOVAL))]
    is_plain = not _blocks(message, _ADDITION) and not _blocks(message, _REMOVAL)
    for block in _blocks(message, _ADDITION):
        tool = block.nested("tool")
        if "definition" in tool:
            definition = tool.nested("definition")
            texts.append(tools.add_later(partial(add_tool, tools, definition)))
        else:
            texts.append(tools.refer(required_name(tool)))
    for block in _blocks(message, _REMOVAL):
        name = block.nested("tool").text("name") or ""
        texts.append(f"[The tool {json.dumps(shortened(name))} is not offered any more]")
    # Claude Code writes thousands of tokens there, the same in every session: behind the user's
    # words, which are others each time, they would be read each time.
    chat.instruct(
        "\n".join(filter(None, texts)), joins_first=stabilises and bool(tools) and is_plain
    )


def _add_answer(chat: IncomingChat, message: Fields, tools: ToolReader) -> None:
    foreign = {kind for block in _blocks(message) if _is_foreign(kind := block.text("type") or "")}
    for kind in sorted(foreign):
        tools.leave_out(kind)
    text = message_text(message, besides=(_CALL, *THOUGHTS, *foreign))
    chat.answer(text, map(_call, _blocks(message, _CALL)))


def _is_foreign(kind: str) -> bool:
    return kind in _FOREIGN or kind.endswith(_FOREIGN_END)


def _call(block: Fields) -> tuple[str, ToolCall]:
    arguments = read_arguments(block.raw("input"))
    return block.text("id") or "", ToolCall(required_name(block), arguments)


def _blocks(message: Fields, kind: str | None = None) -> list[Fields]:
    """Return the blocks of a message, those of one type or all; a text has none."""
    if isinstance(message.raw("content"), str):
        return []
    blocks = message.objects_if_any("content")
    return [block for block in blocks if kind is None or block.text("type") == kind]
