"""The forms in which OpenAI's interfaces tell logprobs."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from kvchat.chat.events import AnswerEnded, ShownToken, shown_token
from kvchat.chat.text_codec import TextCodec
from kvchat.core.types import TokenLogprobs

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


def echoed(
    first_id: int, scored: Sequence[TokenLogprobs], tokens: TextCodec, starts_before: bool
) -> dict[str, Any]:
    """Return the columns of a plain completion that repeats its prompt: an entry for every id.

    Nothing stands before the first token of the prompt, so it has no logprob.

    first_id        the first token of the prompt; `scored` are those after it
    starts_before   the first token is none of the text, as BOS that the tokenizer puts before it
    """
    first = ShownToken(tokens.token_bytes(first_id), 0.0)
    shown = [shown_token(each, tokens.token_bytes) for each in scored]
    start = -len(first.content.decode(errors="replace")) if starts_before else 0
    columns = legacy((first, *shown), start)
    columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
    columns["text_offset"][0] = 0
    return columns


def of_prompt(ended: AnswerEnded, tokens: TextCodec) -> list[dict[str, Any] | None]:
    """Return vLLM's list for a prompt: for each token None, or what is told at its place, by ids.

    The rank of a token that is not among the likeliest is not known.
    """
    found: list[dict[str, Any] | None] = [None]
    for each in ended.scored[: len(ended.scored_context) - 1]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(each.top, start=1)}
        found.append(
            {
                str(token_id): {
                    "logprob": max(logprob, _LEAST),
                    "rank": ranks.get(token_id),
                    "decoded_token": _spelled(tokens.token_bytes(token_id), "bytes:"),
                }
                for token_id, logprob in ((each.token_id, each.logprob), *each.top)
            }
        )
    return found


def _likeliest(token: ShownToken) -> dict[str, float]:
    """Return texts and logprobs; of tokens with one text, the likeliest."""
    found: dict[str, float] = {}
    for content, logprob in token.top:
        found.setdefault(_spelled(content, "bytes:"), max(logprob, _LEAST))
    return found


def _entry(content: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _spelled(content), "logprob": max(logprob, _LEAST), "bytes": list(content)}


def _spelled(content: bytes, mark: str = "") -> str:
    """Return bytes as text; a part of a character as escapes after `mark`, as OpenAI does."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return mark + "".join(
            chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in content
        )
