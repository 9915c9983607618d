"""ElsewhereTier: KV that another machine computes for a prompt, and that comes through the store.

It has nothing until it is asked: `find` has a box prefill the prompt, and then finds what the box
wrote. The chat computes meanwhile, so a box that is slow, gone or another model's costs no time.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvchat.cache.breaker import Breaker
from kvchat.cache.keys import TOKEN_BYTES
from kvchat.cache.planner import averaged
from kvchat.cache.shared.prefill_box import Offer
from kvchat.cache.shared.store import StoreTrouble
from kvchat.cache.tier import BlockRun, Image, Tier
from kvchat.core.stats import TierStatus

_OVERTAKEN = "it is slower than this machine"
# How the sentences about it begin.
ELSEWHERE_FAILED = "prefill elsewhere failed"

_log = logging.getLogger(__name__)

# A box that was overtaken failed if it took so many times as long as it says, and a second more.
_LATE, _LEAST_S = 2.0, 1.0


class Box(Protocol):
    """A machine that prefills; `PrefillBox` is one."""

    def offer(self) -> Offer: ...

    def prefill(self, encoded: bytes) -> int: ...

    def interrupt(self) -> None: ...


class ElsewhereTier(Tier):
    """What `box` computes, read from the tier that `records_of` opens for the root of its keys.

    `records_of` returns None where this chat cannot use KV of that root; `form` then says in words
    what this chat's KV is, to tell the difference. One thread uses it; any may interrupt it, and
    read `wait_s` and the status.
    """

    def __init__(
        self,
        box: Box,
        records_of: Callable[[bytes], Tier | None],
        root: bytes,
        form: Mapping[str, str],
        breaker: Breaker | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._box = box
        self._records_of = records_of
        self._own_root = root
        self._form = form
        self._breaker = breaker or Breaker()
        self._timer = timer
        self._records: Tier | None = None
        self._offer: Offer | None = None
        self._round_trip_s = 0.0
        self._slowness: float | None = None  # the seconds of a prompt by those that the box tells
        self._is_asking = self._is_interrupted = False
        self._trouble = ""
        self._agree()

    @property
    def root(self) -> bytes:
        return self._records.root if self._records is not None else self._own_root

    def wait_s(self, num_tokens: int) -> float:
        """Return how long it takes until the store has a prompt; infinity while it cannot."""
        if self._breaker.is_resting or (self._records and self._records.latency_s == math.inf):
            return math.inf
        expected_s = self._expected_s(num_tokens)
        return self._round_trip_s + (expected_s if expected_s is not None else 0.0)

    def _expected_s(self, num_tokens: int) -> float | None:
        told_s = self._offer.seconds_for(num_tokens) if self._offer is not None else None
        return told_s * (self._slowness or 1.0) if told_s is not None else None

    # Asking

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Have the box prefill a prompt, and return the packs that it wrote."""
        if not keys or self._breaker.is_resting:
            return []
        root = self.root
        if self._records is None and not self._agree():
            return []
        records = self._records
        if records is None or records.root != root or not self._have_prefilled(encoded):
            return []
        runs = records.find(keys, encoded, is_one_shot)
        if not runs:
            self._note_failure("it writes to another shared cache")
        return runs

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return 0: what the store has already is the shared tier's."""
        return 0

    def _agree(self) -> bool:
        """Ask what the box computes, and open its records; return whether they are of use."""
        start_s = self._timer()
        try:
            offer = self._box.offer()
            self._round_trip_s = self._timer() - start_s
            records = self._records_of(offer.root)
            if records is None:
                raise StoreTrouble(self._difference(offer))
        except StoreTrouble as error:
            self._note_failure(str(error))
            return False
        self._offer, self._records = offer, records
        self._note_success()
        return True

    def _difference(self, offer: Offer) -> str:
        """Return why KV of a box is of no use here, in a few words."""
        for name, own in self._form.items():
            if (other := offer.form.get(name)) is not None and other != own:
                return f"its {name} is {other}, and here it is {own}"
        return "its model's files, its version of kvchat or its kind of processor differ"

    def _have_prefilled(self, encoded: bytes) -> bool:
        """Have the box prefill; false if it did not.

        It is interrupted once no prompt needs it, which is no failure unless it is late.
        """
        num_tokens = len(encoded) // TOKEN_BYTES
        expected_s = self._expected_s(num_tokens)
        start_s = self._timer()
        self._is_asking, self._is_interrupted = True, False
        try:
            self._box.prefill(encoded)
        except StoreTrouble as error:
            is_late = self._timer() - start_s > _LATE * (expected_s or 0.0) + _LEAST_S
            if is_late or not self._is_interrupted:
                self._note_failure(_OVERTAKEN if self._is_interrupted else str(error))
            return False
        finally:
            self._is_asking = False
        self._note_success()
        self._note_seconds(num_tokens, self._timer() - start_s)
        return True

    def _note_seconds(self, num_tokens: int, seconds: float) -> None:
        """Take in how long a prompt took, which may be less than a whole one: the box has a cache,
        too.
        """
        assert self._offer is not None
        seconds = max(seconds - self._round_trip_s, 1e-3)
        told_s = self._offer.seconds_for(num_tokens)
        if told_s is None:
            self._offer = replace(self._offer, tokens_per_s=num_tokens / seconds)
        else:
            self._slowness = averaged(self._slowness, seconds / told_s)

    def interrupt(self) -> None:
        """End the wait for the box, where there is one."""
        if self._is_asking:
            self._is_interrupted = True
            self._box.interrupt()

    def _note_success(self) -> None:
        self._breaker.note_success()
        self._trouble = ""

    def _note_failure(self, trouble: str) -> None:
        if not self._breaker.has_failed:
            _log.warning("prefill elsewhere fails: %s", trouble)
        self._trouble = f"{ELSEWHERE_FAILED}: {trouble}."
        self._breaker.note_failure(trouble)

    # What the store has of it

    def read(self, run: BlockRun) -> Image:
        return self._stored.read(run)

    def take_back(self, image: Image) -> None:
        self._stored.take_back(image)

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> None:
        if self._records is not None:
            self._records.forget(keys, before)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        if self._records is not None:
            self._records.quarantine(keys)

    def status(self) -> TierStatus:
        of = self._records.status() if self._records is not None else TierStatus()
        return TierStatus(
            bytes_read=of.bytes_read,
            num_damaged=of.num_damaged,
            num_quarantined=of.num_quarantined,
            trouble=self._trouble or of.trouble,
        )

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    @property
    def _stored(self) -> Tier:
        assert self._records is not None, "nothing was found"
        return self._records
