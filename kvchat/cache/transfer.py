"""TransferThread: runs copies, reads and writes of one tier, so that the engine never waits.

Copies to and from host memory run first, then quarantines, then restores, then saves; each kind in
order of arrival. The queued saves have a limit in bytes. A tier that had nothing to do for a while
tidies up, a little at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvchat.cache.tier import Tier

OpenTier = Callable[[], Tier | None]
# Gets the tier, None if there is none.
Job = Callable[[Tier | None], object]
TierJob = Callable[[Tier], object]

_log = logging.getLogger(__name__)

# A tier tidies up after so many seconds without a job, and rests so long between two tasks.
_IDLE_S, _REST_S = 20.0, 0.2


class _Kind(IntEnum):
    """Kinds of jobs, in the order in which they run."""

    COPY = 0
    QUARANTINE = 1
    RESTORE = 2
    SAVE = 3


@dataclass(frozen=True, slots=True)
class _Queued:
    """A job, and the bytes that it holds."""

    run: Job
    num_bytes: int = 0


class TransferThread:
    """Owns a tier: `tier` if it is open already, else what `open_tier` opens; if that returns None
    or raises, there is no tier. It tidies up after `idle_s` seconds without a job.

    Opening may take as long as reading the weights, so it has a thread of its own. Until then, jobs
    that need a tier wait and copies run. All public methods may be called from any thread.
    """

    def __init__(
        self,
        open_tier: OpenTier,
        max_pending_bytes: int = 0,
        tier: Tier | None = None,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._open_tier = open_tier
        self._max_pending_bytes = max_pending_bytes
        self._changed = threading.Condition()
        self._queues: dict[_Kind, deque[_Queued]] = {kind: deque() for kind in _Kind}
        self._pending_bytes = 0
        self._idle_s = idle_s
        self._tidies_after_s: float | None = idle_s  # None: there is nothing to tidy up
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

    def copy(self, job: Callable[[], object]) -> None:
        """Queue a job that needs no tier, before all others."""
        self._put(_Kind.COPY, lambda tier: job())

    def quarantine(self, job: TierJob) -> None:
        """Queue a job before all restores, which could read again what the job removes."""
        self._put(_Kind.QUARANTINE, _with_tier(job))

    def restore(self, job: Job) -> None:
        """Queue a job before all saves. It gets None if there is no tier, and does not run if the
        thread ends first.
        """
        self._put(_Kind.RESTORE, job)

    def _put(self, kind: _Kind, job: Job, num_bytes: int = 0) -> None:
        with self._changed:
            self._queues[kind].append(_Queued(job, num_bytes))
            self._pending_bytes += num_bytes
            self._changed.notify_all()

    def has_room(self, num_bytes: int, timeout_s: float) -> bool:
        """Whether `save` would accept `num_bytes`; waits for that up to `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._takes(num_bytes), timeout_s)

    def _takes(self, num_bytes: int) -> bool:
        return self._pending_bytes + num_bytes <= self._max_pending_bytes and not self._is_closing

    def save(self, job: TierJob, num_bytes: int) -> bool:
        """Queue a job that holds `num_bytes`; if the limit is exceeded, return false instead."""
        with self._changed:
            if not self._takes(num_bytes):
                return False
            self._put(_Kind.SAVE, _with_tier(job), num_bytes)
        return True

    def afterwards(self, job: Job) -> None:
        """Queue a job after all saves. It always runs: with None if there is no tier, and in the
        calling thread, with None, if the transfer thread has ended.
        """
        with self._changed:
            if not self._is_over:
                self._put(_Kind.SAVE, job)
                return
        _run(job, None)

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
            self._queues[_Kind.RESTORE].clear()
            self._is_ending = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Drop queued restores, finish the other jobs within `timeout_s`, and end. Idempotent.

        It does not wait for a tier that is still being opened, unless a job needs the tier.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._queues[_Kind.RESTORE].clear()
            self._changed.wait_for(lambda: self._is_over or self._is_idle(), timeout_s)
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _is_idle(self) -> bool:
        if self._queues[_Kind.COPY] or self._is_busy:
            return False
        return self._is_open is False or not any(self._queues.values())

    def _open(self) -> None:
        """Open the tier, on a thread of its own; close it if the transfer thread has ended."""
        tier = self._try_to_open()
        with self._changed:
            self._tier, self._is_open = tier, tier is not None
            is_too_late = self._is_over
            self._changed.notify_all()
        if is_too_late:
            _close(tier)

    def _try_to_open(self) -> Tier | None:
        try:
            return self._open_tier()
        except Exception as error:  # a cache that cannot be used is a miss, never a broken chat
            _log.exception("the tier could not be opened")
            self._failure = error
            return None

    # On the thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            _run(job, self._tier)
        with self._changed:
            self._is_over = True
            unsaved = list(self._queues[_Kind.SAVE])
        for each in unsaved:  # nothing is saved any more, but a caller may wait for its callback
            _run(each.run, None)
        _close(self._tier)

    def _next(self) -> Job | None:
        """Wait for the next job and return it; None when closing."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            if not self._changed.wait_for(self._goes_on, self._tidies_after_s):
                self._is_busy = True
                return self._tidy
            self._tidies_after_s = self._idle_s
            kind = self._next_kind()
            self._is_closing = self._is_closing or kind is None
            if kind is None or self._is_closing:
                return None
            self._is_busy = True
            job = self._queues[kind].popleft()
            self._pending_bytes -= job.num_bytes
            return job.run

    def _tidy(self, tier: Tier | None) -> None:
        self._tidies_after_s = None
        if tier is not None and tier.tidy():
            self._tidies_after_s = min(_REST_S, self._idle_s)

    def _goes_on(self) -> bool:
        has_job = self._next_kind() is not None
        return self._is_closing or has_job or (self._is_ending and self._is_idle())

    def _next_kind(self) -> _Kind | None:
        """Return the kind of the job that can run now; copies alone until the tier is open."""
        kinds = _Kind if self._is_open is not None else (_Kind.COPY,)
        return next((kind for kind in kinds if self._queues[kind]), None)


def _with_tier(job: TierJob) -> Job:
    """Return a job that does nothing if there is no tier."""
    return lambda tier: job(tier) if tier is not None else None


def _run(job: Job, tier: Tier | None) -> None:
    try:
        job(tier)
    except Exception:
        _log.exception("a transfer failed")


def _close(tier: Tier | None) -> None:
    if tier is not None:
        try:
            tier.close()
        except Exception:
            _log.exception("the tier could not be closed")
