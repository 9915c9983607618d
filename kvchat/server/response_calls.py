"""Calls as items of the Responses interface: of functions, of custom tools, of a tool search."""

import secrets
from collections.abc import Mapping
from typing import Any

from kvchat.chat.chat_messages import custom_call, required_name
from kvchat.chat.fields import Fields
from kvchat.chat.tools import ToolCall, read_arguments
from kvchat.server.offered_tools import SEARCH, OfferedTools, ToolKind, custom_input

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
