"""Thinned KV: of what a context begins with, the KV of some positions only, in fewer blocks.

It keeps its positions, so keys need no turning. The blocks are new ones: a table of them is
private, its slots have positions of their own. It is not the KV of its ids. That of a
`ThinnedBeginning` is in the tree all the same, below a root of its own, where a slot's id is that
of its token: contexts that go on after the same beginning share it. It goes to no slower tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.keys import NO_TOKEN, encode_ids
from kvchat.core.types import TokenIds
from kvchat_kernels.slot_positions import SlotPositions


@dataclass(frozen=True, slots=True)
class ThinnedBeginning:
    """What contexts begin with, and the positions of it whose KV stays.

    encoded     its token ids, as `encode_ids` returns them
    num_tokens  how many these are
    positions   ascending, as many as fill whole blocks
    name        of its root: the method, how many positions stay, and a hash of all
    """

    encoded: bytes
    num_tokens: int
    positions: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, token_ids: TokenIds, positions: Sequence[int], method: str) -> "ThinnedBeginning":
        """Return a beginning; the last of `positions` is at most that of the last token."""
        assert positions
        assert positions[-1] < len(token_ids)
        encoded = encode_ids(token_ids)
        digest = blake2b(encoded + encode_ids(positions), digest_size=16).hexdigest()
        name = f"{method} {len(positions)}/{len(token_ids)} {digest}"
        return cls(encoded, len(token_ids), tuple(positions), name)

    def slot_ids(self, token_ids: TokenIds) -> list[int]:
        """Return the ids of the slots of a context that begins so."""
        return [*(token_ids[p] for p in self.positions), *token_ids[self.num_tokens :]]


def start_thinned(
    manager: CacheManager, beginning: ThinnedBeginning, token_ids: TokenIds
) -> BlockTable | None:
    """Return the table that a context starts from over thinned KV; None if some of it is missing.

    The caller must release it, as one of `CacheManager.start`.
    """
    table = manager.start(beginning.slot_ids(token_ids), beginning.name)
    num_slots = len(beginning.positions)
    if table.cached_len < num_slots:
        manager.release(table, [])
        return None
    table.cached_len += beginning.num_tokens - num_slots
    table.positions = SlotPositions(beginning.positions, beginning.num_tokens)
    table.is_thinned = True
    return table


def has_thinned(manager: CacheManager, beginning: ThinnedBeginning, token_ids: TokenIds) -> bool:
    """Whether the thinned KV of a context's beginning is there; changes no KV."""
    return num_thinned_tokens(manager, beginning, token_ids) >= beginning.num_tokens


def num_thinned_tokens(
    manager: CacheManager, beginning: ThinnedBeginning, token_ids: TokenIds
) -> int:
    """Return how many leading tokens a context over thinned KV need not read, in full blocks; 0 if
    some KV of its beginning is missing.
    """
    num_slots = manager.num_cached_tokens(beginning.slot_ids(token_ids), beginning.name)
    num_more = num_slots - len(beginning.positions)
    return beginning.num_tokens + num_more if num_more >= 0 else 0


def thin(
    manager: CacheManager, table: BlockTable, slots: Sequence[int], num_tokens: int, name: str = ""
) -> BlockTable | None:
    """Return a private table with copies of some slots of another one; None if there is no room.

    slots        ascending; those of the last tokens are among them
    num_tokens   how many tokens of the sequence have KV in `table`
    name         of the root below which the tree has the new table, "" for none: then nothing of it
                 is entered

    The caller must release both tables.
    """
    size = manager.block_size
    before = _positions(table, num_tokens)
    target = manager.match([NO_TOKEN], name)
    num_blocks = -(-len(slots) // size)
    # Slots are closer than positions: this is at least what layers with a window see.
    first_window = max(0, len(slots) // size - manager.window_blocks)
    if not manager.extend(target, num_blocks, first_window):
        manager.release(target, [])
        return None
    sources = [table.blocks[slot // size] * size + slot % size for slot in slots]
    manager.kv_pool.move_slots(sources, target.slots(0, len(slots)))
    target.positions = SlotPositions(tuple(before[slot] for slot in slots), num_tokens)
    target.is_thinned = bool(name)
    target.cached_len = num_tokens
    return target


def _positions(table: BlockTable, num_tokens: int) -> Sequence[int]:
    """Return the position of each slot of a sequence's tokens."""
    if table.positions is None:
        return range(num_tokens)
    return list(table.positions.of_slots(table.slot_of(num_tokens)))
