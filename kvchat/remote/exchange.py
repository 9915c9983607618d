"""What all clients of a server have in common: its errors, and the JSON that it sends."""

import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from kvchat.core.errors import ContextTooLong, GenerationError, KvchatError
from kvchat.remote.wire import Sent, error_sentence, tells_its_end

# A server that reads a long prompt may say nothing for minutes.
SILENCE_S = 1800.0
# The whole of a short question, however slowly its answer comes; a slot's file may be gigabytes.
ASK_S = 120.0
MOST_LINE_BYTES = 16 << 20
MOST_ERROR_BYTES = 64 << 10
DATA = b"data:"
DONE = b"[DONE]"
# How servers say that a prompt does not fit.
_TOO_LONG = (
    b"context_length_exceeded",
    b"exceed_context_size",
    b"maximum context length",
    b"longer than the model's context",
)


class ServerClient(Protocol):
    """Sends requests to one server. Used on one event loop, and closed there."""

    def stream(self, sent: Sent) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects that the server streams; raises GenerationError, ServerLost where
        the connection cannot be made or breaks.

        Closing the iterator closes the connection, which ends the request at the server.
        """

    async def ask(self, sent: Sent) -> Any:
        """Return the JSON that a short request is answered with; None if it is refused."""

    async def health(self, within_s: float) -> str | None:
        """Return the state that the server tells in time: a `Health`, if it is kvchat's.

        None if it is silent. "" if it tells something else, refuses or breaks the connection:
        requests that run will say themselves whether it has ended.
        """

    async def close(self) -> None:
        """Close its connections."""


class ServerLost(GenerationError):
    """The server cannot be reached, or it broke off an answer."""


def json_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GenerationError("The server's answer is not JSON.") from error
    if not isinstance(found, dict):
        raise GenerationError("The server's answer is no JSON object.")
    return found


def refusal(status: int, text: bytes) -> KvchatError:
    """Return the error of a server that refused a request with this body."""
    if status in (401, 403):
        return GenerationError("The server refuses this key.", "Set KVCHAT_ENDPOINT_KEY.")
    try:
        document = json_object(text)
        if tells_its_end(document):
            return ServerLost("The server has ended.", "/retry asks again.")
        sentence = error_sentence(document)
    except GenerationError:
        sentence = f"The server refused the request with HTTP status {status}."
    is_too_long = any(words in text.lower() for words in _TOO_LONG)
    hint = "/compact makes room, /new begins another conversation."
    return ContextTooLong(sentence, hint) if is_too_long else GenerationError(sentence)
