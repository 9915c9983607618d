"""Conversations as documents: Markdown and JSON messages out, JSON messages in.

Knows the current path of a conversation; branches beside it are in the session file only.
"""

import json
from typing import Any

from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.thinking import split_thinking
from kvchat.core.config import shown
from kvchat.core.errors import UsageError

_NAMES = {Role.USER: "You", Role.ASSISTANT: "Assistant"}


def to_markdown(conversation: Conversation) -> str:
    """Return the path to the tip as Markdown; thinking is left out."""
    parts = [f"# {conversation.label or conversation.session_id}\n"]
    if conversation.system:
        parts.append(f"> {conversation.system}\n")
    for turn in conversation.path():
        text = split_thinking(turn.text)[1] if turn.role is Role.ASSISTANT else turn.text
        cut = "\n\n*(cut off)*" if turn.is_partial else ""
        parts.append(f"**{_NAMES[turn.role]}:** {text}{cut}\n")
    return "\n".join(parts)


def to_messages(conversation: Conversation) -> list[dict[str, str]]:
    """Return the path to the tip as role and content pairs, the system prompt first."""
    messages = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.path():
        messages.append({"role": turn.role.value, "content": turn.text})
    return messages


def to_json(conversation: Conversation) -> str:
    """Return the messages as a JSON document."""
    return json.dumps({"messages": to_messages(conversation)}, ensure_ascii=False, indent=2) + "\n"


def read_messages(text: str) -> tuple[str | None, list[tuple[Role, str]]]:
    """Read a JSON document of messages: the system prompt, and the turns in order.

    Takes a list of messages or an object that has one. Raises UsageError for anything else.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "The file is neither a session nor JSON messages.",
            "Export as json or jsonl to import again.",
        ) from error
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise UsageError("The file has no list of messages.")
    return parse_messages(messages)


def parse_messages(messages: list[Any]) -> tuple[str | None, list[tuple[Role, str]]]:
    """Check role and content pairs; raises UsageError naming the first that cannot be used."""
    system = None
    turns: list[tuple[Role, str]] = []
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, dict) else None
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise UsageError(f"Message {number} has no text.")
        if role == "system" and number == 1:
            system = text
        elif role in (Role.USER.value, Role.ASSISTANT.value):
            turns.append((Role(role), text))
        else:
            raise UsageError(f"Message {number} has the role {shown(role)}.")
        if turns and turns[0][0] is Role.ASSISTANT:  # templates open a context with a question
            raise UsageError(
                f"Message {number} is the assistant's, but the first has to be the user's."
            )
    return system, turns
