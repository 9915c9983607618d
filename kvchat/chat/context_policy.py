"""ContextPolicy: how a chat goes on where the next message does not fit in its context."""

from enum import StrEnum

from kvchat.core.errors import UsageError


class ContextPolicy(StrEnum):
    """stop refuses the message; drop leaves out the oldest messages, compact summarises them."""

    STOP = "stop"
    DROP = "drop"
    COMPACT = "compact"


def parse_policy(text: str) -> ContextPolicy:
    """Return the policy that `text` names; raises UsageError if it names none."""
    try:
        return ContextPolicy(text.strip().lower())
    except ValueError as error:
        raise UsageError(
            f"context-policy is {text[:20]!r}, but must be one of {', '.join(ContextPolicy)}."
        ) from error
