"""Reads the messages of a chat completion: of a request, of a line of a batch, of a document."""

from kvchat.chat.content import message_text, returned_text
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.tools import ToolCall, read_arguments

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
