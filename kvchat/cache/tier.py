"""Tier: what a slower store of KV has to offer, whatever it is made of.

Packs are found by the chain keys of a prompt and read back image by image. Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvchat.cache.keys import TOKEN_BYTES, chain_keys
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason


class DamagedRecord(Exception):
    """A record that is not what it should be; `str()` of it says how, in a few words."""


class GoneRecord(DamagedRecord):
    """A record that was there a moment ago, and is not any more: others may have removed it."""


class HeldRecord(DamagedRecord):
    """A record that could not be looked at as long as others held the store; it may be sound."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What all packs of a store share: whose KV it is (16 bytes), and the shape of a block.

    `block_size` counts tokens, `block_bytes` the bytes of a block's image.
    """

    identity: bytes
    block_size: int
    block_bytes: int

    @property
    def ids_bytes(self) -> int:
        """Bytes of a block's encoded token ids."""
        return self.block_size * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class LogitFingerprint:
    """The largest logits of the forward of a pack's last token: token ids, and their values."""

    token_ids: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.values)


@dataclass(frozen=True, slots=True)
class PackHead:
    """The key of the block before the first, and the encoded token ids of whole blocks.

    `is_draft` where the KV was computed to draft for another model.
    """

    parent: bytes
    ids: bytes
    checksum: bytes = bytes(16)
    fingerprint: LogitFingerprint | None = None
    is_draft: bool = False

    def keys(self, layout: Layout) -> list[bytes]:
        """Return the chain key of each block."""
        return chain_keys(self.parent, self.ids, layout.ids_bytes)

    def num_blocks(self, layout: Layout) -> int:
        return len(self.ids) // layout.ids_bytes

    def num_shared(self, encoded: bytes, block: int, layout: Layout) -> int:
        """Return how many of the blocks stand in `encoded` token ids from `block` on."""
        size, count, num_blocks = layout.ids_bytes, 0, self.num_blocks(layout)
        if encoded.startswith(self.ids, block * size):
            return num_blocks
        while count < num_blocks:
            own = self.ids[count * size : (count + 1) * size]
            if not encoded.startswith(own, (block + count) * size):
                break
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Found:
    """A run of a prompt's blocks that a tier has, in a pack named by its first block's key.

    The pack may hold more than the `num_blocks` that the prompt shares; where it does not,
    `fingerprint` is that of the last one's last token. `checksum` is that of its images: packs that
    begin with the same block have the same name.
    """

    key: bytes
    start_block: int
    num_blocks: int
    checksum: bytes = b""
    fingerprint: LogitFingerprint | None = None


def trouble_of(error: Exception) -> str:
    """Return the sentence that a tier's status has about an error."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
    return f"the disk cache failed: {reason}."


@runtime_checkable
class Pinning(Protocol):
    """A tier that can be told never to forget something."""

    def pin(self, keys: Sequence[bytes], encoded: bytes, label: str) -> int:
        """Never forget what is kept of a context; return how many of its blocks that is."""


class Tier(Protocol):
    """One thread uses a tier at a time; other processes may use the same store.

    `is_one_shot` says of a use that whoever asks will hardly go on: it counts for little.
    """

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""

    def find(self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole.

        `keys` are the chain keys of the full blocks of the prompt's `encoded` token ids.
        """

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it;
        HeldRecord where others are busy with it, and keeps it.
        """

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        """Take in that a context is not offered for now, as what was offered last was refused.

        `keys` and `encoded` as in `find`. Whoever asks `why` later shall hear of it.
        """

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the block of `key` is not there, after `num_found` of a context that are."""

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never give out again the packs that hold one of these blocks, nor what continues them."""

    def status(self) -> TierStatus:
        """Return what the tier holds and has done; may be asked from any thread."""

    def close(self) -> None:
        """Let go of the store. Idempotent."""
