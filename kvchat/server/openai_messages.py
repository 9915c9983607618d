"""Reads the messages and the tools of a chat completion."""

from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat, add_messages
from kvchat.chat.resent_chat import ResentChat
from kvchat.server.offered_tools import OfferedTools
from kvchat.server.tool_fields import openai_choice, read_tools


def read_chat(fields: Fields) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools."""
    chat = IncomingChat()
    add_messages(chat, fields)
    offered = read_tools(fields, is_nested=True).offered(openai_choice(fields).offered)
    read = chat.chat(offered.tools)
    # vLLM's names for what happens here whenever the last message is the assistant's.
    for name, continues in (("continue_final_message", True), ("add_generation_prompt", False)):
        if fields.raw(name) is continues and not read.is_continuation:
            raise fields.fault(name, "needs a last message of the assistant")
    return read, offered
