"""Service: the loaded model and what every interface needs of it."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.core.types import CachedTokens, FinishReason
from kvchat.server.answering import Answering
from kvchat.server.api_errors import ApiError
from kvchat.server.fields import Fields, shortened
from kvchat.server.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """The model that is served.

    options     how answers are generated where a request does not say
    names       the names that requests may give the model; the first is its own
    """

    host: ChatHost
    answering: Answering
    metrics: Metrics
    options: AskOptions
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    def require_model(self, fields: Fields) -> None:
        """Raise ApiError for a request that names a model which is not served."""
        name = fields.text("model")
        if name is None:
            raise fields.fault("model", "is missing")
        if name not in self.names:
            raise ApiError(
                404,
                f"The model {shortened(name)!r} is not served; there is {self.name!r}.",
                "model",
                "model_not_found",
            )


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


def finish_word(reason: FinishReason) -> str:
    """Return OpenAI's word for the end of an answer."""
    return "stop" if reason is FinishReason.STOP else "length"


def facts(answers: list[AnswerEnded]) -> dict[str, Any]:
    """Return what kvchat tells beyond the interfaces: tokens by tier, and why some were computed.

    `miss` is the reason why a slower tier did not have more of the context, None if it was not
    asked or had all.
    """
    usage, timing = answers[0].usage, answers[0].timing
    miss = answers[0].miss_reason
    return {
        "cached_tokens": usage.cached.as_dict(),
        "prefilled_tokens": usage.prefilled_tokens,
        "miss": miss.value if miss is not None else None,
        "ttft_s": round(timing.ttft_s, 4),
    }


def cached_tokens(answers: list[AnswerEnded]) -> CachedTokens:
    """Return the prompt's cached tokens."""
    return answers[0].usage.cached


def num_generated(answers: list[AnswerEnded]) -> int:
    """Return the tokens of all samples."""
    return sum(answer.usage.completion_tokens for answer in answers)
