"""Tier: the interface of a slower store of KV, and the types in it (Layout, PackHead, Found).

A tier stores packs of consecutive blocks. A pack is found by the chain keys of a prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvchat.cache.keys import TOKEN_BYTES, chain_keys
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason


class DamagedRecord(Exception):
    """A stored record is damaged; `str()` of the error says how, in a few words."""


class GoneRecord(DamagedRecord):
    """A record no longer exists: another process may have removed it."""


class HeldRecord(DamagedRecord):
    """A record could not be read because another process held the store; it may be intact."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What all packs of one identity share: the identity (16 bytes) and the shape of a block.

    `block_size` counts tokens; `block_bytes` is the size of a block's image.
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
    """The largest logits of the forward pass of a pack's last token: token ids and values."""

    token_ids: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.values)


@dataclass(frozen=True, slots=True)
class PackHead:
    """What a pack holds: the key of the block before its first, and its blocks' encoded token ids.

    `is_draft` says that a draft model computed the KV.
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

    def num_tokens(self, layout: Layout) -> int:
        """Return how many tokens the pack stands for. Blocks of a snapshot of recurrent state,
        whose ids are negative, stand for none.
        """
        first_ids = memoryview(self.ids).cast("i")[:: layout.block_size]
        return sum(token >= 0 for token in first_ids) * layout.block_size

    def num_shared(self, encoded: bytes, block: int, layout: Layout) -> int:
        """Return how many leading blocks equal those of `encoded` token ids from `block` on."""
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
    """Consecutive blocks of a prompt that a tier has, in a pack named by its first block's key.

    The pack may hold more blocks than the `num_blocks` that the prompt shares. If it does not,
    `fingerprint` is the fingerprint of the last block's last token. `checksum` is the checksum of
    the images: it tells apart packs that begin with the same block and so have the same name.
    """

    key: bytes
    start_block: int
    num_blocks: int
    checksum: bytes = b""
    fingerprint: LogitFingerprint | None = None


def trouble_of(error: Exception) -> str:
    """Return a sentence about an error for a tier's status."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
    return f"the disk cache failed: {reason}."


@runtime_checkable
class Pinning(Protocol):
    """A tier that can pin contexts: it does not evict their blocks."""

    def pin(
        self, keys: Sequence[bytes], encoded: bytes, label: str, ttl_s: float = math.inf
    ) -> int:
        """Pin the stored blocks of a context under `label` for `ttl_s` seconds; return how many
        blocks that is.
        """


class Tier(Protocol):
    """One thread uses a tier at a time; other processes may use the same store.

    `is_one_shot` marks a use of a context that will hardly be continued: it has a low weight.
    """

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""

    def find(self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a gap.

        `keys` are the chain keys of the full blocks of the prompt's `encoded` token ids.
        """

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many leading blocks `find` would return; that is no use of them."""

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord and removes the
        damaged pack. Raises HeldRecord if another process holds the store; the pack stays.
        """

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Store a pack; on failure return false and put the reason in the status."""

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        """Note that a context is not offered now, because the tier refused the last write.

        `keys` and `encoded` as in `find`. A later `why` can then give the reason.
        """

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the block of `key` is missing, after `num_found` blocks that were found."""

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never return again the packs that hold one of these blocks, nor packs that continue
        them.
        """

    def status(self) -> TierStatus:
        """Return what the tier holds and its totals; may be called from any thread."""

    def close(self) -> None:
        """Close the store. Idempotent."""
