"""CacheManager: the engine's interface to the device tier (match, reserve, commit, release).

It combines the radix tree (which KV is cached), the block pool (which blocks are free) and the KV
pool (the tensors), and keeps their reference counts consistent.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvchat.cache.block_pool import BlockPool
from kvchat.cache.block_table import BlockTable
from kvchat.cache.device_copies import Images
from kvchat.cache.keys import encode_ids
from kvchat.cache.kv_pool import KvPool
from kvchat.cache.radix_tree import Node, RadixTree, TreeInsert
from kvchat.core.types import TokenIds
from kvchat_kernels.slot_positions import SlotPositions


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """Blocks of the device tier by use, and totals of evicted and copied blocks.

    Of a model whose layers with a window keep only that, also the window blocks.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_evicted: int
    num_copied: int
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    window_block_bytes: int = 0


class LowerTier(Protocol):
    """The tier that receives the blocks evicted from the device."""

    def demote(self, encoded: bytes, blocks: list[int]) -> None:
        """Take the last full blocks of a context; on return the caller reuses the blocks."""

    def forget(self, encoded: bytes, num_kept: int) -> None:
        """Never return again the blocks of a context after its first `num_kept`."""

    def clear(self) -> None:
        """Forget everything except blocks that are being copied."""


class CacheManager:
    """Owns the block pool, the radix tree and, through `kv_pool`, the device memory.

    Without `reuse` nothing is matched and nothing is kept: every sequence starts cold. One thread
    owns a manager.
    """

    window_blocks = 0  # blocks whose window blocks a sequence needs to go on, where there are any
    has_state = False  # whether sequences have recurrent state beside their KV
    # Whether a wrong draft makes the next step read again what its step has read.
    reads_again = False
    num_state_blocks = 0
    state_bytes = 0  # of one sequence's recurrent state, and of a snapshot

    def __init__(self, kv_pool: KvPool, reuse: bool = True) -> None:
        self.kv_pool = kv_pool
        self.block_size = kv_pool.geometry.block_size
        self._reuse = reuse
        self._pool = self._new_block_pool()
        self._tree = RadixTree(self.block_size)
        self._num_evicted = 0
        self._num_copied = 0
        self._lower_tier: LowerTier | None = None
        self._spare_block: int | None = None

    def _new_block_pool(self) -> BlockPool:
        return BlockPool(self.kv_pool.num_blocks)

    def attach(self, lower_tier: LowerTier) -> None:
        """From now on, demote evicted blocks to `lower_tier`."""
        self._lower_tier = lower_tier

    def reserve_spare_block(self) -> None:
        """Reserve a block for `use_spare_block`, however full the device tier gets. A tier of a
        single block reserves none.
        """
        if self._spare_block is None and self._num_usable > 1 and self._make_room(1):
            [self._spare_block] = self._pool.allocate(1)

    @property
    def _num_usable(self) -> int:
        return self._pool.num_blocks - 1 - (self._spare_block is not None)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the device tier holds if no other sequence runs."""
        return self._num_usable * self.block_size

    def status(self) -> CacheStatus:
        return CacheStatus(
            num_blocks=self._num_usable,
            num_free=self._pool.num_free,
            num_cached=self._tree.num_blocks,
            num_evicted=self._num_evicted,
            num_copied=self._num_copied,
        )

    @property
    def num_available(self) -> int:
        """Blocks that are free, or that eviction could free because no sequence locks them."""
        return self._pool.num_free + self._tree.num_blocks - self._tree.num_locked_blocks

    def has_room(self, table: BlockTable, num_tokens: int, num_spare: int) -> bool:
        """Whether a table can grow to `num_tokens` and leave `num_spare` blocks."""
        num_new = -(-table.slot_of(num_tokens) // self.block_size) - len(table.blocks)
        return num_new + num_spare <= self.num_available

    @property
    def reuse(self) -> bool:
        """Whether KV is kept for later prompts at all."""
        return self._reuse

    def num_cached_tokens(self, token_ids: TokenIds, moved_under: str = "") -> int:
        """Return how many leading tokens are cached in full blocks; changes nothing but a name that
        is not known yet. Arguments as of `match`.
        """
        if not self._reuse:
            return 0
        blocks = self._tree.blocks_of(encode_ids(token_ids), self._root(moved_under))
        return self._num_usable_blocks(blocks, token_ids) * self.block_size

    def num_moved_tokens(self, token_ids: TokenIds) -> int:
        """Return how many leading tokens the moved contexts of one name have in full blocks."""
        names = self._tree.moved_names
        return max((self.num_cached_tokens(token_ids, name) for name in names), default=0)

    def _num_usable_blocks(self, blocks: Sequence[int], token_ids: TokenIds) -> int:
        """Return after how many of a context's blocks a sequence can go on."""
        return len(blocks)

    def _root(self, moved_under: str) -> Node:
        return self._tree.moved_root(moved_under) if moved_under else self._tree.root

    def match(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Find the longest cached prefix and lock it; the caller must `release` the table.

        Always leaves at least one token to compute, because sampling needs its logits. If the
        prefix ends inside a block, that block's KV is copied into a block of the table's own. With
        `moved_under`, the prefix is one of that name's moved contexts (`moved_kv.py`), and so is
        what is committed of the table.
        """
        root = self._root(moved_under)
        if not self._reuse:
            return self._hold(root, [], 0, 0)
        found = self._tree.match(encode_ids(token_ids[:-1]), root)
        num_full = len(found.blocks)
        table = self._hold(found.node, list(found.blocks), num_full * self.block_size, num_full)
        if found.head is not None:
            self._copy_head(table, found.head, found.head_len)
        return table

    def match_without_windows(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Match as far as the layers without a window have KV. The table is only to copy from."""
        return self.match(token_ids, moved_under)

    def start(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Return the table that a sequence with this prompt starts from: here, its match."""
        return self.match(token_ids, moved_under)

    def num_reusable_tokens(self, token_ids: TokenIds) -> int:
        """Return how many leading tokens in full blocks a sequence need not compute."""
        return self.num_cached_tokens(token_ids)

    def contexts_to_keep(self, token_ids: TokenIds) -> list[TokenIds]:
        """Return the contexts that a slower tier is to have so that it can restore a context."""
        return [token_ids]

    def with_state(self, token_ids: TokenIds, num_tokens: int) -> TokenIds:
        """Return the ids under which the recurrent state after `num_tokens` tokens is kept."""
        return token_ids[:num_tokens]

    def drop_states(self, table: BlockTable, token_ids: TokenIds) -> None:
        """Drop all recurrent state of a sequence that failed; here there is none."""

    def _hold(
        self, node: Node, blocks: list[int], cached_len: int, num_committed: int
    ) -> BlockTable:
        self._tree.lock(node)
        self._pool.acquire(blocks)
        return BlockTable(self.block_size, node, blocks, cached_len, num_committed)

    def _copy_head(self, table: BlockTable, head: int, head_len: int) -> None:
        """Copy a cached block for its first `head_len` tokens, if there is room for the copy."""
        self._pool.acquire([head])  # or it could be evicted to make room for its copy
        if self._make_room(1):
            table.blocks.append(self._copy_of(head, table.blocks[-1] if table.blocks else None))
            table.cached_len += head_len
        self._pool.release([head])

    def _copy_of(self, source: int, previous: int | None) -> int:
        [target] = self._pool.allocate(1, after=previous)
        self.kv_pool.copy_block(source, target)
        self._num_copied += 1
        return target

    # Growing

    def reserve(self, table: BlockTable, start: int, end: int) -> bool:
        """Make positions `start` to `end - 1` writable; return false if there is no room.

        Grows the table, and copies shared blocks before they are written. It may evict unlocked
        blocks for that. If it returns false, the table is unchanged.
        """
        size = self.block_size
        end_slot = table.slot_of(end)  # slots that are to be written follow each other
        first = (end_slot - (end - start)) // size
        shared = [
            index
            for index in range(first, len(table.blocks))
            if self._is_shared(table.blocks[index])
        ]
        num_new = max(0, -(-end_slot // size) - len(table.blocks))
        if not (num_new or shared):
            return True
        if not self._make_room(num_new + len(shared)):
            return False
        for index in shared:
            self._copy_on_write(table, index)
        last = table.blocks[-1] if table.blocks else None
        table.blocks.extend(self._pool.allocate(num_new, after=last))
        return True

    def extend(self, table: BlockTable, num_blocks: int, first_window: int) -> bool:
        """Add writable blocks to an empty table; false if there is no room.

        Those before number `first_window` get no window block, where there are any.
        """
        return self.reserve(table, 0, num_blocks * self.block_size)

    def hold_windows(self, table: BlockTable) -> int:
        """Let a table use all window blocks that its last blocks have without a gap.

        Returns the number of the first block from which on all layers have KV.
        """
        return 0

    def hold_more_windows(self, table: BlockTable, num_tokens: int) -> None:
        """From now on, let a table use window blocks of so many tokens behind its window, while
        there is room: its last tokens can then be computed again.
        """

    def first_computable(self, table: BlockTable) -> int:
        """Return the position from which on tokens can be computed again: all layers have what
        they see.
        """
        return 0

    def use_spare_block(self, table: BlockTable) -> bool:
        """Replace a table's last block by a writable copy of it in the spare block; false if there
        is no spare block.

        One table at a time. The spare block is never kept in the tree.
        """
        spare = self._spare_block
        if spare is None:
            return False
        assert self._pool.references[spare] == 1, "it is in use already"
        source = table.blocks.pop()
        self.kv_pool.copy_block(source, spare)
        self._pool.release([source])
        self._pool.acquire([spare])
        table.blocks.append(spare)
        return True

    def most_drafts(self, start: int, end: int) -> int:
        """Return how many drafts may follow positions `start` to `end - 1` in a step."""
        return sys.maxsize

    def settle_drafts(self, table: BlockTable, num_computed: int, num_right: int) -> int:
        """Return how many tokens count as computed after a step, of which `num_computed` are behind
        the last one before its drafts, and the next `num_right` are drafts that were right.

        Called before the step's tokens are committed.
        """
        return num_computed + num_right

    def rewind(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks beyond `num_tokens` tokens, which were reserved for rejected drafts.

        KV of rejected drafts in earlier blocks stays there, unread, until it is overwritten.
        """
        num_blocks = -(-table.slot_of(num_tokens) // self.block_size)
        assert num_blocks >= table.num_committed
        if num_blocks < len(table.blocks):
            self._pool.release(table.blocks[num_blocks:])
            del table.blocks[num_blocks:]

    def _make_room(self, num_blocks: int) -> bool:
        missing = num_blocks - self._pool.num_free
        if missing > 0:
            self.evict_cold(missing)
        return num_blocks <= self._pool.num_free

    def evict_cold(self, num_blocks: int) -> None:
        """Evict up to `num_blocks` blocks, the least recently used first; demote their KV."""
        leaving: list[tuple[bytes, list[int]]] = []

        def note_leaving(encoded: bytes, blocks: list[int]) -> None:
            leaving.append((encoded, blocks))

        note = note_leaving if self._lower_tier is not None else None
        evicted = self._tree.evict(num_blocks, self._is_shared, note)
        for encoded, blocks in leaving:
            self._demote(encoded, blocks)
        self._num_evicted += len(evicted)
        num_freed = self._pool.release(evicted)
        assert num_freed == len(evicted)

    def _demote(self, encoded: bytes, blocks: list[int]) -> None:
        assert self._lower_tier is not None
        self._lower_tier.demote(encoded, blocks)

    def _is_shared(self, block: int) -> bool:
        return self._pool.references[block] > 1

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        source = table.blocks[index]
        table.blocks[index] = self._copy_of(source, table.blocks[index - 1] if index else None)
        self._pool.release([source])

    def commit(self, table: BlockTable, token_ids: TokenIds, num_computed: int) -> None:
        """Enter the full blocks of the first `num_computed` token ids in the tree.

        If the tree already has blocks for the same ids, the table uses the tree's blocks and
        releases its own. Of a private table nothing is entered: it is not the KV of the ids alone.
        A thinned one has a root of its own.
        """
        size = self.block_size
        num_full = table.slot_of(num_computed) // size if num_computed else 0
        if num_full <= table.num_committed or not (self._reuse and table.is_entered):
            return
        offered = table.blocks[table.num_committed : num_full]
        slot_ids = table.ids_of_slots(token_ids[:num_computed])
        ids = slot_ids[table.num_committed * size : num_full * size]
        result = self._tree.insert(table.node, encode_ids(ids), offered)
        self._settle(table, offered, result)
        table.num_committed = num_full

    def _settle(self, table: BlockTable, offered: list[int], result: TreeInsert) -> None:
        """Update references and locks after an insertion."""
        start = table.num_committed
        for offset, (own, kept) in enumerate(zip(offered, result.kept, strict=True)):
            self._pool.acquire([kept])
            if own != kept:
                self._pool.release([own])
                table.blocks[start + offset] = kept
        self._pool.release(result.displaced)
        self._tree.lock(result.node)
        self._tree.unlock(table.node)
        table.node = result.node

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """Return a table that shares the blocks of the first `num_tokens` tokens.

        `reserve` copies a shared block before either table writes to it.
        """
        blocks = table.blocks[: -(-table.slot_of(num_tokens) // self.block_size)]
        forked = self._hold(table.node, blocks, num_tokens, table.num_committed)
        forked.positions, forked.is_thinned = table.positions, table.is_thinned
        return forked

    def make_private(
        self, table: BlockTable, indices: Sequence[int], positions: SlotPositions
    ) -> None:
        """Make a table private: it keeps the blocks at `indices`, ascending, with `positions`.

        A fork of it stays as it is. KV that the tree has stays there until the table is released.
        """
        assert len(positions.first) <= len(indices) * self.block_size
        dropped = set(range(len(table.blocks))) - set(indices)
        self._pool.release([table.blocks[index] for index in sorted(dropped)])
        table.blocks = [table.blocks[index] for index in indices]
        table.positions, table.num_committed = positions, 0

    def release(self, table: BlockTable, token_ids: TokenIds) -> None:
        """Release the table, and keep the KV of `token_ids` in the tree for later prompts.

        `token_ids` are the tokens whose KV is complete; a partly filled last block is kept too. Of
        a private table nothing is kept, unless it is thinned.
        """
        assert not table.is_released
        self.commit(table, token_ids, len(token_ids))
        tail = table.ids_of_slots(token_ids)[table.num_committed * self.block_size :]
        if self._reuse and tail and table.is_entered:
            block = table.blocks[table.num_committed]
            is_kept, displaced = self._tree.insert_tail(table.node, encode_ids(tail), block)
            if is_kept:
                self._pool.acquire([block])
            self._pool.release(displaced)
        self._tree.unlock(table.node)
        self._pool.release(table.blocks)
        table.is_released = True

    # Images, for slower tiers

    def export(self, token_ids: TokenIds, first: int, last: int) -> Images | None:
        """Return the images of a context's blocks `first` to `last - 1`, to be released.

        It is None if one of them is evicted, and where `KvPool.export` is.
        """
        encoded = encode_ids(token_ids[: last * self.block_size])
        blocks = self._tree.blocks_of(encoded) if self._reuse else []
        return self.kv_pool.export(blocks[first:last]) if len(blocks) == last else None

    def adopt(
        self, token_ids: TokenIds, first: int, image: bytearray | memoryview | torch.Tensor
    ) -> int:
        """Enter images, in host memory or on the device, as a context's blocks from `first` on;
        return how many were entered.

        It may be fewer than given, if there is no room. It is 0 if the blocks before `first` are
        no longer cached: KV without its prefix is useless.
        """
        images, fill = self._images_of(image)
        own = images[: self.num_available]
        is_entered = self._enter(token_ids, first, len(own), lambda blocks: fill(blocks, own))
        return len(own) if is_entered else 0

    def _images_of(
        self, image: bytearray | memoryview | torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[list[int], torch.Tensor], None]]:
        """Return images as [num_images, block_bytes] uint8, and what fills blocks with such."""
        fill = self.kv_pool.unstage if isinstance(image, torch.Tensor) else self.kv_pool.upload
        if not isinstance(image, torch.Tensor):
            image = torch.frombuffer(image, dtype=torch.uint8)
        return image.view(-1, self.kv_pool.geometry.block_bytes), fill

    def _enter(
        self,
        token_ids: TokenIds,
        first: int,
        num_blocks: int,
        fill: Callable[[list[int]], None],
    ) -> bool:
        """Enter `num_blocks` blocks of a context from `first` on, which `fill` fills; false without
        room, or if the blocks before `first` are not cached.
        """
        size = self.block_size
        table = self.match([*token_ids[: first * size], -1])
        start, end = first * size, (first + num_blocks) * size
        if table.cached_len != start or not self.reserve(table, start, end):
            self.release(table, token_ids[: table.cached_len])
            return False
        num_written = start
        try:
            fill(table.blocks[first:])
            num_written = end
        finally:
            self.release(table, token_ids[:num_written])
        return True

    # Verifying cached KV

    def forget(self, token_ids: TokenIds, num_kept: int) -> None:
        """Forget the KV of a context after its first `num_kept` tokens, and of all contexts that
        continue it. On the device, nothing is forgotten if a part of that is in use.
        """
        num_blocks, encoded = num_kept // self.block_size, encode_ids(token_ids)
        self._pool.release(self._tree.cut(encoded, num_blocks))
        if self._lower_tier is not None:
            self._lower_tier.forget(encoded, num_blocks)

    def forget_moved(self, name: str | None = None) -> None:
        """Forget the moved contexts of a name, or all; those of a name in use stay.

        All are to be forgotten with any context that a user forgets, and with one whose KV was
        wrong: their tokens may have been read behind it.
        """
        self._pool.release(self._tree.cut_moved(name))

    def kv_error(
        self, table: BlockTable, token_ids: TokenIds, position: int
    ) -> torch.Tensor | None:
        """Compare the KV of the token at `position`, which a table has computed again, with the
        tree's KV; None if the tree has none. `token_ids` reach at least to the end of that token's
        block. See `KvPool.kv_error`.
        """
        index, slot = divmod(position, self.block_size)
        known = self._tree.blocks_of(encode_ids(token_ids))
        if len(known) <= index:
            return None
        return self.kv_pool.kv_error(known[index], table.blocks[index], slot)

    def zero(self, table: BlockTable, num_tokens: int) -> None:
        """Zero the KV after the first `num_tokens` tokens of a table, in blocks that only this
        table uses: it must never be read.
        """
        end = table.slot_of(num_tokens)
        for index in range(end // self.block_size, len(table.blocks)):
            if self._pool.references[table.blocks[index]] == 1:
                first_slot = max(0, end - index * self.block_size)
                self.kv_pool.zero(table.blocks[index], first_slot)

    def num_finite(self, table: BlockTable, num_tokens: int) -> int:
        """Return how many of a table's first `num_tokens` tokens have finite KV.

        The result is `num_tokens`, or the start of the first block with a NaN or infinity. A
        private table, of which nothing is kept, is not checked.
        """
        if table.positions is not None:
            return num_tokens
        num_full, rest = divmod(num_tokens, self.block_size)
        num_finite = self.kv_pool.num_finite(table.blocks[:num_full])
        if num_finite < num_full or not rest:
            return num_finite * self.block_size
        is_finite = self.kv_pool.is_finite(table.blocks[num_full], rest)
        return num_tokens if is_finite else num_full * self.block_size

    def clear(self) -> int:
        """Forget every block that no sequence uses; return how many became free."""
        before = self._pool.num_free
        lower_tier, self._lower_tier = self._lower_tier, None
        self.evict_cold(self._tree.num_blocks)
        self._lower_tier = lower_tier
        if lower_tier is not None:
            lower_tier.clear()
        return self._pool.num_free - before

    def check(self, tables: list[BlockTable] | None = None) -> None:
        """Check every invariant; if `tables` are all live tables, the reference counts too."""
        self._pool.check()
        self._tree.check()
        expected = [0] * self._pool.num_blocks
        for node in self._tree.nodes():
            for block in node.blocks:
                expected[block] += 1
                assert self._pool.references[block] > 0, f"the tree holds free block {block}"
        if self._spare_block is not None:
            expected[self._spare_block] += 1
        if tables is None:
            return
        for table in tables:
            assert not table.is_released
            assert table.num_committed * self.block_size <= table.capacity
        for block in self._holders(tables):
            expected[block] += 1
        assert self._pool.references[1:] == expected[1:], "references differ from the users found"
        assert self._tree.num_locks == len(tables), "locks differ from the live tables"

    def _holders(self, tables: list[BlockTable]) -> Iterator[int]:
        """Yield each block once for every reference that the tables hold."""
        for table in tables:
            yield from table.blocks
