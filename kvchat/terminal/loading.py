"""LoadRelay: brings what a model says while it loads from the engine's thread to the event loop.

Made before the host, because loading begins with it; listened to once the screen is there, and
nothing said before is lost. Knows threads; knows no screen.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from kvchat.core.events import LoadEvent


class LoadRelay:
    """Give `hear` to a host as its `on_load`, then `attach` whoever wants to know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[LoadEvent] = []
        self._deliver: Callable[[LoadEvent], None] | None = None

    def hear(self, event: LoadEvent) -> None:
        """Take an event, on any thread."""
        with self._lock:
            if self._deliver is None:
                self._waiting.append(event)
            else:
                self._deliver(event)

    def attach(
        self, loop: asyncio.AbstractEventLoop, listener: Callable[[LoadEvent], None]
    ) -> None:
        """Call `listener` on the loop with every event, first those that came before."""

        def deliver(event: LoadEvent) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(listener, event)

        with self._lock:
            for event in self._waiting:
                deliver(event)
            self._waiting.clear()
            self._deliver = deliver
