"""Service: the loaded model and what every interface needs of it."""

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import Request

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.events import AnswerEnded
from kvchat.chat.fields import Fields, shortened
from kvchat.chat.host import ChatHost
from kvchat.chat.prefixes import Asked
from kvchat.core.errors import ContextTooLong
from kvchat.core.types import Pooling
from kvchat.server.answering import Answering
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.metrics import Metrics

T = TypeVar("T")

_ANY = "*"


@dataclass(frozen=True, slots=True)
class Service:
    """The model that is served.

    options     how answers are generated where a request does not say
    names       the names that requests may give the model; the first is its own. In the others `*`
                stands for any text
    responses   what clients may continue by its id; used on the encoder's thread
    files       where the model's files are on this machine, or the name by which it is found
    pooling     how a text's embedding is made where a request does not say
    places      every place that has something of saved conversations, for deleting a response
    """

    host: ChatHost
    answering: Answering
    metrics: Metrics
    options: AskOptions
    names: tuple[str, ...]
    responses: ResponseMemory
    files: str = ""
    pooling: Pooling = Pooling.MEAN
    places: SavedPlaces = field(default_factory=lambda: SavedPlaces(None))

    @property
    def tokenizer_digest(self) -> str:
        """Lets a client that has the same files know that it may send token ids."""
        return self.host.model.tokenizer.digest

    @property
    def name(self) -> str:
        return self.names[0]

    def require_model(self, fields: Fields) -> None:
        """Raise ApiError for a request that names a model which is not served."""
        name = fields.text("model")
        if name is None:
            raise fields.fault("model", "is missing")
        own = (self.files, self.host.model.name)  # clients are also given the path
        if name in own or name in self.names:
            return
        if any(_is_like(name, pattern) for pattern in self.names[1:]):
            return
        served = " and ".join(repr(name) for name in self.names)
        raise ApiError(
            404,
            f"The model {shortened(name)!r} is not served; there is {served}. "
            "kvchat serve --name '*' answers to every name.",
            "model",
            "model_not_found",
        )

    @property
    def listed_names(self) -> list[str]:
        """The names that are whole."""
        return [name for name in self.names if name == self.name or _ANY not in name]

    def require_room(self, fields: Fields, name: str, num_contexts: int = 1) -> None:
        """Raise ApiError for a list of more messages than the context has tokens.

        It looks at none of them. Each takes a token or more, but for empty ones, and no client
        sends thousands of those.
        """
        ready, messages = self.host.ready, fields.raw(name)
        if ready is None or not isinstance(messages, list):
            return
        limit = ready.context_limit
        if len(messages) > num_contexts * limit:
            sentence = (
                f"There are {len(messages):,} messages, and the context holds {limit:,} tokens."
            )
            too_long = ContextTooLong(sentence, "", len(messages), limit)
            raise replace(as_api_error(too_long), param=fields.name_of(name))


def _is_like(name: str, pattern: str) -> bool:
    """Return whether a name is a pattern with a text in place of each `*`."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split(_ANY))), name, re.S) is not None


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the work's result; if the client goes before, cancel it and raise ApiError."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has gone.")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def finish_word(ended: AnswerEnded) -> str:
    """Return OpenAI's word for the end of an answer; one that is no answer yet is cut off."""
    if not ended.is_whole:
        return "length"
    return "tool_calls" if ended.calls else "stop"


def moment(at_s: float) -> str:
    """Return a time in seconds since the epoch as clients read it, such as 2026-01-31T00:00:00Z."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def facts(ended: AnswerEnded, asked: Asked | None = None) -> dict[str, Any]:
    """Return what kvchat tells beyond the interfaces: tokens by tier, and why no more were cached.

    `miss_reason` names a MissReason: why a slower tier did not have more; null if it was not asked.
    `changed` says which earlier message the client changed, so that all after it was computed; null
    if it changed none. `left_out` counts the oldest messages that the full context is without.
    `kept_kv` is there where the answer went on without some KV: of how many tokens it had that.
    `ends_in_thinking` tells an answer that was never begun from one that was
    cut off.
    """
    difference = asked.difference if asked is not None else None
    return {
        "cached_tokens": ended.usage.cached.as_dict(),
        "prefilled_tokens": ended.usage.prefilled_tokens,
        "miss_reason": ended.miss_reason.name.lower() if ended.miss_reason is not None else None,
        "changed": difference.as_dict() if difference is not None else None,
        "left_out": asked.num_left_out if asked is not None else 0,
        "ends_in_thinking": ended.ends_in_thinking,
        **({"kept_kv": asdict(dropped)} if (dropped := ended.usage.dropped) is not None else {}),
        "ttft_s": round(ended.timing.ttft_s, 4),
    }
