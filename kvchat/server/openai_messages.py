"""Reads the messages and the tools of a chat completion."""

from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.tools import ToolCall, read_arguments
from kvchat.server.content import message_text, returned_text
from kvchat.server.conversations import RequestChat
from kvchat.server.fields import Fields
from kvchat.server.offered_tools import OfferedTools, custom_call, required_name
from kvchat.server.tool_fields import openai_choice, read_tools


def read_chat(fields: Fields) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools."""
    chat = RequestChat()
    for message in fields.objects("messages"):
        chat.next_item()
        _add_message(chat, message)
    offered = read_tools(fields, is_nested=True).offered(openai_choice(fields).offered)
    read = chat.chat(offered.tools)
    # vLLM's names for what happens here whenever the last message is the assistant's.
    for name, continues in (("continue_final_message", True), ("add_generation_prompt", False)):
        if fields.raw(name) is continues and not read.is_continuation:
            raise fields.fault(name, "needs a last message of the assistant")
    return read, offered


def _add_message(chat: RequestChat, message: Fields) -> None:
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
            earlier = given_call(message.nested("function_call"))
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
    return call_id, given_call(item.nested("function"))


def given_call(function: Fields) -> ToolCall:
    """Return an earlier call from its name and its arguments, which are JSON text."""
    return ToolCall(required_name(function), read_arguments(function.raw("arguments")))
