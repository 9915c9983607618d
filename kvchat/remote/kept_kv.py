"""ServerKv: what an engine asks a kvchat server about KV, beyond answers. Other servers have none.

Every call waits for its answer, a few milliseconds; running answers go on meanwhile.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvchat.core.cost import KvPlaces, ReadRates
from kvchat.core.errors import GenerationError
from kvchat.core.types import CachedTokens
from kvchat.remote.client import Client
from kvchat.remote.wire import Sent

_NO_TIME = math.inf


class ServerKv:
    """Asks over the client of one server, and waits `patience_s` seconds for each answer.

    Used on the client's event loop. All raise GenerationError if no answer comes, or a strange one.
    """

    def __init__(self, client: Client, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s

    async def locate(self, contexts: Sequence[Sequence[int]]) -> list[KvPlaces]:
        found = await self._ask("locate", {"contexts": [list(ids) for ids in contexts]})
        try:
            places = [_place(place) for place in found["places"]]
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationError("The server's answer has an unknown form.") from error
        if len(places) != len(contexts):
            raise GenerationError("The server's answer has an unknown form.")
        return places

    async def pin(self, token_ids: Sequence[int], label: str, ttl_s: float) -> int:
        """Pin a context for a time, or for ever if that is infinite."""
        body: dict[str, Any] = {"token_ids": list(token_ids), "label": label}
        found = await self._ask("pin", body | ({"ttl_s": ttl_s} if ttl_s < math.inf else {}))
        return int(found.get("num_tokens", 0))

    async def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        ids, kept = [list(context) for context, _ in contexts], [kept for _, kept in contexts]
        await self._ask("forget", {"contexts": ids, "kept": kept})

    async def prefetch(self, token_ids: Sequence[int]) -> None:
        await self._ask("prefetch", {"token_ids": list(token_ids)})

    async def read_ahead(self, token_ids: Sequence[int]) -> None:
        """Let the server prefill a context while it has nothing else to do; none ends that."""
        await self._ask("read_ahead", {"token_ids": list(token_ids)})

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                found = await self._client.ask(Sent(f"/kvchat/{name}", body))
        if not isinstance(found, dict):
            raise GenerationError("The server does not tell this.")
        return found


def _place(told: dict[str, Any]) -> KvPlaces:
    cached = told["cached"]
    rates = ReadRates(
        told["computed"],
        told["from_disk"] or _NO_TIME,
        told["from_host"] or _NO_TIME,
        told.get("half_context") or _NO_TIME,
    )
    tokens = CachedTokens.of({name: int(n) for name, n in cached.items() if name != "total"})
    return KvPlaces(int(told["num_tokens"]), tokens, rates, int(told["block_size"]))
