"""The list of all slash commands."""

from kvchat.terminal import (
    commands_conversation,
    commands_engine,
    commands_help,
    commands_input,
    commands_kv,
    commands_tools,
    commands_turns,
)
from kvchat.terminal.commands import Registry


def build_registry() -> Registry:
    """Return all slash commands."""
    return Registry(
        (
            *commands_help.COMMANDS,
            *commands_conversation.COMMANDS,
            *commands_turns.COMMANDS,
            *commands_input.COMMANDS,
            *commands_engine.COMMANDS,
            *commands_kv.COMMANDS,
            *commands_tools.COMMANDS,
        )
    )
