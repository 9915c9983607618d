"""Tier: what a slower store of KV has to offer, whatever it is made of.

Packs are found by the chain keys of a prompt and read back image by image. Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvchat.cache.codec import Canary, PackHead
from kvchat.core.stats import TierStatus
from kvchat.core.types import Lack


@dataclass(frozen=True, slots=True)
class Found:
    """A run of a prompt's blocks that a tier has, in a pack named by its first block's key.

    The pack may hold more than the `num_blocks` that the prompt shares; where it does not, `canary`
    is that of the last one's last token. `checksum` is that of its images: packs that begin with
    the same block have the same name.
    """

    key: bytes
    start_block: int
    num_blocks: int
    checksum: bytes = b""
    canary: Canary | None = None


def trouble_of(error: Exception) -> str:
    """Return the sentence that a tier's status has about an error."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
    return f"the disk cache failed: {reason}."


@runtime_checkable
class Pinning(Protocol):
    """A tier that can be told never to forget something."""

    def pin(self, keys: Sequence[bytes], packed: bytes, label: str) -> int:
        """Never forget what is kept of a context; return how many of its blocks that is."""


class Tier(Protocol):
    """One thread uses a tier at a time; other processes may use the same store.

    `is_one_shot` says of a use that whoever asks will hardly go on: it counts for little.
    """

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""

    def find(self, keys: Sequence[bytes], packed: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole.

        `keys` are the chain keys of the full blocks of the prompt's `packed` token ids.
        """

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it;
        HeldRecord where others are busy with it, and keeps it.
        """

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""

    def note_declined(self, keys: Sequence[bytes], packed: bytes) -> None:
        """Take in that a context is not offered for now, as what was offered last was refused.

        `keys` and `packed` as in `find`. Whoever asks `why` later shall hear of it.
        """

    def why(self, key: bytes, packed: bytes, num_found: int) -> Lack:
        """Return why the block of `key` is not there, after `num_found` of a context that are."""

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never give out again the packs that hold one of these blocks, nor what continues them."""

    def status(self) -> TierStatus:
        """Return what the tier holds and has done; may be asked from any thread."""

    def close(self) -> None:
        """Let go of the store. Idempotent."""
