"""TransferThread: runs copies, reads and writes of one tier, so that the engine never waits.

Copies to and from host memory run first, then quarantines, then restores, then saves; each kind in
order of arrival. The queued saves have a limit in bytes.
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
RestoreJob = Callable[[Tier | None], object]
SaveJob = Callable[[Tier], object]
LastJob = Callable[[Tier | None], object]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Save:
    job: LastJob
    num_bytes: int


class TransferThread:
    """Owns a tier: `tier` if it is open already, else what `open_tier` opens; if that returns None
    or raises, there is no tier.

    Opening may take as long as reading the weights, so it has a thread of its own. Until then, jobs
    that need a tier wait and copies run. All public methods may be called from any thread.
    """

    def __init__(
        self, open_tier: OpenTier, max_pending_bytes: int = 0, tier: Tier | None = None
    ) -> None:
        self._open_tier = open_tier
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._copies: deque[CopyJob] = deque()
        self._quarantines: deque[QuarantineJob] = deque()
        self._restores: deque[RestoreJob] = deque()
        self._saves: deque[_Save] = deque()
        self._pending_bytes = 0
        self._is_busy = False
        self._is_ending = False  # to end when idle
        self._is_closing = False
        self._is_over = False
        self._tier = tier
        self._failure: Exception | None = None
        self._is_open: bool | None = True if tier is not None else None
        self._thread = threading.Thread(target=self._run, name="kvchat-transfer", daemon=True)
        self._thread.start()
        if tier is None:
            threading.Thread(target=self._open, name="kvchat-open-tier", daemon=True).start()

    @property
    def tier(self) -> Tier | None:
        """The tier; None while it is being opened, and if there is none."""
        return self._tier

    @property
    def failure(self) -> Exception | None:
        """The error that opening the tier raised, or None."""
        return self._failure

    @property
    def is_without_tier(self) -> bool:
        """Whether opening has ended without a tier: jobs that need one will never run."""
        return self._is_open is False

    def copy(self, job: CopyJob) -> None:
        """Queue a job that needs no tier, before all others."""
        with self._changed:
            self._copies.append(job)
            self._changed.notify_all()

    def quarantine(self, job: QuarantineJob) -> None:
        """Queue a job before all restores, which could read again what the job removes."""
        with self._changed:
            self._quarantines.append(job)
            self._changed.notify_all()

    def restore(self, job: RestoreJob) -> None:
        """Queue a job before all saves. It gets None if there is no tier, and does not run if the
        thread ends first.
        """
        with self._changed:
            self._restores.append(job)
            self._changed.notify_all()

    def has_room(self, num_bytes: int, timeout_s: float) -> bool:
        """Whether `save` would accept `num_bytes`; waits for that up to `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._takes(num_bytes), timeout_s)

    def _takes(self, num_bytes: int) -> bool:
        return self._pending_bytes + num_bytes <= self._max_pending_bytes and not self._is_closing

    def save(self, job: SaveJob, num_bytes: int) -> bool:
        """Queue a job that holds `num_bytes`; if the limit is exceeded, return false instead."""
        with self._changed:
            if not self._takes(num_bytes):
                return False
            self._saves.append(_Save(lambda tier: tier is not None and job(tier), num_bytes))
            self._pending_bytes += num_bytes
            self._changed.notify_all()
        return True

    def afterwards(self, job: LastJob) -> None:
        """Queue a job after all saves. It always runs: with None if there is no tier, and in the
        calling thread, with None, if the transfer thread has ended.
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

    def begin_closing(self) -> None:
        """Let the thread end once it is idle, without queued restores. Does not wait.

        Two threads end at the same time if both are told before `close` waits for one.
        """
        with self._changed:
            self._restores.clear()
            self._is_ending = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Drop queued restores, finish the other jobs within `timeout_s`, and end. Idempotent.

        It does not wait for a tier that is still being opened, unless a job needs the tier.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._restores.clear()
            self._changed.wait_for(lambda: self._is_over or self._is_idle(), timeout_s)
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
        """Open the tier, on a thread of its own; close it if the transfer thread has ended."""
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
        for save in left:  # nothing is saved any more, but a caller may wait for its callback
            _do(partial(save.job, None))
        _close(self._tier)

    def _next(self) -> CopyJob | None:
        """Wait for the next job and return it; None when closing."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(self._goes_on)
            self._is_closing = self._is_closing or not self._has_job()
            if self._is_closing:
                return None
            self._is_busy = True
            return self._taken()

    def _goes_on(self) -> bool:
        return self._is_closing or self._has_job() or (self._is_ending and self._is_idle())

    def _has_job(self) -> bool:
        return bool(self._copies) or (self._is_open is not None and self._has_tier_job())

    def _taken(self) -> CopyJob:
        if self._copies:
            job = self._copies.popleft()
            return lambda: _do(job)
        tier = self._tier
        if self._quarantines:
            quarantine = self._quarantines.popleft()
            return lambda: _do(lambda: tier is not None and quarantine(tier))
        if self._restores:
            restore = self._restores.popleft()
            return lambda: _do(lambda: restore(tier))
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
            _log.exception("the tier could not be closed")
