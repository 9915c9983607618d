"""The forms in which OpenAI's interfaces tell logprobs."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from kvchat.chat.shown_logprobs import ShownToken

# What stands for a logarithm of 0, which JSON does not have.
_LEAST = -9999.0


def listed(tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """Return the list of chat completions and responses."""
    return [
        {
            **_entry(token.content, token.logprob),
            "top_logprobs": [_entry(content, logprob) for content, logprob in token.top],
        }
        for token in tokens
    ]


def legacy(tokens: Sequence[ShownToken], start: int) -> dict[str, Any]:
    """Return the columns of plain completions; the first token stands at `start` of the text."""
    decoder = getincrementaldecoder("utf-8")("replace")
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(decoder.decode(token.content))
    return {
        "tokens": [_spelled(token.content, "bytes:") for token in tokens],
        "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: ShownToken) -> dict[str, float]:
    """Return texts and logprobs; of tokens with one text, the likeliest."""
    found: dict[str, float] = {}
    for content, logprob in token.top:
        found.setdefault(_spelled(content, "bytes:"), max(logprob, _LEAST))
    return found


def _entry(content: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": _spelled(content),
        "logprob": max(logprob, _LEAST),
        "bytes": list(content),
    }


def _spelled(content: bytes, mark: str = "") -> str:
    """Return bytes as text; a part of a character as escapes after `mark`, as OpenAI does."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return mark + "".join(
            chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in content
        )
