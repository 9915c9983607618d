"""Runs the HTTP server until a signal ends it."""

import asyncio
import errno
import logging
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import uvicorn
from h11 import InformationalResponse, Request
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from kvchat.core.errors import ExitCode, StoreError, UsageError
from kvchat.core.paths import private_directory
from kvchat.server.guard import App, Limits
from kvchat.server.responses_socket import SERVER_ENDS

# Seconds that running answers may take after a signal, before they are cut off.
_GRACE_S = 5
_KEEP_ALIVE_S = 30
# A client may take so long to say that it closes its socket too.
_CLOSING_S = 1.0
# The headers of a request have to arrive within twice this time.
_HEADERS_S = 15.0
# A client that will say no more is looked for this often while its answer has not begun.
_LOOK_S = 5.0
_BACKLOG = 512
# One connection holds the event loop no longer than this; so many bytes are parsed between looks.
_TURN_S = 0.01
_BYTES_BETWEEN_LOOKS = 4096
_MAX_HEADER_BYTES = 64 << 10
_CODES = {
    signal.SIGINT: ExitCode.INTERRUPT,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises UsageError for an address that cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sends small pieces at once only where a socket says that it is TCP's.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OverflowError as error:
        raise UsageError(f"--port is {port}, but must be 0 to 65535.") from error
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another --port."
        ) from error
    return bound


def private_socket(path: str) -> socket.socket:
    """Return a listening socket that is a file of this user, in the place of one left by another
    process; raises UsageError where that is not possible.

    Its directory has to be this user's own: until the file has its mode, only that keeps others
    out.
    """
    place = Path(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        private_directory(place.parent)
        if place.parent.stat().st_mode & 0o077:
            raise PermissionError(errno.EPERM, "other users may enter its directory")
        if place.is_socket() and not place.is_symlink():
            place.unlink()
        bound.bind(path)
        place.chmod(0o600)
        bound.listen(_BACKLOG)
    except (OSError, StoreError) as error:
        bound.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"Cannot listen on {path}: {why}.", "Choose another --socket.") from error
    return bound


