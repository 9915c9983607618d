"""Guard: refuses requests without the key, from other web sites, too large or too slow.

A page in a browser may send requests to this machine; its Origin gives it away. No answer carries a
header that would let a page of another site read it.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from starlette.requests import HTTPConnection

from kvchat.server.api_errors import ApiError, response_to
from kvchat.server.bodies import plain_body, too_large

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Health is asked by supervisors that hold no key; the page at the bare address asks for one itself.
_OPEN_PATHS = ("/", "/health")
# What decides whether a request is let in.
_CHECKED = frozenset({b"host", b"origin", b"authorization", b"x-api-key"})
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]*)?")
_ORIGIN = re.compile(rb"[A-Za-z][0-9A-Za-z+.-]*://" + _HOST.pattern)
# A body of more than so many times the limit is not even read.
_MOST_DISCARDED = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may cost before it is understood.

    body_bytes   most bytes of a body, as it comes and as it was before it was compressed
    body_s       most seconds from the request's headers to the end of its body
    """

    body_bytes: int = 32 << 20
    body_s: float = 30.0


class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: App, api_key: str | None, limits: Limits) -> None:
        self._app = app
        self._key = api_key.encode() if api_key is not None else None
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        if scope["type"] != "http" and not is_socket:
            await self._app(scope, receive, send)
            return
        try:
            headers = _headers(scope["headers"])
            self._check_host(headers)
            if is_socket:
                _check_same_origin(headers)
            self._check_key(scope["path"], headers)
            body = b"" if is_socket else await self._body(headers, receive)
        except ApiError as error:
            await response_to(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive if is_socket else _replayed(body, receive), send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse pages of other sites, and names that were pointed at this machine.

        With a key such requests fail anyway: no page of another site knows it. So with a key the
        server's own page may send some from any machine.
        """
        origin = headers.get(b"origin")
        is_own = self._key is not None and _is_same_origin(headers)
        is_here = is_own or origin is None or _is_this_machine(_host_in(_ORIGIN, origin))
        if not is_here:
            raise ApiError(403, "Requests of web pages from other machines are refused.")
        host = _host_in(_HOST, headers.get(b"host", b""))
        if self._key is None and not _is_this_machine(host):
            raise ApiError(403, "The Host header names another machine; use --api-key.")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _OPEN_PATHS:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self._key):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.body_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > _MOST_DISCARDED * limit:
            raise too_large(limit)
        try:
            async with asyncio.timeout(self._limits.body_s):
                body = await _read(receive, limit)
        except TimeoutError:
            raise ApiError(408, "The body did not arrive in time.") from None
        return await plain_body(
            body, headers.get(b"content-encoding", b"").decode("latin-1"), limit
        )


def _check_same_origin(headers: dict[bytes, bytes]) -> None:
    """Refuse a socket of a page that this server did not give, from this machine too.

    Browsers let no page read another server's answers without a header, but all that a socket says.
    """
    if b"origin" in headers and not _is_same_origin(headers):
        raise ApiError(403, "Sockets of web pages are refused.")


def _is_same_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether the page that sends a request is this server's, by the address that it was asked at.

    A name of another site may lead to this machine, and its page then looks so too.
    """
    origin = headers.get(b"origin", b"")
    return _ORIGIN.fullmatch(origin) is not None and origin.partition(b"://")[2] == headers.get(
        b"host"
    )


async def _read(receive: Receive, limit: int) -> bytes:
    """Return a body. One that is too large is read to its end, but not kept: to a client that still
    sends, a connection that is closed looks broken, and the error is lost.
    """
    body, num_bytes = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client has gone.")
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > limit:
            body.clear()
        else:
            body += piece
        is_over = not message.get("more_body", False)
        if num_bytes > (limit if is_over else _MOST_DISCARDED * limit):
            raise too_large(limit)
        if is_over:
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body first, then what the connection gives."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _headers(given: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by lower-case name; raises ApiError where one that is checked comes twice.

    Another program between the client and this one may have looked at the other of both.
    """
    headers: dict[bytes, bytes] = {}
    for name, value in given:
        name = name.lower()
        if name in headers and name in _CHECKED:
            raise ApiError(400, f"The header {name.decode()} comes twice.")
        headers[name] = value
    return headers


def _host_in(form: re.Pattern[bytes], header: bytes) -> str | None:
    """Return the host that a header names, without brackets; None for another form.

    A name of a user before the host, such as `evil.example@127.0.0.1`, is another form.
    """
    match = form.fullmatch(header)
    return match[1].decode().strip("[]").lower() if match is not None else None


def _is_this_machine(name: str | None) -> bool:
    if name == "localhost" or (name is not None and name.endswith(".localhost")):
        return True
    return is_loopback(name)


def is_loopback(address: str | None) -> bool:
    """Return whether a host is a loopback address, or the name localhost."""
    if address == "localhost":
        return True
    try:
        return ip_address(address or "").is_loopback
    except ValueError:
        return False


# Clients have equal shares of the engine, and all send one key. Behind one address of a network
# there is one client; programs on this machine are told apart by the name that they send. A program
# could send another name each time: that is for the machine's own user to know. `kvchat launch`
# gives each client a name of its own in its address.

_MOST_CHARS = 200
# What a scope calls the name in the address that its client was given.
NAME = "kvchat.client"


def client_of(connection: HTTPConnection) -> str:
    """Return what stands for the client of a request or a socket; never ""."""
    address = connection.client.host if connection.client is not None else ""
    if address and not is_loopback(address):
        return address
    name = connection.scope.get(NAME) or connection.headers.get("user-agent", "")
    return f"here {name[:_MOST_CHARS]}"
