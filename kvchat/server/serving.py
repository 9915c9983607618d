"""Runs the HTTP server until a signal ends it."""

import signal
import socket
from collections.abc import Callable

import uvicorn

from kvchat.core.errors import ExitCode, UsageError
from kvchat.server.guard import App

# Seconds that running answers may take after a signal, before they are cut off.
_GRACE_S = 5
_KEEP_ALIVE_S = 30
_BACKLOG = 512
_MAX_HEADER_BYTES = 64 << 10
_CODES = {signal.SIGINT: ExitCode.INTERRUPT, signal.SIGTERM: ExitCode.TERMINATED}


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


def serve(app: App, bound: socket.socket, on_ready: Callable[[], None]) -> ExitCode:
    """Serve until SIGINT or SIGTERM, then finish running answers for a few seconds.

    Returns the signal's exit code. Called on the main thread.
    """
    heard: list[int] = []
    # uvicorn takes the signals, and raises them again at its end: then they come here.
    for number in _CODES:
        signal.signal(number, lambda number, frame: heard.append(number))

    async def told(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await app(scope, receive, send)

    config = uvicorn.Config(
        told,
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        http="h11",  # the one with a limit for headers
        ws="none",
    )
    _Server(config, on_ready).run(sockets=[bound])
    return _CODES[signal.Signals(heard[0])] if heard else ExitCode.OK


class _Server(uvicorn.Server):
    """A server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()
