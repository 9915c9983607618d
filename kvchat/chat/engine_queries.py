"""EngineQueries: asks the engine for cached tokens, the cost of an action, status and problems.

The engine has two seconds to answer a query; after that the result is None (unknown).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.core.errors import KvchatError
from kvchat.core.stats import EngineStatus
from kvchat.core.text import one_line
from kvchat.core.types import rate


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an action: the context tokens that it would have to prefill.

    `tokens_per_s` is the last measured prefill rate, None before the first measurement.
    """

    num_tokens: int
    num_cached: int
    tokens_per_s: float | None = None

    @property
    def num_read(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def seconds(self) -> float | None:
        return self.num_read / self.tokens_per_s if self.tokens_per_s else None

    @property
    def is_low(self) -> bool:
        """Too low to report: under 0.5 s, or under 256 tokens if no rate is known."""
        return self.num_read < 256 if self.seconds is None else self.seconds < 0.5

    @property
    def is_high(self) -> bool:
        """High enough to ask first: above 10 s, or above 8192 tokens if no rate is known."""
        return self.num_read > 8192 if self.seconds is None else self.seconds > 10.0


T = TypeVar("T")

# A shorter prefill does not predict the rate of a long one.
_MIN_MEASURED_TOKENS = 64
_NOT_WORTH_MENTIONING_TOKENS = 64
_ENGINE_PATIENCE_S = 2.0
_DISK_CACHE_FAILED = "the disk cache failed"
_MAX_TROUBLE_CHARS = 4096


class EngineQueries:
    """Queries the engine of one host; remembers the prefill rate and the problems reported."""

    def __init__(self, host: ChatHost) -> None:
        self._host = host
        self._prefill_rate: float | None = None
        self._told: set[str] = set()

    def change_host(self, host: ChatHost) -> None:
        """Query another model's engine from now on."""
        self._host = host
        self._prefill_rate = None

    def note_ended(self, ended: AnswerEnded) -> None:
        """Record the prefill rate of an answer, if it prefilled enough tokens to measure."""
        if ended.usage.prefilled_tokens >= _MIN_MEASURED_TOKENS and ended.timing.prefill_s > 0:
            self._prefill_rate = rate(ended.usage.prefilled_tokens, ended.timing.prefill_s)

    async def cost(self, token_ids: list[int]) -> Cost | None:
        """Return the cost of continuing from a context; None while the engine does not answer."""
        cached = await self._cached(token_ids)
        return None if cached is None else Cost(len(token_ids), cached, self._prefill_rate)

    async def warmth(self, token_ids: list[int]) -> float | None:
        """Return the cached share of a context, 0 to 1; None while the engine does not answer."""
        cached = await self._cached(token_ids)
        if cached is None:
            return None
        # The last partial block is never cached, so a few missing tokens count as none.
        missing = len(token_ids) - cached
        return 1.0 if missing < _NOT_WORTH_MENTIONING_TOKENS else cached / len(token_ids)

    async def status(self) -> EngineStatus | None:
        """Return the engine's status; None while it loads or does not answer in time."""
        return await self._answer_of(self._host.status)

    async def new_trouble(self) -> str:
        """Return a sentence on a new problem outside the answers, or ""; each problem only once."""
        status = await self.status()
        if status is None:
            return ""
        told = {}
        if status.disk is not None and status.disk.trouble:
            told[status.disk.trouble] = trouble_notice(status.disk.trouble)
        for failed in status.speculation.failed if status.speculation is not None else ():
            told[failed] = f"guessing ahead by {one_line(failed)}; answers come without it."
        for trouble, notice in told.items():
            if trouble not in self._told:
                self._told.add(trouble)
                return notice
        return ""

    async def _cached(self, token_ids: list[int]) -> int | None:
        if not token_ids:
            return None
        return await self._answer_of(lambda: self._host.cached_tokens(token_ids))

    async def _answer_of(self, ask: "Callable[[], Future[T]]") -> T | None:
        if self._host.ready is None:
            return None
        try:
            async with asyncio.timeout(_ENGINE_PATIENCE_S):
                return await asyncio.wrap_future(ask())
        except (TimeoutError, KvchatError):
            return None


def trouble_notice(trouble: str) -> str:
    """Return the notice for the user about a problem of the chat's KV store."""
    told = one_line(trouble, _MAX_TROUBLE_CHARS).rstrip(".")
    if told.startswith(_DISK_CACHE_FAILED):
        return f"{told}; the chat goes on without it."
    return f"the disk cache: {told}; the chat goes on."
