"""Tally: what a disk tier has done, and the last thing that went wrong with it.

Knows numbers and errors; knows no packs and no files.
"""

import logging
from dataclasses import replace

from kvchat.cache.raw_disk import is_busy
from kvchat.cache.store_lock import StoreBusy
from kvchat.cache.table_keeper import is_held
from kvchat.cache.tier import trouble_of
from kvchat.core.stats import TierStatus

_log = logging.getLogger(__name__)


class Tally:
    """The status of one tier, in the making. The tier's thread adds to it, any thread reads it."""

    def __init__(self, limit_bytes: int) -> None:
        self.status = TierStatus(limit_bytes=limit_bytes)

    def count(self, **amounts: int) -> None:
        """Add to totals, by their names in TierStatus."""
        totals = {name: getattr(self.status, name) + int(n) for name, n in amounts.items()}
        self.status = replace(self.status, **totals)

    def note_held(self, num_bytes: int, num_packs: int, num_evicted: int) -> None:
        """Take in what the store holds at this moment, and what has gone from it until now."""
        self.status = replace(
            self.status, num_bytes=num_bytes, num_packs=num_packs, num_evicted=num_evicted
        )

    def say(self, trouble: str) -> None:
        """Have a sentence told as the last thing that went wrong."""
        self.status = replace(self.status, trouble=trouble)

    def note_error(self, error: Exception) -> None:
        """Say what is wrong; that others are busy with the store is not, and passes."""
        _log.warning("disk tier: %r", error)
        self.count(num_held_up=is_held(error))
        if not (is_busy(error) or isinstance(error, StoreBusy)):
            self.say(trouble_of(error))
