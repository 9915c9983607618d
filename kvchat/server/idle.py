"""IdleWatch: says when a server has had no request for its time."""

import time
from collections.abc import Callable

from kvchat.server.guard import App, Receive, Scope, Send

# Looking after a server is no use of it.
_NO_USE = ("/health", "/metrics")
# What a request's scope calls the seconds for which the server stays if nothing else comes.
LEFT = "kvchat.left_s"


class IdleWatch:
    """Passes requests on to an application, and counts those that run.

    limit_s    how long the server waits for the next request
    is_ready   whether it can answer: loading is no idleness
    """

    def __init__(
        self,
        app: App,
        limit_s: float,
        is_ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limit_s = limit_s
        self._is_ready = is_ready
        self._clock = clock
        self._num_running = 0
        self._last_s = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") in _NO_USE:
            scope = {**scope, LEFT: self._limit_s - self._idle_s}
            await self._app(scope, receive, send)
            return
        self._num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
            self._last_s = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether no request has run for the time that the server waits."""
        return self._idle_s > self._limit_s

    @property
    def _idle_s(self) -> float:
        if self._num_running or not self._is_ready():
            self._last_s = self._clock()
        return self._clock() - self._last_s
