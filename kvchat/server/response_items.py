"""Reads the items and the tools of a response's request.

A compacted conversation is one item: the model's summary, in base64 and not encrypted. The item
stands for the messages that it was made of wherever a client sends it as input.
"""

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvchat.chat.compaction import OPENING, REPLY
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import (
    IncomingChat,
    custom_call,
    message_text,
    required_name,
    returned_text,
)
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.tools import ToolCall, read_arguments
from kvchat.server.offered_tools import SEARCH, OfferedTools, ToolKind, ToolReader, custom_input
from kvchat.server.tool_fields import add_tool, openai_choice, read_tools

Told = tuple[str, dict[str, Any]]

_CUSTOM, _FUNCTION, _SEARCH = "custom_tool_call", "function_call", "tool_search_call"
_SHELL = "local_shell_call"
# The types of items that are calls, each with the type of the item that has the call's result.
CALLS = {kind: f"{kind}_output" for kind in (_FUNCTION, _CUSTOM, _SHELL)} | {
    _SEARCH: "tool_search_output"
}


def call_item(call: ToolCall, offered: OfferedTools, token: str) -> dict[str, Any]:
    """Return the item of a call, in the form of its tool; `token` makes its id."""
    tool = offered.client_tool(call.name)
    place = {"status": "completed", "call_id": f"call_{secrets.token_hex(12)}"}
    if tool.kind is ToolKind.SEARCH:
        made = {"execution": "client", "arguments": dict(call.arguments)}
        return {"id": f"tsc_{token}", "type": _SEARCH, **place, **made}
    named = {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
    if tool.kind is ToolKind.CUSTOM:
        item = {"id": f"ctc_{token}", "type": _CUSTOM, **place, **named}
        return {**item, "input": custom_input(call)}
    item = {"id": f"fc_{token}", "type": _FUNCTION, **place, **named}
    return {**item, "arguments": call.arguments_text}


def streamed_call(item: Mapping[str, Any]) -> tuple[dict[str, Any], list[Told]]:
    """Return the item as its stream begins, and the events up to its end."""
    begun = {**item, "status": "in_progress"}
    if item["type"] == _SEARCH:
        return begun, []
    if item["type"] == _CUSTOM:
        kind, name = "response.custom_tool_call_input", "input"
        ending = {}
    else:
        kind, name = "response.function_call_arguments", "arguments"
        ending = {"name": item["name"]}
    text = item[name]
    events = [(f"{kind}.delta", {"delta": text}), (f"{kind}.done", {**ending, name: text})]
    return {**begun, name: ""}, events


def earlier_call(item: Fields) -> ToolCall:
    """Return the call of an item of one of the types `CALLS`."""
    kind = item.text("type")
    if kind == _CUSTOM:
        return custom_call(required_name(item), item.text("input") or "")
    if kind == _SEARCH:
        return ToolCall(SEARCH, read_arguments(item.raw("arguments")))
    if kind == _SHELL:
        return ToolCall("local_shell", read_arguments(item.raw("action")))
    return ToolCall(required_name(item), read_arguments(item.raw("arguments")))


_COMPACTED = b"kvchat summary\n"  # begins what a compaction item holds
_FOUND = CALLS["tool_search_call"]
_REASONING = "reasoning"  # its ids are known with the answer's


def read_chat(fields: Fields, earlier: Sequence[Fields]) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools; the first items are `earlier`."""
    chat, offered = read_items(fields, earlier)
    return chat.chat(offered.tools), offered


def read_items(fields: Fields, earlier: Sequence[Fields]) -> tuple[IncomingChat, OfferedTools]:
    """Return the messages of a request, to which more may be added, and its tools."""
    chat, tools = IncomingChat(), read_tools(fields)
    chat.instruct(fields.text("instructions") or "")
    given = fields.raw("input")
    for item in earlier:
        _add_item(chat, item, tools)
    if isinstance(given, str):
        chat.next_item()
        chat.ask(given)
    else:
        for item in fields.objects("input"):
            _add_item(chat, item, tools)
    return chat, tools.offered(openai_choice(fields).offered)


def _add_item(chat: IncomingChat, item: Fields, tools: ToolReader) -> None:
    chat.next_item()
    kind = item.text("type", "message") or ""
    if kind == "message":
        _add_message(chat, item)
    elif kind in CALLS:
        chat.answer("", [(item.text("call_id") or item.text("id") or "", earlier_call(item))])
    elif kind == _FOUND:
        chat.add_result(item, "call_id", _added_tools(item, tools))
    elif kind in CALLS.values():
        id_field = "call_id" if "call_id" in item else "id"
        chat.add_result(item, id_field, returned_text(item, "output"))
    elif kind == "additional_tools":
        chat.instruct(_added_tools(item, tools))
    elif kind == "compaction":
        chat.ask(OPENING + _summary(item))
        chat.answer(REPLY)
    elif not kind:
        raise item.fault("type", "is missing")
    elif kind != _REASONING:
        # Of a tool that another server ran. Its answer, which follows, says what came of it.
        tools.leave_out(kind)


def _added_tools(item: Fields, tools: ToolReader) -> str:
    def add() -> list[str]:
        return [name for tool in item.objects_if_any("tools") for name in add_tool(tools, tool)]

    return tools.add_later(add)


def compacted(summary: str) -> dict[str, Any]:
    """Return the item that stands for a conversation."""
    held = base64.b64encode(_COMPACTED + summary.encode()).decode()
    return {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": held}


def _summary(item: Fields) -> str:
    """Return the summary in a compaction item; raises ApiError for one of another server."""
    try:
        held = base64.b64decode(item.text("encrypted_content") or "", validate=True)
        if held.startswith(_COMPACTED):
            return held.removeprefix(_COMPACTED).decode()
    except ValueError:  # no base64, or no UTF-8
        pass
    raise item.fault("encrypted_content", "is not what kvchat's /v1/responses/compact gave")


def _add_message(chat: IncomingChat, item: Fields) -> None:
    role, text = item.text("role"), message_text(item)
    if role in ("system", "developer"):
        chat.instruct(text)
    elif role == "user":
        chat.ask(text)
    elif role == "assistant":
        chat.answer(text)
    else:
        raise item.fault("role", "must be system, developer, user or assistant")
