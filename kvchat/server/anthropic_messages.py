"""Reads the messages and the tools of Anthropic's interface."""

import json
from functools import partial

from kvchat.chat.chat_messages import required_name
from kvchat.chat.content import THOUGHTS, failed_text, message_text, returned_text
from kvchat.chat.fields import Fields, shortened
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.tools import ToolCall, read_arguments
from kvchat.server.anthropic_tools import add_tool, read_tools
from kvchat.server.cache_control import CacheMarks
from kvchat.server.offered_tools import OfferedTools, ToolReader
from kvchat.server.tool_fields import anthropic_choice

_CALL, _RESULT = "tool_use", "tool_result"
_ADDITION, _REMOVAL = "tool_addition", "tool_removal"
# Blocks of these types are calls of tools that another server ran, or their results.
_FOREIGN = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
_FOREIGN_END = "_tool_result"


def read_chat(fields: Fields) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools."""
    chat = IncomingChat()
    marks, tools = CacheMarks(chat), read_tools(fields)
    marks.read_all(fields, "tools")
    chat.instruct(message_text(fields, "system"))
    marks.read_all(fields, "system")
    for message in fields.objects("messages"):
        chat.next_item()
        _add_message(chat, message, tools)
        marks.read_message(message, "content")
    marks.read(fields)
    offered = tools.offered(anthropic_choice(fields).offered)
    return chat.chat(offered.tools), offered


def _add_message(chat: IncomingChat, message: Fields, tools: ToolReader) -> None:
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
        _instruct(chat, message, tools)
    else:
        raise message.fault("role", "must be user, assistant or system")


def _instruct(chat: IncomingChat, message: Fields, tools: ToolReader) -> None:
    """Add an instruction, and the tools that it adds or takes away."""
    texts = [message_text(message, besides=(_ADDITION, _REMOVAL))]
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
    chat.instruct("\n".join(filter(None, texts)))


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
