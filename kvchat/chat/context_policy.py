"""ContextPolicy: how a chat goes on where the next message does not fit in its context."""

from enum import StrEnum


class ContextPolicy(StrEnum):
    """stop refuses the message; drop leaves out the oldest messages, compact summarises them."""

    STOP = "stop"
    DROP = "drop"
    COMPACT = "compact"
