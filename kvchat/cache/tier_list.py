"""TierList: several slower tiers, in order of speed, used as one tier.

Each block of a prompt is read from the first tier that has it. New KV is written to every tier. A
tier that fails counts as a miss; the other tiers still work.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import TypeVar

from kvchat.cache.tier import (
    DamagedRecord,
    Found,
    Layout,
    PackHead,
    Pinning,
    Tier,
    trouble_of,
)
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Opens a tier for the layout. The layout is a function because computing it takes long.
TierOpener = Callable[[Callable[[], Layout]], Tier]


def open_tiers(openers: Sequence[TierOpener], layout: Callable[[], Layout]) -> Tier:
    """Open tiers in order, the fastest first; `layout` is called at most once.

    A tier that cannot be opened is left out, and the status reports the first such error. If none
    can be opened, the first error is raised. A single tier is returned as it is.
    """
    tiers: list[Tier] = []
    errors: list[Exception] = []
    known_layout = cache(layout)
    for open_tier in openers:
        try:
            tiers.append(open_tier(known_layout))
        except Exception as error:
            if len(openers) > 1:
                _log.warning("a tier could not be opened", exc_info=error)
            errors.append(error)
    if not tiers:
        raise errors[0]
    if len(openers) == 1:
        return tiers[0]
    return TierList(tiers, trouble_of(errors[0]) if errors else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundIn(Found):
    """Blocks to read from tier `number` as `own`, without the first `num_skipped` of them."""

    number: int
    own: Found
    num_skipped: int


class TierList:
    """Combines tiers of one layout (they have the same root) and owns them. One thread uses it.

    The status reports `trouble` while no tier reports its own.
    """

    def __init__(self, tiers: Sequence[Tier], trouble: str = "") -> None:
        assert tiers
        assert len({tier.root for tier in tiers}) == 1, "tiers of different layouts"
        self._tiers = list(tiers)
        self._trouble = trouble
        # For each tier: the keys of the blocks that its last `find` returned.
        self._held: list[frozenset[bytes]] = [frozenset()] * len(tiers)

    @property
    def root(self) -> bytes:
        """The key of the empty context, the same in all tiers."""
        return self._tiers[0].root

    def find(self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, each from the first tier that has
        it.
        """
        joined: list[Found] = []
        num_found = 0
        for number, tier in enumerate(self._tiers):
            nothing: list[Found] = []
            runs = _tried(partial(tier.find, keys, encoded, is_one_shot), nothing)
            self._held[number] = frozenset(keys[: sum(run.num_blocks for run in runs)])
            for run in runs:
                end = run.start_block + run.num_blocks
                if end > num_found:
                    joined.append(_found_in(run, number, num_found))
                    num_found = end
        return joined

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many leading blocks `find` would return; that is no use of them."""
        return max(_tried(partial(tier.peek, keys, encoded), 0) for tier in self._tiers)

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of found blocks, from the tier that has them; errors as `Tier.read`."""
        assert isinstance(found, _FoundIn)
        try:
            image = memoryview(self._tiers[found.number].read(found.own))
        except DamagedRecord:
            raise
        except Exception as error:
            _log.warning("a tier could not be read", exc_info=error)
            raise DamagedRecord("unreadable") from error
        return image[found.num_skipped * (len(image) // found.own.num_blocks) :]

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Write a pack to every tier that has its parent block, by the last `find`; return whether
        any stored it.
        """
        are_written = [
            _tried(partial(tier.write, head, image, is_one_shot), False)
            for tier, held in zip(self._tiers, self._held, strict=True)
            if head.parent == self.root or head.parent in held
        ]
        return any(are_written)

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        """Tell every tier that a context is not offered now."""
        for tier in self._tiers:
            _tried(partial(tier.note_declined, keys, encoded), None)

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the first tier does not have a block that no tier has."""
        return self._tiers[0].why(key, encoded, num_found)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Quarantine these blocks in every tier."""
        for tier in self._tiers:
            _tried(partial(tier.quarantine, keys), None)

    def pin(
        self, keys: Sequence[bytes], encoded: bytes, label: str, ttl_s: float = math.inf
    ) -> int:
        """Pin a context in the tiers that support it; return the largest number of blocks."""
        pinning = [tier for tier in self._tiers if isinstance(tier, Pinning)]
        return max(
            (_tried(partial(tier.pin, keys, encoded, label, ttl_s), 0) for tier in pinning),
            default=0,
        )

    def status(self) -> TierStatus:
        """Return totals over all tiers, and the first trouble that a tier reports."""
        total = TierStatus()
        for status in [_tried(tier.status, TierStatus()) for tier in self._tiers]:
            names = [field.name for field in fields(TierStatus) if field.name != "trouble"]
            sums = {name: getattr(total, name) + getattr(status, name) for name in names}
            total = replace(total, **sums, trouble=total.trouble or status.trouble)
        return replace(total, trouble=total.trouble or self._trouble)

    def close(self) -> None:
        """Close every tier. Idempotent."""
        for tier in self._tiers:
            _tried(tier.close, None)


def _found_in(run: Found, number: int, num_found: int) -> _FoundIn:
    """Return the part of a tier's blocks that lies after the first `num_found`."""
    num_skipped = max(0, num_found - run.start_block)
    return _FoundIn(
        run.key,
        run.start_block + num_skipped,
        run.num_blocks - num_skipped,
        run.checksum,
        run.fingerprint,
        number=number,
        own=run,
        num_skipped=num_skipped,
    )


def _tried(action: Callable[[], T], otherwise: T) -> T:
    try:
        return action()
    except Exception as error:  # a tier that fails must not stop the others
        _log.warning("a tier failed", exc_info=error)
        return otherwise
