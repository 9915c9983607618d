"""StateCacheManager: a CacheManager that also keeps the state of recurrent layers.

A recurrent layer's state after a context is a snapshot of constant size. It is kept in blocks of
the KV pool, as the continuation of that context by ids that no vocabulary has: the snapshot after
`ids` is the KV of `[*ids, *state_ids]`. So the tree, host memory and the disk keep a snapshot as
they keep KV: under a chain key of its context, with checksums, within the same limits, evicted
before the context it continues. A sequence starts at the longest snapshot of its prompt.
"""

from array import array
from collections.abc import Iterator

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable, TableState
from kvchat.cache.keys import encode_ids
from kvchat.cache.kv_pool import KvGeometry, KvPool
from kvchat.cache.radix_tree import Node, path_to_root
from kvchat.core.types import TokenIds
from kvchat_kernels.state_buffer import StateBuffer

# Block i of a snapshot has this id less i in all its slots; NO_TOKEN is another.
_FIRST_STATE_ID = -2
# Going back to any earlier turn computes at most so many tokens again.
_MOST_BETWEEN = 256
# A long prompt has a snapshot at least every so many tokens, and at most every `_MOST_BETWEEN`.
_MOST_BETWEEN_MARKS = 2048
# Rows of a sequence in a step with drafts: compiled steps take no more of one (`compiled_step.py`).
_MOST_VERIFIED = 16


