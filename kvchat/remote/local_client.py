"""LocalClient: requests to a `kvchat serve` of this user on this machine.

It speaks as much HTTP as that server does, over a socket of this user or a loopback address, and is
there in a fraction of the time that a whole HTTP library takes to be imported.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from kvchat.core.errors import GenerationError
from kvchat.remote.address import Address
from kvchat.remote.exchange import (
    ASK_S,
    DATA,
    DONE,
    MOST_LINE_BYTES,
    SILENCE_S,
    ServerLost,
    json_object,
    refusal,
)
from kvchat.remote.questions import require_own_socket
from kvchat.remote.wire import Sent

_READ_BYTES = 1 << 16
_CHUNKED = b"transfer-encoding: chunked"
_LENGTH = b"content-length:"
_LOST = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)


class LocalClient:
    """Has of a `Client` what an engine uses; `ServerClient` says what each call does."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def close(self) -> None:
        """Each request has a connection of its own, which it closes."""

    async def stream(self, sent: Sent) -> AsyncGenerator[dict[str, Any], None]:
        response = await self._sent(sent)
        try:
            if response.status != HTTPStatus.OK:
                raise refusal(response.status, await response.rest())
            while line := await response.line():
                if line.startswith(DATA):
                    data = line[len(DATA) :].strip()
                    if data == DONE:
                        return
                    yield json_object(data)
        except (*_LOST, TimeoutError) as error:
            raise ServerLost(
                "The server broke off the answer.", "/continue goes on from there."
            ) from error
        finally:
            response.close()

    async def ask(self, sent: Sent) -> Any:
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._sent(sent)
                try:
                    is_good = response.status == HTTPStatus.OK
                    return json.loads(await response.rest()) if is_good else None
                finally:
                    response.close()
        except (*_LOST, TimeoutError, RecursionError, GenerationError):
            return None

    async def health(self, within_s: float) -> str | None:
        try:
            async with asyncio.timeout(within_s):
                response = await self._sent(Sent("/health"))
                try:
                    return str(json_object(await response.rest()).get("status", ""))
                finally:
                    response.close()
        except TimeoutError:
            return None
        except (*_LOST, GenerationError):
            return ""

    async def _sent(self, sent: Sent) -> "_Response":
        """Send a request, and return its response once the headers are there."""
        body = b"" if sent.body is None else json.dumps(sent.body).encode()
        headers = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._address.headers,
        }
        method = "GET" if sent.body is None else "POST"
        lines = [f"{method} {sent.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        try:
            reader, writer = await self._connected()
        except OSError as error:
            raise ServerLost(
                "The server of this machine has ended.", "/retry asks again."
            ) from error
        response = _Response(reader, writer)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            async with asyncio.timeout(SILENCE_S):
                await response.read_head()
        except BaseException as error:
            response.close()
            if isinstance(error, (*_LOST, TimeoutError)):
                sentence = "The server of this machine gave no answer."
                raise ServerLost(sentence, "/retry asks again.") from error
            raise
        return response

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if path := self._address.socket:
            require_own_socket(path)
            return await asyncio.open_unix_connection(path, limit=MOST_LINE_BYTES)
        place = urlsplit(self._address.url)
        return await asyncio.open_connection(place.hostname, place.port, limit=MOST_LINE_BYTES)


class _Response:
    """One response: its status, then its body, line by line or whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._is_chunked = False
        self._left: int | None = None  # bytes of a body that is not in chunks, where it says
        self._held = b""
        self.status = 0

    async def read_head(self) -> None:
        """Read status and headers; raises ValueError for what is no HTTP."""
        self.status = int((await self._reader.readuntil(b"\r\n")).split()[1])
        while (line := await self._reader.readuntil(b"\r\n")) != b"\r\n":
            name = line.strip().lower()
            self._is_chunked = self._is_chunked or name == _CHUNKED
            if name.startswith(_LENGTH):
                self._left = int(name[len(_LENGTH) :])
        if self.status == HTTPStatus.PROCESSING:  # the server works on it
            await self.read_head()

    async def _piece(self) -> bytes:
        """Return the next bytes of the body, none at its end."""
        async with asyncio.timeout(SILENCE_S):
            if self._is_chunked:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                if size > MOST_LINE_BYTES:
                    raise ValueError("a chunk is too long")
                return (await self._reader.readexactly(size + 2))[:-2]
            most = _READ_BYTES if self._left is None else min(self._left, _READ_BYTES)
            data = await self._reader.read(most)
            if self._left is not None:
                if self._left and not data:
                    raise EOFError("the body broke off")
                self._left -= len(data)
            return data

    async def line(self) -> bytes:
        """Return the next line of the body with its end, b"" at the end of the body."""
        while b"\n" not in self._held:
            if not (piece := await self._piece()):
                line, self._held = self._held, b""
                return line
            self._held += piece
            if len(self._held) > MOST_LINE_BYTES:
                raise GenerationError("The server's answer has a line of more than 16 MB.")
        line, _, self._held = self._held.partition(b"\n")
        return line + b"\n"

    async def rest(self) -> bytes:
        """Return the whole body."""
        body = self._held
        while piece := await self._piece():
            body += piece
            if len(body) > MOST_LINE_BYTES:
                raise GenerationError("The server's answer has more than 16 MB.")
        return body

    def close(self) -> None:
        with suppress(OSError, RuntimeError):  # a loop that is closed closes it
            self._writer.close()
