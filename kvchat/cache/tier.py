"""Tier: the base class of a slower store of KV, and the types in it (Layout, PackHead, BlockRun).

A tier stores packs of consecutive blocks. A pack is found by the chain keys of a prompt.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvchat.cache.keys import TOKEN_BYTES, chain_keys
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason

if TYPE_CHECKING:  # who only looks at a store does not wait for it
    import torch


class DamagedRecord(Exception):
    """A stored record is damaged; `str()` of the error says how, in a few words."""


class GoneRecord(DamagedRecord):
    """A record no longer exists: another process may have removed it."""


class BusyRecord(DamagedRecord):
    """A record could not be read because another process held the store; it may be intact."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What all packs of one identity share: the identity (16 bytes) and the shape of a block.

    `block_size` counts tokens; `block_bytes` is the size of a block's image. `finer` are the
    layouts of the same KV in more bits.
    """

    identity: bytes
    block_size: int
    block_bytes: int
    finer: tuple["Layout", ...] = field(default=(), compare=False)

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
class BlockRun:
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

    @property
    def end_block(self) -> int:
        return self.start_block + self.num_blocks


# Images of blocks: bytes in host memory, or [num_blocks, block_bytes] uint8 on the device.
Image: TypeAlias = "bytes | bytearray | memoryview | torch.Tensor"


class Tier(ABC):
    """A store of KV behind the device. `KvChain` calls it; each tier has a thread of its own.

    One thread uses a tier at a time, except where a method says otherwise; other processes may use
    the same store. A call that fails may raise anything: it counts as a miss. A call that can take
    long needs a time limit of its own. `is_one_shot` marks a use of a context that will hardly be
    continued: it has a low weight.

    is_quick    what the device evicts moves here; found at once, by any thread, under keys of this
                process. Its KV was never away, so it is not verified
    has_admin   an administrator forgets contexts in it, of every model, also while none is loaded
    """

    is_quick = False
    has_admin = False

    @property
    @abstractmethod
    def root(self) -> bytes:
        """The key of the empty context under the tier's identity."""

    @property
    def latency_s(self) -> float:
        """Seconds until it answers anything, where that counts; infinity while it cannot. Any
        thread may ask.
        """
        return 0.0

    def wait_s(self, num_tokens: int) -> float:
        """Return the seconds until it begins to deliver so many tokens, where that counts; infinity
        while it cannot. Any thread may ask.
        """
        return self.latency_s

    def interrupt(self) -> None:  # noqa: B027
        """End a `find` that waits for another machine; any thread may call it."""

    @abstractmethod
    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Return the packs that hold a prompt's leading blocks, in order and without a gap.

        `keys` are the chain keys of the full blocks of the prompt's `encoded` token ids.
        """

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many leading blocks `find` would return; that is no use of them."""
        return sum(run.num_blocks for run in self.find(keys, encoded))

    @abstractmethod
    def read(self, run: BlockRun) -> Image:
        """Return the images of the blocks found, verified. Raises DamagedRecord and removes the
        damaged pack. Raises BusyRecord if another process holds the store; the pack stays.
        """

    def take_back(self, image: Image) -> None:  # noqa: B027
        """Reuse the memory of an image that `read` returned; any thread may call it."""

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Store a pack; on failure return false and put the reason in the status.

        Blocks that another process wrote since the last `find` count as stored.
        """
        return False

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:  # noqa: B027
        """Note that a context is not offered now, because the tier refused the last write.

        `keys` and `encoded` as in `find`. A later `why` can then give the reason.
        """

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        """Return why the block of `key` is missing, after `num_found` blocks that were found."""
        return MissReason.NEVER_WRITTEN

    def pin(
        self, keys: Sequence[bytes], encoded: bytes, label: str, ttl_s: float = math.inf
    ) -> int:
        """Evict none of a context's stored blocks for `ttl_s` seconds; return their number.

        Replaces a pin of this label. A tier that cannot pin returns 0.
        """
        return 0

    @abstractmethod
    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> object:
        """Remove these blocks and all that continue them, for good.

        `before` are the keys of the blocks before them, whose KV is still of use.
        """

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never return these blocks again, nor those that continue them: their KV is wrong."""
        self.forget(keys)

    def tidy(self) -> bool:
        """Do a little of what can wait, while nothing else is to do; return whether there is more.

        It takes well below a second.
        """
        return False

    @abstractmethod
    def status(self) -> TierStatus:
        """Return what the tier holds and its totals; may be called from any thread."""

    def close(self) -> None:  # noqa: B027
        """Close the store. Idempotent."""


@dataclass(frozen=True, slots=True)
class TierOpener:
    """Opens a tier, called `name` in statistics, usage and rates, where KV has the given layout.

    The layout is a function, because it takes as long as reading the weights; each may call it. A
    quick tier is opened at once and must not call it; others are opened on threads of their own.
    `open` may return None for no tier. Nothing is written to a tier that is only read. A shared one
    is for other machines too; without `takes_all` it gets only contexts that are to be shared.
    One that `computes` has another machine compute what it is asked for, which gets the token ids:
    without `takes_all` only of contexts that are to be shared.
    """

    name: str
    open: Callable[[Callable[[], Layout]], Tier | None]
    is_quick: bool = False
    is_only_read: bool = False
    is_shared: bool = False
    takes_all: bool = True
    computes: bool = False


def trouble_of(error: Exception, tier: str = "disk") -> str:
    """Return a sentence about an error for the status of a tier."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".") or type(error).__name__
    return f"the {tier} cache failed: {reason}."