def state_blocks(geometry: KvGeometry, state_bytes: int) -> int:
    """Return how many blocks a snapshot of a state of so many bytes takes."""
    return -(-state_bytes // geometry.block_bytes)


def num_state_blocks_of(token_id: int) -> int:
    """Return how many blocks of a snapshot end with this id in the last slot; 0 for a token's."""
    return max(0, _FIRST_STATE_ID + 1 - token_id)


class StateCacheManager(CacheManager):
    """`state_bytes` is the size of one sequence's state. Snapshots stand at ends of blocks.

    The runner asks `cuts` where a step has to stop, and calls `take_snapshot` there. It says by
    `reads_again` whether states read drafts, and by `save_state` when one is about to.
    """

    has_state = True
    reads_again = True

    def __init__(self, kv_pool: KvPool, state_bytes: int, reuse: bool = True) -> None:
        super().__init__(kv_pool, reuse)
        self._size_snapshots(state_bytes)

    def _size_snapshots(self, state_bytes: int) -> None:
        assert state_bytes > 0
        self.state_bytes, size = state_bytes, self.block_size
        self.num_state_blocks = state_blocks(self.kv_pool.geometry, state_bytes)
        self.state_ids = array(
            "i", [_FIRST_STATE_ID - n for n in range(self.num_state_blocks) for _ in range(size)]
        )
        self._encoded_state = encode_ids(self.state_ids)
        self._first_state_block = encode_ids(self.state_ids[:size])
        # A snapshot takes the memory of so many tokens' KV: a larger one has to save more.
        weight = self.num_state_blocks * size
        self._between = max(size, min(_MOST_BETWEEN, weight))
        self._between_marks = max(_MOST_BETWEEN, min(_MOST_BETWEEN_MARKS, weight)) // size * size
        self._num_skipped = 0

    # Starting sequences

    def start(self, token_ids: TokenIds, moved_under: str = "") -> BlockTable:
        """Match a prompt as far as the longest snapshot reaches; the caller releases the table.

        Nothing is moved: a recurrent state has no tokens that could be left out.
        """
        if not self._reuse:
            table = self._hold(self._tree.root, [], 0, 0)
            table.state = TableState([], 0)
            return table
        found = self._tree.match(encode_ids(token_ids[:-1]))
        num_known = len(found.blocks) * self.block_size
        for node, num_blocks in _ends(found.node):
            blocks = self._snapshot_below(node)
            if blocks is not None:
                table = self._hold(
                    node, list(found.blocks[:num_blocks]), num_blocks * self.block_size, num_blocks
                )
                self._tree.touch_below(node, self._first_state_block)
                self._pool.acquire(blocks)
                table.state = TableState(blocks, num_known)
                return table
        table = self._hold(self._tree.root, [], 0, 0)
        table.state = TableState([], num_known)
        return table

    def num_reusable_tokens(self, token_ids: TokenIds) -> int:
        """Return how many leading tokens a sequence need not compute; changes nothing."""
        if not self._reuse:
            return 0
        node, num_blocks = self._tree.find(encode_ids(token_ids))
        for above, end in _ends(node):
            if end <= num_blocks and self._snapshot_below(above) is not None:
                return end * self.block_size
        return 0

    def _snapshot_below(self, node: Node) -> list[int] | None:
        """Return the blocks of the snapshot at a node's end; None if there is no whole one."""
        if self._first_state_block not in node.children:
            return None
        blocks = self._tree.blocks_of(self._encoded_state, node)
        return blocks if self._is_whole(blocks) else None

    def _is_whole(self, blocks: list[int]) -> bool:
        """Whether these blocks of a snapshot are all of it."""
        return len(blocks) == self.num_state_blocks

    def reserve(self, table: BlockTable, start: int, end: int) -> bool:
        """Without room for a sequence beside its snapshot, its state is loaded before its step."""
        if super().reserve(table, start, end):
            return True
        if table.state is None or not table.state.blocks:
            return False
        self.state_of(table)
        return super().reserve(table, start, end)

    def state_of(self, table: BlockTable) -> StateBuffer:
        """Return the running state of a table's sequence, loaded at the first call."""
        state = table.state
        assert state is not None
        if state.buffer is None:
            shape = (self.num_state_blocks, self.kv_pool.geometry.block_bytes)
            device = self.kv_pool.device
            if state.blocks:
                rows = self.kv_pool.stage(state.blocks)
            else:
                rows = torch.zeros(shape, dtype=torch.uint8, device=device)
            state.buffer = StateBuffer(rows.view(-1), table.cached_len)
            self._let_go(state)
        return state.buffer

    def _let_go(self, state: TableState) -> None:
        self._pool.release(state.blocks)
        state.blocks = []

    # Drafts

    def most_drafts(self, start: int, end: int) -> int:
        """Return how many drafts may follow positions `start` to `end - 1` in a step.

        Its rows reach no further than the end of a block, where there may be a snapshot. Where
        states read drafts, a step that ends there has none: no draft has touched its state.
        """
        in_block = -end % self.block_size if self._reuse else _MOST_VERIFIED
        if not in_block and not self.reads_again:
            in_block = self.block_size
        return max(0, min(in_block, _MOST_VERIFIED - (end - start)))

    def save_state(self, table: BlockTable) -> None:
        """Copy the running state before it reads drafts; `settle_drafts` ends the step."""
        state, buffer = table.state, self.state_of(table)
        assert state is not None
        if state.before is None:
            state.before = buffer.copy()
        else:
            state.before.become(buffer)
        state.is_verified = True

    def restore_state(self, table: BlockTable) -> None:
        """Take back that the state has read drafts, if their step has not been settled."""
        state = table.state
        if state is not None and state.is_verified:
            assert state.buffer is not None
            assert state.before is not None
            state.buffer, state.before = state.before, state.buffer  # a state may be megabytes
            state.is_verified = False

    def settle_drafts(self, table: BlockTable, num_computed: int, num_right: int) -> int:
        """Return how many tokens the running state is of.

        A wrong draft cannot be taken out of a state that has read it: then it is the one before the
        step, and the next step reads again what was right.
        """
        state, num_tokens = table.state, num_computed + num_right
        assert state is not None
        assert state.buffer is not None
        if not state.is_verified:
            state.buffer.cut(num_tokens)
        if state.buffer.num_tokens > num_tokens:
            self.restore_state(table)
        elif self._reuse and not (num_tokens % self.block_size or num_tokens in state.taken):
            state.buffer.read_all()
            self.take_snapshot(table)
        state.is_verified = False
        return state.buffer.num_tokens

    # Taking snapshots

    def cuts(self, table: BlockTable, start: int, end: int, is_prompt_end: bool) -> list[int]:
        """Return where a step over positions `start` to `end - 1` has to stop for a snapshot.

        In order; the last block end of every step is among them. `is_prompt_end`: the step computes
        the last token of a prompt, so its last block end is worth keeping at once. None over a
        private table: the state follows from KV that lacks tokens.
        """
        state = table.state
        if not self._reuse or state is None or table.positions is not None:
            return []
        size = self.block_size
        first_mark = (start // self._between_marks + 1) * self._between_marks
        marks = set(range(first_mark, end + 1, self._between_marks))
        if state.num_known:
            marks.add(state.num_known)  # where the prompt leaves a known context
        if is_prompt_end:
            marks.add((end - 1) // size * size)  # its last token is computed again in any case
        marks = {mark for mark in marks if start < mark <= end}
        state.wanted |= marks
        last = end // size * size
        return sorted(marks | ({last} if last > start else set()))

    def take_snapshot(self, table: BlockTable) -> None:
        """Copy the running state, which has read as far as the end of a block."""
        state = table.state
        assert state is not None
        assert state.buffer is not None
        position = state.buffer.num_read
        assert position % self.block_size == 0
        rolling = [p for p in state.taken if p not in state.wanted]
        memory = state.taken.pop(rolling[0]) if rolling else torch.empty_like(state.buffer.data)
        state.taken[position] = memory.copy_(state.buffer.data)

    def commit(self, table: BlockTable, token_ids: TokenIds, num_computed: int) -> None:
        super().commit(table, token_ids, num_computed)
        state = table.state
        if state is not None and state.wanted:
            for position in sorted(state.wanted & state.taken.keys()):
                if position <= num_computed:
                    state.wanted.discard(position)
                    self._enter_snapshot(token_ids, position, state.taken.pop(position))

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        forked = super().fork(table, num_tokens)
        running = self.state_of(table)
        assert running.num_tokens == num_tokens
        forked.state = TableState([], num_tokens, running.copy())
        return forked

    def release(self, table: BlockTable, token_ids: TokenIds) -> None:
        state, table.state = table.state, None
        if state is not None:
            self._let_go(state)
            # A snapshot never ends inside a block, so a partly filled block is of no use.
            token_ids = token_ids[: len(token_ids) // self.block_size * self.block_size]
            self.commit(table, token_ids, len(token_ids))
            for position in sorted(state.taken):
                if position <= len(token_ids):
                    self._enter_snapshot(token_ids, position, state.taken[position])
        super().release(table, token_ids)

    def _enter_snapshot(self, token_ids: TokenIds, position: int, data: torch.Tensor) -> None:
        """Enter a snapshot in the tree, if there is room; then thin those before it."""
        if not self._reuse or not position:
            return
        context = self.with_state(token_ids, position)
        encoded = encode_ids(context)
        first = position // self.block_size
        known = self._tree.blocks_of(encoded)[first:]
        if self._is_whole(known):
            return
        if known:  # a part of it was evicted
            self._pool.release(self._tree.cut(encoded, first))
        rows = data.view(self.num_state_blocks, -1)

        def fill(blocks: list[int]) -> None:
            self.kv_pool.unstage(blocks, rows)

        if self.num_available < self.num_state_blocks or not self._enter(
            context, first, self.num_state_blocks, fill
        ):
            self._num_skipped += 1
            return
        self._thin(context, position)

    def drop_states(self, table: BlockTable, token_ids: TokenIds) -> None:
        """Drop the snapshots of a sequence that failed: any of them may hold a NaN."""
        if table.state is not None:
            table.state.taken.clear()
            node, num_blocks = self._tree.find(encode_ids(token_ids))
            ends = [end for above, end in _ends(node) if self._first_state_block in above.children]
            for end in ends:
                if end <= num_blocks:
                    self._drop(token_ids, end * self.block_size)

    def with_state(self, token_ids: TokenIds, num_tokens: int) -> TokenIds:
        """Return the ids under which the snapshot after the first `num_tokens` is kept."""
        return array("i", token_ids[:num_tokens]) + self.state_ids

    def _thin(self, token_ids: TokenIds, position: int) -> None:
        """Drop snapshots before `position` whose neighbours are close enough to each other."""
        kept = [0, *self.snapshot_positions(token_ids[:position])]
        for index in range(len(kept) - 2, 0, -1):
            if kept[index + 1] - kept[index - 1] <= self._between:
                self._drop(token_ids, kept.pop(index))

    def _drop(self, token_ids: TokenIds, position: int) -> None:
        encoded = encode_ids(self.with_state(token_ids, position))
        self._pool.release(self._tree.cut(encoded, position // self.block_size))

    def snapshot_positions(self, token_ids: TokenIds) -> list[int]:
        """Return after how many tokens of a context there are snapshots, ascending."""
        if not self._reuse:
            return []
        node, num_blocks = self._tree.find(encode_ids(token_ids))
        ends = [
            end * self.block_size
            for above, end in _ends(node)
            if end <= num_blocks and self._snapshot_below(above) is not None
        ]
        return ends[::-1]

    def contexts_to_keep(self, token_ids: TokenIds) -> list[TokenIds]:
        """Return the contexts that a slower tier is to have: the KV, then each snapshot."""
        positions = self.snapshot_positions(token_ids)
        return [token_ids, *(self.with_state(token_ids, position) for position in positions)]

    def _holders(self, tables: list[BlockTable]) -> Iterator[int]:
        yield from super()._holders(tables)
        for table in tables:
            yield from table.state.blocks if table.state is not None else ()


def _ends(node: Node) -> Iterator[tuple[Node, int]]:
    """Yield a node and its ancestors without the root, each with its end's number of blocks."""
    path = [part for part in path_to_root(node) if not part.is_root]
    end = sum(len(part.blocks) for part in path)
    for part in path:
        yield part, end
        end -= len(part.blocks)
