"""Reads the items and the tools of a response's request.

A compacted conversation is one item: the model's summary, in base64 and not encrypted. The item
stands for the messages that it was made of wherever a client sends it as input.
"""

import base64
import secrets
from collections.abc import Sequence
from typing import Any

from kvchat.chat.compaction import OPENING, REPLY
from kvchat.chat.content import message_text, returned_text
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.resent_chat import ResentChat
from kvchat.server.offered_tools import OfferedTools, ToolReader
from kvchat.server.response_calls import CALLS, earlier_call
from kvchat.server.tool_fields import add_tool, openai_choice, read_tools

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
