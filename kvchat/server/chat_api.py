"""What a kvchat chat asks its own server beyond answers: where KV is, to pin, to forget, to fetch,
its status, to draft, and to drop KV of pins.

A chat in a terminal that uses the server's engine sends contexts as token ids.
"""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from itertools import pairwise
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.fields import Fields
from kvchat.core.errors import UsageError
from kvchat.core.stats import KvPlaces
from kvchat.core.types import KeptPositions
from kvchat.server.bodies import read_request
from kvchat.server.service import Service

T = TypeVar("T")

_MOST_CONTEXTS = 4096
_MOST_LABEL_CHARS = 1024


class ChatApi:
    """The handlers of one service. Every body is a JSON object, and so is every answer."""

    def __init__(self, service: Service) -> None:
        self._host = service.host

    async def locate(self, request: Request) -> Response:
        """Say where the KV of `contexts` is."""
        fields = await read_request(request)
        places = await asyncio.wrap_future(self._host.locate(await fields.read(_contexts)))
        return JSONResponse({"places": [_place(place) for place in places]})

    async def pin(self, request: Request) -> Response:
        """Pin the context `token_ids` under `label` for `ttl_s`; say how many tokens are kept."""
        fields = await read_request(request)
        label = (fields.text("label") or "")[:_MOST_LABEL_CHARS]
        ttl_s = fields.number("ttl_s")
        ids = await fields.read(_token_ids)
        pinned = self._host.pin(ids, label, ttl_s if ttl_s is not None else math.inf)
        num_tokens = await asyncio.wrap_future(pinned)
        return JSONResponse({"num_tokens": num_tokens})

    async def forget(self, request: Request) -> Response:
        """Drop the KV of `contexts` from memory, but for as many first tokens as `kept` says."""
        fields = await read_request(request)
        contexts, kept = await fields.read(_contexts), fields.raw("kept")
        is_good = isinstance(kept, list) and len(kept) == len(contexts)
        if not is_good or not all(type(n) is int and n >= 0 for n in kept):
            raise fields.fault("kept", "must have a whole number for each context")
        await asyncio.wrap_future(self._host.forget(list(zip(contexts, kept, strict=True))))
        return JSONResponse({})

    async def prefetch(self, request: Request) -> Response:
        """Begin to bring the KV of `token_ids` to the device."""
        fields = await read_request(request)
        self._host.prefetch(await fields.read(_token_ids))
        return JSONResponse({})

    async def read_ahead(self, request: Request) -> Response:
        """Prefill `token_ids` while nothing else runs; without them end that."""
        fields = await read_request(request)
        ids = await fields.read(_token_ids)
        self._host.read_ahead(ids) if ids else self._host.end_read_ahead()
        return JSONResponse({})

    async def status(self, request: Request) -> Response:
        """Tell the engine's figures, as `core.stats.status_of` reads them."""
        return await _answer(self._host.status(), lambda status: asdict(status))

    async def speculate(self, request: Request) -> Response:
        """Switch drafts to the `mode`."""
        fields = await read_request(request)
        mode = fields.text("mode")
        if mode is None:
            raise fields.fault("mode", "is missing")
        return await _answer(self._host.speculate(mode), lambda _: {})

    async def repeat_scores(self, request: Request) -> Response:
        """Tell how much the text `part` attends to each token of the context `token_ids`."""
        fields = await read_request(request)
        ids = await fields.read(_token_ids)
        part = _ids(fields, fields.raw("part"), "part")
        vocab_size, limit = self._host.model.vocab_size, self._host.context_limit
        for name, some in (("token_ids", ids), ("part", part)):
            if not 0 < len(some) <= limit:
                raise fields.fault(name, f"must have 1 to {limit} token ids")
            if vocab_size is not None and max(some) >= vocab_size:
                raise fields.fault(name, "must be token ids of the model")
        return await _answer(self._host.repeat_scores(ids, part), lambda scores: {"scores": scores})

    async def thin_beginnings(self, request: Request) -> Response:
        """Let contexts that begin as `kept` says go on over the KV of these positions alone."""
        fields = await read_request(request)
        self._host.thin_beginnings(await fields.read(_kept_positions))
        return JSONResponse({})


async def _answer(asked: "Future[T]", form: Callable[[T], dict[str, Any]]) -> Response:
    """Answer with the `form` of a result; with the sentence and the hint of a UsageError."""
    try:
        return JSONResponse(form(await asyncio.wrap_future(asked)))
    except UsageError as error:
        return JSONResponse({"failed": error.message, "hint": error.hint})


def _kept_positions(fields: Fields) -> list[KeptPositions]:
    return [_positions_of(beginning) for beginning in fields.objects_if_any("kept")]


def _positions_of(fields: Fields) -> KeptPositions:
    """Read the positions of one beginning: the engine relies on their order and bounds."""
    num_tokens = fields.whole("num_tokens", 1) or 0
    positions = _ids(fields, fields.raw("positions"), "positions")
    is_ascending = all(one < other for one, other in pairwise(positions))
    if not positions or not is_ascending or positions[-1] >= num_tokens:
        raise fields.fault("positions", "must ascend and be below num_tokens")
    digest, method = fields.text("digest") or "", fields.text("method") or ""
    return KeptPositions(digest, num_tokens, tuple(positions), method)


def _contexts(fields: Fields) -> list[list[int]]:
    contexts = fields.raw("contexts")
    if not isinstance(contexts, list) or len(contexts) > _MOST_CONTEXTS:
        raise fields.fault("contexts", f"must be a list of at most {_MOST_CONTEXTS} lists of ids")
    return [_ids(fields, context, "contexts") for context in contexts]


def _token_ids(fields: Fields) -> list[int]:
    return _ids(fields, fields.raw("token_ids"), "token_ids")


def _ids(fields: Fields, value: Any, name: str) -> list[int]:
    is_good = isinstance(value, list) and all(type(token) is int for token in value)
    if not is_good or not all(0 <= token < 1 << 31 for token in value):
        raise fields.fault(name, "must be token ids")
    return list(value)


def _place(place: KvPlaces) -> dict[str, object]:
    """Return places as JSON: tokens by tier, and tokens a second; null for what takes no time."""
    rates = place.rates
    return {
        "num_tokens": place.num_tokens,
        "block_size": place.block_size,
        "cached": place.cached.as_dict(),
        "computed": rates.computed,
        "from_disk": _finite(rates.from_disk),
        "from_host": _finite(rates.from_host),
        "half_context": _finite(rates.half_context),
    }


def _finite(rate: float) -> float | None:
    return rate if rate != float("inf") else None
