"""Worker: a thread that runs functions one after another, beside the event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs functions in the order in which they come, each after the one before.

    An executor of Python would keep the process from ending for as long as its thread works.
    """

    def __init__(self, name: str) -> None:
        self._due: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """How many functions wait for the one that runs."""
        return self._due.qsize()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function after those before it, unless its future is cancelled by then."""
        future: Future[T] = Future()
        self._due.put((future, function))
        return future

    def run(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the same, for the event loop to wait for."""
        return asyncio.wrap_future(self.submit(function))

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            future, function = due
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def close(self, patience_s: float) -> bool:
        """End after the functions that wait; return whether that took less than so many seconds."""
        self._due.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()
