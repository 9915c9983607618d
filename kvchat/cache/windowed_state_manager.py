"""WindowedStateManager: windows and recurrent state of one model, kept together.

A snapshot is in blocks with window blocks, as the last window of the context that it continues. It
is of use as long as both have theirs: without, it is as if it were not there. So what keeps windows
keeps them before every place where a snapshot is wanted.
"""

from array import array
from collections.abc import Iterator, Sequence

import torch

from kvchat.cache.block_table import BlockTable, TableState, TableWindow
from kvchat.cache.device_copies import Images
from kvchat.cache.keys import TOKEN_BYTES, encode_ids
from kvchat.cache.radix_tree import Node, path_to_root
from kvchat.cache.state_manager import StateCacheManager, num_state_blocks_of
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.types import TokenIds

# In a long prompt, snapshots stand so many windows apart at least: the others may leave.
_WINDOWS_BETWEEN_MARKS = 4


class WindowedStateManager(StateCacheManager, WindowedCacheManager):
    """A StateCacheManager over a pool with window blocks. Arguments as of both."""

    def __init__(
        self, kv_pool: WindowedKvPool, state_bytes: int, max_step_tokens: int, reuse: bool = True
    ) -> None:
        WindowedCacheManager.__init__(self, kv_pool, max_step_tokens, reuse)
        self._size_snapshots(state_bytes)
        assert self.num_state_blocks == kv_pool.windows.num_state_blocks
        num_apart = _WINDOWS_BETWEEN_MARKS * self.window_blocks * self.block_size
        self._between_marks = max(self._between_marks, num_apart)

    # Contexts that end in a snapshot

    def _num_seen(self, token_ids: TokenIds, num_blocks: int) -> int:
        return self.window_blocks + self._num_of_state(token_ids, num_blocks)

    def _num_of_state(self, token_ids: TokenIds, num_blocks: int) -> int:
        """Return how many of a context's first `num_blocks` are a snapshot's, at their end."""
        return num_state_blocks_of(token_ids[num_blocks * self.block_size - 1]) if num_blocks else 0

    def _num_usable_blocks(self, blocks: Sequence[int], token_ids: TokenIds) -> int:
        num_context = len(blocks) - self._num_of_state(token_ids, len(blocks))
        num_usable = super()._num_usable_blocks(blocks[:num_context], token_ids)
        if num_usable < num_context:
            return num_usable
        return len(blocks) if self._blocks.are_there(blocks[num_context:]).all() else num_context

    def _is_whole(self, blocks: list[int]) -> bool:
        return super()._is_whole(blocks) and bool(self._blocks.are_there(blocks).all())

    def _snapshot_below(self, node: Node) -> list[int] | None:
        is_usable = self._blocks.are_there(self._last_window(node)).all()
        return super()._snapshot_below(node) if is_usable else None

    def _last_window(self, node: Node) -> list[int]:
        """Return the blocks at the end of a context that a sequence after it looks at."""
        blocks: list[int] = []
        for part in path_to_root(node):
            blocks[:0] = part.blocks
            if len(blocks) >= self.window_blocks:
                break
        return blocks[max(0, len(blocks) - self.window_blocks) :]

    # Sequences

    def start(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Match a prompt as far as the longest snapshot reaches that has its window."""
        table = super().start(token_ids)
        assert table.state is not None
        size, num_blocks = self.block_size, len(table.blocks)
        ends = {table.state.num_known // size, (len(token_ids) - 1) // size} - {0}
        table.window = TableWindow(max(0, num_blocks - self.window_blocks), tuple(ends))
        self._blocks.hold(table.blocks[table.window.first :])
        self._blocks.hold(table.state.blocks)
        return table

    def _let_go(self, state: TableState) -> None:
        self._blocks.let_go(state.blocks, is_kept=True)
        super()._let_go(state)

    def cuts(self, table: BlockTable, start: int, end: int, is_prompt_end: bool) -> list[int]:
        cuts = super().cuts(table, start, end, is_prompt_end)
        if table.state is not None and table.window is not None:
            marks = {mark // self.block_size for mark in table.state.wanted}
            table.window.ends = tuple({*table.window.ends, *marks})
        return cuts

    # Slower tiers get no snapshot that lacks window blocks: in its place they may get a whole one

    def adopt(
        self, token_ids: TokenIds, first: int, image: bytearray | memoryview | torch.Tensor
    ) -> int:
        last = first + self._images_of(image)[0].shape[0]
        num_context = last - self._num_of_state(token_ids, last)
        encoded = encode_ids(token_ids[: last * self.block_size])
        known = self._tree.blocks_of(encoded)[num_context:]
        if not self._blocks.are_there(known).all():
            self._pool.release(self._tree.cut(encoded, num_context))
        return super().adopt(token_ids, first, image)

    def export(self, token_ids: TokenIds, first: int, last: int) -> Images | None:
        num_context = last - self._num_of_state(token_ids, last)
        blocks = self._tree.blocks_of(encode_ids(token_ids[: last * self.block_size]))
        if not self._blocks.are_there(blocks[num_context:]).all():
            return None
        return super().export(token_ids, first, last)

    def _demote(self, encoded: bytes, blocks: list[int]) -> None:
        ids = array("i", encoded)
        num_state = min(self._num_of_state(ids, len(ids) // self.block_size), len(blocks))
        num_context = len(blocks) - num_state
        if not self._blocks.are_there(blocks[num_context:]).all():
            encoded = encoded[: len(encoded) - num_state * self.block_size * TOKEN_BYTES]
            blocks = blocks[:num_context]
        if blocks:
            super()._demote(encoded, blocks)

    def _window_users(self, tables: list[BlockTable]) -> Iterator[int]:
        yield from super()._window_users(tables)
        for table in tables:
            yield from table.state.blocks if table.state is not None else ()
