"""TransferThread: the one thread that waits for a slower tier, so that the engine never does.

Restores go before saves, saves in the order they came and within a budget of bytes. Knows jobs and
bytes; knows no request, no radix tree and no device.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvchat.cache.tier import Tier

OpenTier = Callable[[], Tier | None]
RestoreJob = Callable[[Tier], None]
SaveJob = Callable[[Tier], bool]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Save:
    job: SaveJob
    num_bytes: int
    outcome: "Future[bool]"


class TransferThread:
    """Owns a tier, which `open_tier` opens on the thread; None, or an error, leaves it without one.

    Jobs given before the tier is open wait for it. Everything public may be called from any thread.
    """

    def __init__(self, open_tier: OpenTier, max_pending_bytes: int) -> None:
        self._open_tier = open_tier
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._restores: deque[RestoreJob] = deque()
        self._saves: deque[_Save] = deque()
        self._pending_bytes = 0
        self._is_busy = False
        self._is_closing = False
        self._tier: Tier | None = None
        self._failure: Exception | None = None
        self._is_open: bool | None = None
        self._thread = threading.Thread(target=self._run, name="kvchat-transfer", daemon=True)
        self._thread.start()

    @property
    def tier(self) -> Tier | None:
        """The tier, None while it is being opened and where it could not be."""
        return self._tier

    @property
    def failure(self) -> Exception | None:
        """What kept the tier from being opened, None where nothing has."""
        return self._failure

    @property
    def is_without_tier(self) -> bool:
        """Whether no job will ever be done."""
        return self._is_open is False

    def restore(self, job: RestoreJob) -> None:
        """Queue a job before all saves."""
        with self._changed:
            self._restores.append(job)
            self._changed.notify_all()

    def save(self, job: SaveJob, num_bytes: int) -> "Future[bool] | None":
        """Queue a job that holds `num_bytes`; None, and nothing queued, beyond the budget."""
        with self._changed:
            if self._pending_bytes + num_bytes > self._max_pending_bytes or self._is_closing:
                return None
            outcome: Future[bool] = Future()
            self._saves.append(_Save(job, num_bytes, outcome))
            self._pending_bytes += num_bytes
            self._changed.notify_all()
        return outcome

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tier is open and has nothing to do; false if that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_open is not None and self._is_idle(), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Finish the saves that are queued, for at most `timeout_s`, and end. Idempotent.

        A tier that is still being opened, with nothing to save in it, is not waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._restores.clear()
            self._changed.wait_for(self._is_idle, timeout_s)
            self._is_closing = True
            self._changed.notify_all()
            is_opening = self._is_open is None
        if not is_opening:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _is_idle(self) -> bool:
        return self._is_open is False or not (self._restores or self._saves or self._is_busy)

    # On the thread

    def _run(self) -> None:
        tier = self._opened()
        with self._changed:
            self._tier, self._is_open = tier, tier is not None
            self._changed.notify_all()
        while (job := self._next()) is not None:
            if isinstance(job, _Save):
                job.outcome.set_result(tier is not None and _done(job.job, tier))
            elif tier is not None:
                _done(job, tier)
        if tier is not None:
            with suppress(Exception):
                tier.close()

    def _opened(self) -> Tier | None:
        try:
            return self._open_tier()
        except Exception as error:  # a cache that cannot be used is a miss, never a broken chat
            _log.exception("the tier could not be opened")
            self._failure = error
            return None

    def _next(self) -> "_Save | RestoreJob | None":
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._restores or self._saves or self._is_closing)
            if self._is_closing:
                return None
            self._is_busy = True
            if self._restores:
                return self._restores.popleft()
            save = self._saves.popleft()
            self._pending_bytes -= save.num_bytes
            return save


def _done(job: Callable[[Tier], object], tier: Tier) -> bool:
    try:
        return bool(job(tier))
    except Exception:
        _log.exception("a transfer failed")
        return False
