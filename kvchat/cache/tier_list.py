"""TierList: slower tiers behind one another, used as one tier.

A prompt finds its beginning in the first tier that has it, and what goes on from there in the ones
behind. What is computed is written to every tier. A tier that fails is a miss, and keeps none of
the others from their work. Knows no tier's kind.
"""

import logging
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

# Opens a tier of the layout, which takes long to learn; raises what keeps it from being opened.
TierOpener = Callable[[Callable[[], Layout]], Tier]


def open_tiers(openers: Sequence[TierOpener], layout: Callable[[], Layout]) -> Tier:
    """Open tiers in order, the fastest first; the layout is asked for once at most.

    One that cannot be opened is left out, and its error told in the status; raises the first
    error where none can be. A single tier is returned as it is.
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
    """A run that is read from tier `number` as `own`, without its first `num_skipped` blocks."""

    number: int
    own: Found
    num_skipped: int


class TierList:
    """Joins tiers of one layout, whose roots are the same; owns them. One thread uses it.

    `trouble` is told in the status as long as no tier has any.
    """

    def __init__(self, tiers: Sequence[Tier], trouble: str = "") -> None:
        assert tiers
        assert len({tier.root for tier in tiers}) == 1, "tiers of different layouts"
        self._tiers = list(tiers)
        self._trouble = trouble
        # Of each tier: the keys of the blocks it had of the prompt that was looked for last.
        self._held: list[frozenset[bytes]] = [frozenset()] * len(tiers)

    @property
    def root(self) -> bytes:
        """The key of the empty context, the same in all tiers."""
        return self._tiers[0].root

    def find(self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the runs that hold a prompt's leading blocks, each from the first tier that has
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

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of a run, from the tier it was found in; errors as `Tier.read`."""
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
        """Keep a pack in every tier that has what it continues, by the last `find`; whether any
        did.
        """
        are_written = [
            _tried(partial(tier.write, head, image, is_one_shot), False)
            for tier, held in zip(self._tiers, self._held, strict=True)
            if head.parent == self.root or head.parent in held
        ]
        return any(are_written)

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        """Have every tier take in that a context is not offered for now."""
        for tier in self._tiers:
            _tried(partial(tier.note_declined, keys, encoded), None)

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the first tier has not what no tier has."""
        return self._tiers[0].why(key, encoded, num_found)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never give out again what holds one of these blocks, from whichever tier."""
        for tier in self._tiers:
            _tried(partial(tier.quarantine, keys), None)

    def pin(self, keys: Sequence[bytes], encoded: bytes, label: str) -> int:
        """Never forget what is kept of a context, in the tiers that can be told so."""
        pinning = [tier for tier in self._tiers if isinstance(tier, Pinning)]
        return max(
            (_tried(partial(tier.pin, keys, encoded, label), 0) for tier in pinning),
            default=0,
        )

    def status(self) -> TierStatus:
        """Return totals over all tiers, and the first trouble that one of them has."""
        total = TierStatus()
        for status in [_tried(tier.status, TierStatus()) for tier in self._tiers]:
            names = [field.name for field in fields(TierStatus) if field.name != "trouble"]
            sums = {name: getattr(total, name) + getattr(status, name) for name in names}
            total = replace(total, **sums, trouble=total.trouble or status.trouble)
        return replace(total, trouble=total.trouble or self._trouble)

    def close(self) -> None:
        """Let go of every tier. Idempotent."""
        for tier in self._tiers:
            _tried(tier.close, None)


def _found_in(run: Found, number: int, num_found: int) -> _FoundIn:
    """Return what of a tier's run goes beyond the blocks found already."""
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
    except Exception as error:  # what one tier cannot do, the others can
        _log.warning("a tier failed", exc_info=error)
        return otherwise