def own_address(host: str) -> str:
    """Return the address by which another machine reaches a server that listens on `host`.

    One that listens on all addresses is reached at that of the route to other networks.
    """
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    family, far = (
        (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: only the route is looked up
            own = str(probe.getsockname()[0])
        except OSError:
            return "localhost"
    return f"[{own}]" if ":" in own else own


def serve(
    app: App,
    bound: socket.socket,
    on_ready: Callable[[], None],
    has_failed: Callable[[], bool] = lambda: False,
) -> ExitCode:
    """Serve until SIGINT, SIGTERM or SIGHUP, then finish running answers for a few seconds.

    Returns the signal's exit code. Ends as well once `has_failed`, which is asked ten times a
    second. Called on the main thread. SIGHUP stays ignored where it is, as under `nohup`.
    """
    heard: list[int] = []
    server = _Server(configured(app), on_ready, has_failed)

    def end(number: int, frame: object) -> None:
        heard.append(number)
        server.should_exit = True

    # uvicorn takes two of the signals, and raises them again at its end: then they come here.
    for number in _CODES:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    server.run(sockets=[bound])
    return _CODES[signal.Signals(heard[0])] if heard else ExitCode.OK


def configured(app: App) -> uvicorn.Config:
    """Return how the application is served."""
    logging.getLogger("uvicorn.error").addFilter(_is_fault)

    async def told(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await app(scope, receive, send)

    return uvicorn.Config(
        told,
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,  # nothing here depends on the client's address
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        http=HastyProtocol,
        ws=HastySockets,
        ws_max_size=Limits().body_bytes,
        ws_per_message_deflate=False,  # its tables would cost every idle socket memory
    )


def _is_fault(record: logging.LogRecord) -> bool:
    """Whether a record tells of more than a WebSocket that was refused with a response of ours, or
    where an answer stood that the end of the server cut off.

    uvicorn calls these faults: no handshake was completed, and the task was cancelled.
    """
    is_cut_off = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not is_cut_off and "without completing handshake" not in record.getMessage()


class _InTurns(ABC):
    """Parses what a connection has got in turns, so that the others have theirs.

    256 KiB, which come at once, of chunks or frames with one byte each take a second and more.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _waiting = b""  # what has come, but is not parsed yet

    @abstractmethod
    def _parse(self, data: bytes) -> None:
        """Take in what follows."""

    @property
    @abstractmethod
    def _may_read(self) -> bool:
        """Whether the application has taken enough of what came before."""

    def _is_left(self, rest: bytes) -> bool:
        """Whether another protocol has the connection by now, which had to wait for `rest`."""
        return False

    def data_received(self, data: bytes) -> None:
        is_taken_later = bool(self._waiting)
        self._waiting += data
        if not is_taken_later:
            self._take_turn()

    def _take_turn(self) -> None:
        """Parse what has come, and leave to the next turn what this one has no time for."""
        end_s, place = self.loop.time() + _TURN_S, 0
        while place < len(self._waiting) and not self.transport.is_closing():
            self._parse(self._waiting[place : place + _BYTES_BETWEEN_LOOKS])
            place += _BYTES_BETWEEN_LOOKS
            if self._is_left(self._waiting[place:]):
                self._waiting = b""
                return
            if self.loop.time() >= end_s:
                break
        self._waiting = b"" if self.transport.is_closing() else self._waiting[place:]
        if self._waiting:
            self.transport.pause_reading()
            self.loop.call_soon(self._take_turn)
        elif self._may_read:
            self.transport.resume_reading()


class HastySockets(_InTurns, WebSocketsSansIOProtocol):
    """A WebSocket that costs the other connections a turn at a time.

    Of frames without data 256 KiB are 43,000.
    """

    def shutdown(self) -> None:
        """Have the application close the socket, once it has answered; uvicorn cuts answers off."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
            return
        self.stop_keepalive()
        self.close_timeout = _CLOSING_S
        self.queue.put_nowait({"type": "websocket.disconnect", "code": SERVER_ENDS})

    def _parse(self, data: bytes) -> None:
        WebSocketsSansIOProtocol.data_received(self, data)

    @property
    def _may_read(self) -> bool:
        return not self.read_paused


class HastyProtocol(_InTurns, H11Protocol):
    """Limits what one connection costs the others; uvicorn limits the size of headers alone.

    A connection whose request does not begin is closed: a client that sends no headers would keep
    it for ever.
    """

    _seen: object = object()  # no request: the first look never closes
    _check: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _is_socket = False  # the connection is another protocol's by now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._check = self.loop.call_later(_HEADERS_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._check, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _parse(self, data: bytes) -> None:
        H11Protocol.data_received(self, data)

    @property
    def _may_read(self) -> bool:
        return not self.flow.read_paused

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that has said all and listens; true if so.

        A client that has gone looks the same until something is sent to it. So one whose answer
        takes long is sent that the request is worked on: who has gone is found out by that.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or self._is_socket:
            return False
        told = dict(cycle.scope["headers"]).get(b"connection", b"").lower()
        if told != b"close" and cycle.scope["http_version"] != "1.0":
            return False  # it could say more on this connection: it has gone
        self._look = self.loop.call_later(_LOOK_S, self._look_for_client)
        return not cycle.response_complete

    def _look_for_client(self) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or cycle.response_started:
            return  # a stream is written to every second
        if cycle.scope["http_version"] != "1.0":
            told = InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(told) or b"")
        self._look = self.loop.call_later(_LOOK_S, self._look_for_client)

    def handle_websocket_upgrade(self, event: Request) -> None:
        """Hand the connection over; the protocol of sockets has pings that find a gone client."""
        assert self._check is not None, "the connection is made"
        self._check.cancel()
        super().handle_websocket_upgrade(event)
        self._is_socket = True

    def _is_left(self, rest: bytes) -> bool:
        """Close a connection whose client did not wait for the answer to its handshake."""
        if self._is_socket and (rest or self.conn.trailing_data[0]):
            self.transport.close()
        return self._is_socket

    def _close_if_idle(self) -> None:
        """Close where no request has come or was answered since the last look."""
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if is_idle and cycle is self._seen:
            self.transport.close()
            return
        self._seen = cycle if is_idle else object()
        self._check = self.loop.call_later(_HEADERS_S, self._close_if_idle)


class _Server(uvicorn.Server):
    """A server that says when it accepts connections, and ends where what it serves has failed."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], has_failed: Callable[[], bool]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._has_failed = has_failed

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._has_failed()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()
