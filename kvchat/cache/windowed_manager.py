"""WindowedCacheManager: a CacheManager whose sequences hold a window in the layers with a window.

A sequence uses the window blocks (`window_blocks.py`) of the blocks that its next token may look
at, and lets go of those behind as it proceeds. Window blocks are kept for later prompts at the ends
of contexts: the last window before the end of a prompt, before the end of an answer, and before the
place where a prompt left a known context. A match ends where all layers have what the next token
looks at; the tokens after it come from a slower tier, or are computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvchat.cache.block_manager import CacheManager, CacheStatus
from kvchat.cache.block_pool import BlockPool
from kvchat.cache.block_table import BlockTable, TableWindow
from kvchat.cache.keys import TOKEN_BYTES, encode_ids
from kvchat.cache.radix_tree import Node, TreeInsert
from kvchat.cache.window_blocks import WindowedBlockPool
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat.core.types import TokenIds
from kvchat_kernels.slot_positions import EMPTY, SlotPositions


def most_in_use(windows: Windows, max_step_tokens: int, block_size: int) -> int:
    """Return how many window blocks one sequence uses at the most: a window, a step, and the
    snapshot that it begins with.
    """
    num_seen = windows.num_blocks(block_size) + windows.num_state_blocks
    return num_seen + -(-max_step_tokens // block_size) + 1


class WindowedCacheManager(CacheManager):
    """`max_step_tokens` bounds the tokens of one sequence in a step: all are in window blocks."""

    kv_pool: WindowedKvPool
    _pool: WindowedBlockPool

    def __init__(self, kv_pool: WindowedKvPool, max_step_tokens: int, reuse: bool = True) -> None:
        self._blocks = kv_pool.blocks
        super().__init__(kv_pool, reuse)
        self.window_blocks = kv_pool.windows.num_blocks(self.block_size)
        self._most_in_use = most_in_use(kv_pool.windows, max_step_tokens, self.block_size)

    def _new_block_pool(self) -> BlockPool:
        return WindowedBlockPool(self.kv_pool.num_blocks, self._blocks)

    def status(self) -> CacheStatus:
        return replace(
            super().status(),
            num_window_blocks=self._blocks.num_usable - (self._spare_block is not None),
            num_free_window_blocks=self._blocks.num_free,
            window_block_bytes=self.kv_pool.window_block_bytes,
        )

    def has_room(self, table: BlockTable, num_tokens: int, num_spare: int) -> bool:
        if not super().has_room(table, num_tokens, num_spare):
            return False
        num_used = len(table.blocks) - _window_of(table).first
        most = min(-(-num_tokens // self.block_size), self._most_in_use)
        return max(0, most - num_used) + num_spare <= self._blocks.num_available

    # Matching

    def _num_seen(self, token_ids: TokenIds, num_blocks: int) -> int:
        """Return how many of a context's first `num_blocks` need window blocks for it to go on."""
        return self.window_blocks

    def _num_usable_blocks(self, blocks: Sequence[int], token_ids: TokenIds) -> int:
        """Return after how many of a context's blocks all layers have what the next token sees."""
        missing = np.flatnonzero(~self._blocks.are_there(blocks))
        if not len(missing) or len(blocks) - 1 - missing[-1] >= self.window_blocks:
            return len(blocks)
        num_before = np.diff(missing, prepend=-1) - 1  # with window blocks, before each missing one
        ends = missing[num_before >= self.window_blocks]
        return int(ends[-1] if len(ends) else missing[0])

    def match(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        if not self._reuse:
            return super().match(token_ids, moved_under)
        encoded, root = encode_ids(token_ids[:-1]), self._root(moved_under)
        known = self._tree.match(encoded, root)
        num_known, end = len(known.blocks), self._num_usable_blocks(known.blocks, token_ids)
        if end < num_known:
            known = self._tree.match(encoded[: end * self.block_size * TOKEN_BYTES], root)
        table = self._hold(known.node, list(known.blocks), end * self.block_size, end)
        ends = (num_known,) if num_known else ()
        table.window = TableWindow(max(0, end - self._num_seen(token_ids, end)), ends)
        self._blocks.hold(table.blocks[table.window.first :])
        if known.head is not None and self._blocks.has(known.head):
            self._blocks.hold([known.head])
            self._copy_head(table, known.head, known.head_len)
            self._blocks.let_go([known.head], is_kept=True)
        return table

    def match_without_windows(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        return super().match(token_ids, moved_under)

    def start(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Return the table that a sequence with this prompt starts from."""
        table = self.match(token_ids, moved_under)
        last = (len(token_ids) - 1) // self.block_size
        _window_of(table).ends += (last,)
        return table

    def _hold(
        self, node: Node, blocks: list[int], cached_len: int, num_committed: int
    ) -> BlockTable:
        """Return a table that uses no window block yet."""
        table = super()._hold(node, blocks, cached_len, num_committed)
        table.window = TableWindow(len(blocks))
        return table

    # Growing

    def _make_room(self, num_blocks: int) -> bool:
        """Make room for blocks that each have a window block."""
        return self._make_room_without(num_blocks) and self._blocks.make_room(num_blocks)

    def _make_room_without(self, num_blocks: int) -> bool:
        return super()._make_room(num_blocks)

    def extend(self, table: BlockTable, num_blocks: int, first_window: int) -> bool:
        num_windows = num_blocks - first_window
        if not (self._make_room_without(num_blocks) and self._blocks.make_room(num_windows)):
            return False
        self._extend(table, num_blocks, num_windows)
        _window_of(table).ends = (num_blocks - 1,)
        return True

    def hold_windows(self, table: BlockTable) -> int:
        window = _window_of(table)
        missing = np.flatnonzero(~self._blocks.are_there(table.blocks[: window.first]))
        first = int(missing[-1]) + 1 if len(missing) else 0
        self._blocks.hold(table.blocks[first : window.first])
        window.first = first
        return first

    def reserve(self, table: BlockTable, start: int, end: int) -> bool:
        """Without room, a table lets go of what it uses behind its window."""
        if super().reserve(table, start, end):
            return True
        window = _window_of(table)
        if not window.num_more:
            return False
        window.num_more = 0
        self._let_go_behind(table, table.slot_of(start) // self.block_size - self.window_blocks)
        return super().reserve(table, start, end)

    def hold_more_windows(self, table: BlockTable, num_tokens: int) -> None:
        _window_of(table).num_more = -(-num_tokens // self.block_size)

    def first_computable(self, table: BlockTable) -> int:
        num_slots = _window_of(table).first * self.block_size
        if not num_slots:
            return 0
        own = table.positions
        last_behind = num_slots - 1 if own is None else max(own.of_slots(num_slots))
        return last_behind + self.kv_pool.windows.num_tokens

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        source = table.blocks[index]
        super()._copy_on_write(table, index)
        self._blocks.let_go([source], is_kept=True)

    def use_spare_block(self, table: BlockTable) -> bool:
        source = table.blocks[-1]
        if not super().use_spare_block(table):
            return False
        self._blocks.let_go([source], is_kept=True)
        self._blocks.hold(table.blocks[-1:])
        return True

    def rewind(self, table: BlockTable, num_tokens: int) -> None:
        num_blocks = -(-table.slot_of(num_tokens) // self.block_size)
        self._blocks.let_go(table.blocks[num_blocks:], is_kept=False)
        super().rewind(table, num_tokens)

    def commit(self, table: BlockTable, token_ids: TokenIds, num_computed: int) -> None:
        """Enter full blocks in the tree, and let go of the window blocks behind the window."""
        super().commit(table, token_ids, num_computed)
        # Slots of a private table are closer than positions, so those of a window are among these.
        last = table.slot_of(num_computed) // self.block_size if num_computed else 0
        num_held = self._num_seen(token_ids, last) + _window_of(table).num_more
        self._let_go_behind(table, last - num_held)

    def _let_go_behind(self, table: BlockTable, first: int) -> None:
        """Let go of the window blocks of a table's blocks before number `first`."""
        window = _window_of(table)
        for index in range(window.first, first):
            is_kept = self._reuse and self._is_before_an_end(index, window.ends)
            self._blocks.let_go([table.blocks[index]], is_kept=is_kept)
        window.first = max(window.first, first)

    def _is_before_an_end(self, index: int, ends: tuple[int, ...]) -> bool:
        """Whether a sequence that begins at one of `ends` looks at the block `index`.

        The last token of a prompt is computed again, so it may begin a block earlier; it may share
        the beginning of the block after the end.
        """
        return any(end - self.window_blocks <= index + 1 <= end + 1 for end in ends)

    def _settle(self, table: BlockTable, offered: list[int], result: TreeInsert) -> None:
        start = table.num_committed
        for offset, (own, known) in enumerate(zip(offered, result.kept, strict=True)):
            if own != known and start + offset >= _window_of(table).first:
                self._blocks.share(own, known)
        super()._settle(table, offered, result)

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        window = _window_of(table)
        assert window.first <= max(
            0, table.slot_of(num_tokens) // self.block_size - self.window_blocks
        )
        forked = super().fork(table, num_tokens)
        forked.window = replace(window)
        self._blocks.hold(forked.blocks[window.first :])
        return forked

    def make_private(
        self, table: BlockTable, indices: Sequence[int], positions: SlotPositions
    ) -> None:
        """Make a table private; tokens behind the window must stay behind it."""
        window = _window_of(table)
        first = sum(index < window.first for index in indices)
        behind = positions.first[: first * self.block_size]
        lowest = positions.next_position - self.kv_pool.windows.num_tokens + 1
        assert all(position == EMPTY or position < lowest for position in behind)
        dropped = [i for i in range(window.first, len(table.blocks)) if i not in set(indices)]
        self._blocks.let_go([table.blocks[index] for index in dropped], is_kept=True)
        super().make_private(table, indices, positions)
        window.first = first

    def release(self, table: BlockTable, token_ids: TokenIds) -> None:
        super().release(table, token_ids)
        self._blocks.let_go(table.blocks[_window_of(table).first :], is_kept=True)

    # Images, for slower tiers

    def adopt(
        self, token_ids: TokenIds, first: int, image: bytearray | memoryview | torch.Tensor
    ) -> int:
        """Enter images as CacheManager does.

        Only the last of them get window blocks, as many as a sequence that goes on after them
        looks at; none gets one whose image has nothing for it.
        """
        images, fill = self._images_of(image)
        num_blocks = min(len(images), self.num_available)
        images, end = images[:num_blocks], first + num_blocks
        num_seen = self._num_seen(token_ids, end)
        num_windows = self._num_with_windows(images[max(0, num_blocks - num_seen) :])
        known = self._tree.match(encode_ids(token_ids[: first * self.block_size]))
        if not num_blocks or len(known.blocks) != first or not self._reuse:
            return 0
        table = self._hold(known.node, list(known.blocks), first * self.block_size, first)
        num_written = 0
        try:
            if self._make_room_without(num_blocks) and self._blocks.make_room(num_windows):
                self._extend(table, num_blocks, num_windows)
                fill(table.blocks[first:], images)
                num_written = end
        finally:
            super().release(table, token_ids[: max(first, num_written) * self.block_size])
            own = table.blocks[_window_of(table).first :]
            self._blocks.let_go(own, is_kept=True, is_passing=True)
        if num_written:  # what came before is behind the window now
            self._blocks.drop_passing(table.blocks[: max(0, end - num_seen)])
        return num_blocks if num_written else 0

    def _num_with_windows(self, images: torch.Tensor) -> int:
        """Return how many of the last images have KV in the layers with a window."""
        missing = np.flatnonzero(~self.kv_pool.has_windows(images))
        return len(images) - 1 - int(missing[-1]) if len(missing) else len(images)

    def _extend(self, table: BlockTable, num_blocks: int, num_windows: int) -> None:
        """Add blocks to a table, of which the last get window blocks; there is room for them."""
        num_without = num_blocks - num_windows
        blocks = table.blocks
        blocks += self._pool.allocate_without(num_without, blocks[-1] if blocks else None)
        table.window = TableWindow(len(blocks))
        blocks += self._pool.allocate(num_windows, blocks[-1] if blocks else None)

    def check(self, tables: list[BlockTable] | None = None) -> None:
        super().check(tables)
        if tables is None:
            self._blocks.check()
            return
        num_users = [0] * self._pool.num_blocks
        for block in self._window_users(tables):
            num_users[block] += 1
        if self._spare_block is not None:
            num_users[self._spare_block] += 1
        self._blocks.check(num_users)

    def _window_users(self, tables: list[BlockTable]) -> Iterator[int]:
        """Yield each block once for every use of its window block by a table."""
        for table in tables:
            yield from table.blocks[_window_of(table).first :]


def _window_of(table: BlockTable) -> TableWindow:
    assert table.window is not None
    return table.window
