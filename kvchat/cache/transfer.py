"""TransferThread: the one thread that waits for slower tiers, so that the engine never does.

Copies to and from host memory go first, then quarantines, restores and saves, in the order they
came, the last within a budget of bytes. Knows jobs and bytes; knows no request, no radix tree and
no device.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvchat.cache.tier import Tier

OpenTier = Callable[[], Tier | None]
CopyJob = Callable[[], object]
QuarantineJob = Callable[[Tier], object]
RestoreJob = Callable[[Tier], object]
SaveJob = Callable[[Tier], object]
LastJob = Callable[[Tier | None], object]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Save:
    job: LastJob
    num_bytes: int


class TransferThread:
    """Owns a tier, which `open_tier` opens; None, or an error, leaves it without one.

    Opening may take as long as reading the weights, so it has a thread of its own: what needs a
    tier and is given before waits for it, copies do not. Everything public may be called from any
    thread.
    """

    def __init__(self, open_tier: OpenTier, max_pending_bytes: int) -> None:
        self._open_tier = open_tier
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._copies: deque[CopyJob] = deque()
        self._quarantines: deque[QuarantineJob] = deque()
        self._restores: deque[RestoreJob] = deque()
        self._saves: deque[_Save] = deque()
        self._pending_bytes = 0
        self._is_busy = False
        self._is_closing = False
        self._is_over = False
        self._tier: Tier | None = None
        self._failure: Exception | None = None
        self._is_open: bool | None = None
        self._thread = threading.Thread(target=self._run, name="kvchat-transfer", daemon=True)
        self._thread.start()
        threading.Thread(target=self._open, name="kvchat-open-tier", daemon=True).start()

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
        """Whether nothing that needs a tier will ever be done."""
        return self._is_open is False

    def copy(self, job: CopyJob) -> None:
        """Queue a job that needs no tier, before all others."""
        with self._changed:
            self._copies.append(job)
            self._changed.notify_all()

    def quarantine(self, job: QuarantineJob) -> None:
        """Queue a job before all restores, which would give out again what it removes."""
        with self._changed:
            self._quarantines.append(job)
            self._changed.notify_all()

    def restore(self, job: RestoreJob) -> None:
        """Queue a job before all saves, where there is or may be a tier."""
        with self._changed:
            self._restores.append(job)
            self._changed.notify_all()

    def has_room(self, num_bytes: int, timeout_s: float) -> bool:
        """Whether a save of so many bytes would be taken now, or within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._takes(num_bytes), timeout_s)

    def _takes(self, num_bytes: int) -> bool:
        return self._pending_bytes + num_bytes <= self._max_pending_bytes and not self._is_closing

    def save(self, job: SaveJob, num_bytes: int) -> bool:
        """Queue a job that holds `num_bytes`; false, and nothing queued, beyond the budget."""
        with self._changed:
            if not self._takes(num_bytes):
                return False
            self._saves.append(_Save(lambda tier: tier is not None and job(tier), num_bytes))
            self._pending_bytes += num_bytes
            self._changed.notify_all()
        return True

    def afterwards(self, job: LastJob) -> None:
        """Queue a job behind all saves, which is done whatever becomes of them: without a tier
        where there is none, and here and now where the thread has ended.
        """
        with self._changed:
            if not self._is_over:
                self._saves.append(_Save(job, 0))
                self._changed.notify_all()
                return
        _do(lambda: job(None))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the tier is open and has nothing to do; false if that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_open is not None and self._is_idle(), timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Finish all that is queued but restores, for at most `timeout_s`, and end. Idempotent.

        A tier that is still being opened, with nothing to change in it, is not waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._restores.clear()
            self._changed.wait_for(self._is_idle, timeout_s)
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _is_idle(self) -> bool:
        if self._copies or self._is_busy:
            return False
        return self._is_open is False or not self._has_tier_job()

    def _has_tier_job(self) -> bool:
        return bool(self._quarantines or self._restores or self._saves)

    def _open(self) -> None:
        """On a thread that ends with it: open the tier, and close it where nobody waited for it."""
        tier = self._opened()
        with self._changed:
            self._tier, self._is_open = tier, tier is not None
            is_too_late = self._is_over
            self._changed.notify_all()
        if is_too_late:
            _close(tier)

    def _opened(self) -> Tier | None:
        try:
            return self._open_tier()
        except Exception as error:  # a cache that cannot be used is a miss, never a broken chat
            _log.exception("the tier could not be opened")
            self._failure = error
            return None

    # On the thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
        with self._changed:
            self._is_over = True
            left, self._saves = self._saves, deque()
        for save in left:  # nothing is saved any more, and somebody may wait to hear of it
            _do(partial(save.job, None))
        _close(self._tier)

    def _next(self) -> CopyJob | None:
        """Wait for the next job; return what does it, None once there will be none."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closing or self._has_job())
            if self._is_closing:
                return None
            self._is_busy = True
            return self._taken()

    def _has_job(self) -> bool:
        return bool(self._copies) or (self._is_open is not None and self._has_tier_job())

    def _taken(self) -> CopyJob:
        if self._copies:
            job = self._copies.popleft()
            return lambda: _do(job)
        tier = self._tier
        if urgent := self._quarantines or self._restores:
            tier_job = urgent.popleft()
            return lambda: _do(lambda: tier is not None and tier_job(tier))
        save = self._saves.popleft()
        self._pending_bytes -= save.num_bytes
        return lambda: _do(lambda: save.job(tier))


def _do(job: Callable[[], object]) -> None:
    try:
        job()
    except Exception:
        _log.exception("a transfer failed")


def _close(tier: Tier | None) -> None:
    if tier is not None:
        try:
            tier.close()
        except Exception:
            _log.exception("the tier did not close in order")
