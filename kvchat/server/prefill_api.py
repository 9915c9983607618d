"""Prefilling for chats on other machines: tokens come in, KV goes to the shared cache.

Prompts come sealed with the team's key, and no answer and no log has anything of them.
"""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.core.errors import ContextTooLong, KvchatError
from kvchat.core.stats import kv_form
from kvchat.server.api_errors import ApiError
from kvchat.server.service import Service, until_gone

# How long a measurement may delay an offer, in seconds.
_MEASURING_S = 1.0


class PrefillApi:
    """The handlers of one service. `opened` returns the token ids of a sealed prompt; None for what
    the team's key did not seal.
    """

    def __init__(self, service: Service, opened: Callable[[bytes], list[int] | None]) -> None:
        self._host = service.host
        self._opened = opened

    async def offer(self, request: Request) -> Response:
        """Say which KV is computed here, and how fast."""
        ready = self._host.ready
        if ready is None:
            raise ApiError(503, "The model still loads.")
        status = await asyncio.wrap_future(self._host.status())
        shared = status.tier("shared")
        if shared is None or not shared.root:
            reason = shared.trouble if shared is not None else "it is being opened."
            raise ApiError(503, f"The shared cache cannot be used: {reason}")
        rate, half_context = await self._rate()
        form = kv_form(ready.dtype, ready.kv_dtype, ready.weights, status.block_size)
        offer = {"root": shared.root, "form": form, "tokens_per_s": rate}
        is_known = half_context != float("inf")
        return JSONResponse({**offer, "half_context": half_context if is_known else None})

    async def _rate(self) -> tuple[float | None, float]:
        """Return the tokens a second of a prompt's beginning, None while they are measured, and the
        context after which they are half as many.
        """
        try:
            async with asyncio.timeout(_MEASURING_S):
                [place] = await asyncio.wrap_future(self._host.locate([[0]]))
        except TimeoutError:
            return None, float("inf")
        return place.rates.computed, place.rates.half_context

    async def prefill(self, request: Request) -> Response:
        """Prefill a prompt, and say how many of its tokens the shared cache has then.

        A client that goes ends that.
        """
        ids = self._opened(await request.body())
        if not ids:
            raise ApiError(400, "The prompt was not sealed with this team's key.")
        return JSONResponse({"num_tokens": await until_gone(request, self._shared(ids))})

    async def _shared(self, ids: list[int]) -> int:
        try:
            await asyncio.wrap_future(self._host.read(ids))
            return await asyncio.wrap_future(self._host.share(ids))
        except ContextTooLong as error:
            raise ApiError(400, "The prompt is longer than the context here.") from error
        except KvchatError as error:
            raise ApiError(500, "The prompt could not be prefilled.") from error
