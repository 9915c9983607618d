"""EngineQueries: asks the engine what the next message costs, and for status and problems.

The engine has two seconds to answer a query; after that the result is None (unknown).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvchat.chat.host import ChatHost
from kvchat.chat.kept_kv import KeptKv
from kvchat.core.cost import Cost, KvPlaces
from kvchat.core.errors import KvchatError
from kvchat.core.stats import EngineStatus
from kvchat.core.text import one_line

T = TypeVar("T")

_ENGINE_PATIENCE_S = 2.0
_DISK_CACHE_FAILED = "the disk cache failed"
_MAX_TROUBLE_CHARS = 4096


class EngineQueries:
    """Queries the engine of one host, or the store `kept` while the model loads; remembers the
    problems reported.
    """

    def __init__(self, host: ChatHost, kept: KeptKv | None = None) -> None:
        self._host = host
        self._kept = kept
        self._told: set[str] = set()

    def change_host(self, host: ChatHost) -> None:
        """Query another model's engine from now on."""
        self._host = host

    async def locate(self, contexts: list[list[int]]) -> list[KvPlaces] | None:
        """Return where the KV of contexts is; None while that cannot be known.

        The engine answers once the model is loaded. Before, only the disk is looked at, without
        blocking.
        """
        if self._host.ready is not None:
            return await self._answer_of(lambda: self._host.locate(contexts))
        if self._kept is None:
            return None
        name = self._host.model.name
        return await asyncio.to_thread(self._kept.locate, [(name, ids) for ids in contexts])

    async def cost(self, token_ids: list[int]) -> Cost | None:
        """Return what the next message of a context costs; None for an empty context, and while
        that cannot be known.
        """
        places = await self.locate([token_ids]) if token_ids else None
        return places[0].cost() if places else None

    async def cost_at_opening(self) -> Cost | None:
        """Return what the next message of the conversation opened last cost when it was opened."""
        asked = self._host.places_at_opening
        if asked is None:
            return None
        opened = asked
        places = await self._answer_of(lambda: opened)
        return places[0].cost() if places and places[0].num_tokens else None

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
