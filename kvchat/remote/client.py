"""Client: one streamed request to a server after another, over HTTP.

A request is tried again only if no connection could be made, so that nothing is ever sent twice.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx2

from kvchat.core.errors import GenerationError, KvchatError
from kvchat.remote.address import Address
from kvchat.remote.exchange import (
    ASK_S,
    DATA,
    DONE,
    MOST_ERROR_BYTES,
    MOST_LINE_BYTES,
    SILENCE_S,
    ServerLost,
    json_object,
    refusal,
)
from kvchat.remote.servers import CONNECT_S, reason_of, redirect_words
from kvchat.remote.wire import Sent

_TRIES = 3
_PAUSE_S = 0.2


class Client:
    """Sends requests to one address. Used on one event loop, and closed there."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = httpx2.AsyncClient(
            base_url=address.url,
            headers=address.headers,
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            trust_env=not address.is_here,
            verify=address.has_certificate,
            # A server may close a connection that is kept just when it is used again.
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def stream(self, sent: Sent) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects that the server streams; raises GenerationError, ServerLost where
        the connection cannot be made or breaks.

        Closing the iterator closes the connection, which ends the request at the server.
        """
        request = self._client.build_request("POST", sent.path, json=sent.body)
        response = await self._connected(request)
        try:
            if response.status_code != 200:
                raise await _refusal(response)
            if response.headers.get("content-type", "").startswith("application/json"):
                yield json_object(await _limited(response, MOST_LINE_BYTES))  # it does not stream
                return
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    if line.startswith(DATA):
                        data = line[len(DATA) :].strip()
                        if data == DONE:
                            return
                        yield json_object(data)
        except httpx2.HTTPError as error:
            raise ServerLost(
                f"The server at {self._address.shown} broke off the answer: {reason_of(error)}.",
                "/continue goes on from there once it runs again.",
            ) from error
        finally:
            await response.aclose()

    async def _connected(self, request: httpx2.Request) -> httpx2.Response:
        for number in range(_TRIES):
            try:
                async with asyncio.timeout(SILENCE_S):  # for headers that come byte by byte, too
                    return await self._client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if number + 1 == _TRIES:
                    raise ServerLost(
                        f"No server answers at {self._address.shown}: {reason_of(error)}.",
                        "Start it and /retry, or go on with /model NAME.",
                    ) from error
            except (httpx2.HTTPError, TimeoutError) as error:
                raise ServerLost(
                    f"The server at {self._address.shown} gave no answer: {reason_of(error)}.",
                    "/retry asks again.",
                ) from error
            await asyncio.sleep(_PAUSE_S * (number + 1))
        raise AssertionError("every try returns or raises")

    async def ask(self, sent: Sent) -> Any:
        """Return the JSON that a short request is answered with; None if it is refused."""
        try:
            method = "GET" if sent.body is None else "POST"
            async with (
                asyncio.timeout(ASK_S),
                self._client.stream(method, sent.path, json=sent.body) as response,
            ):
                if response.status_code != 200:
                    return None
                return json.loads(await _limited(response, MOST_LINE_BYTES))
        except (httpx2.HTTPError, TimeoutError, ValueError, RecursionError, GenerationError):
            return None

    async def health(self, within_s: float) -> str | None:
        """Return the state that the server tells in time: a `Health`, if it is kvchat's.

        None if it is silent. "" if it tells something else, refuses or breaks the connection:
        requests that run will say themselves whether it has ended.
        """
        try:
            async with asyncio.timeout(within_s), self._client.stream("GET", "/health") as response:
                told = json_object(await _limited(response, MOST_ERROR_BYTES))
        except (httpx2.TimeoutException, TimeoutError):
            return None
        except (httpx2.HTTPError, GenerationError):
            return ""
        return str(told.get("status", ""))


async def _limited(response: httpx2.Response, most: int) -> bytes:
    """Return the content of a response; raises GenerationError for one above `most` bytes."""
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > most:
            raise GenerationError(f"The server's answer has more than {most >> 20} MB.")
    return bytes(content)


async def _lines(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream, with a limit on the length of one."""
    held = b""
    async for piece in response.aiter_bytes():
        held += piece
        *lines, held = held.split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(held) > MOST_LINE_BYTES:
            raise GenerationError("The server's answer has a line of more than 16 MB.")
    if held:
        yield held


async def _refusal(response: httpx2.Response) -> KvchatError:
    """Return the error of a server that refused a request."""
    if response.is_redirect:
        return GenerationError(*redirect_words(response))
    text = b""
    async for piece in response.aiter_bytes():
        text += piece
        if len(text) > MOST_ERROR_BYTES:
            break
    return refusal(response.status_code, text)
