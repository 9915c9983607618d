"""Tier: what a slower store of KV has to offer, whatever it is made of.

Packs are found by the chain keys of a prompt and read back image by image. Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvchat.cache.codec import PackHead


@dataclass(frozen=True, slots=True)
class Found:
    """A run of a prompt's blocks that a tier has, in a pack named by its first block's key.

    The pack may hold more than the `num_blocks` that the prompt shares.
    """

    key: bytes
    start_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Totals since the tier was opened, and what it holds. `trouble` is the last thing that went
    wrong, in a sentence."""

    num_packs: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    num_evicted: int = 0
    num_damaged: int = 0
    num_failed_writes: int = 0
    trouble: str = ""


class Tier(Protocol):
    """One thread uses a tier at a time; other processes may use the same store."""

    @property
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""

    def find(self, keys: Sequence[bytes], packed: bytes) -> list[Found]:
        """Return the packs that hold a prompt's leading blocks, in order and without a hole.

        `keys` are the chain keys of the full blocks of the prompt's `packed` token ids.
        """

    def read(self, found: Found) -> bytes | bytearray | memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, and forgets it."""

    def write(self, head: PackHead, image: memoryview) -> bool:
        """Keep a pack; false, and why in the status, where the world did not let it."""

    def close(self) -> None:
        """Let go of the store. Idempotent."""
