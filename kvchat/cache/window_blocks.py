"""WindowBlocks: which blocks have KV in the layers with a window.

A layer with a window sees the last tokens of a sequence only. So the KV of these layers is in
*window blocks* of their own, of which there are fewer than blocks: a block has a window block while
a sequence may look at its tokens, and as long after as there is room.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvchat.cache.block_pool import SCRATCH_BLOCK, BlockPool


class WindowBlocks:
    """The window blocks of `num_blocks` blocks: numbers 1 to `num_window_blocks - 1`.

    `of_block[block]` is the window block of a block, SCRATCH_BLOCK for one without: [num_blocks]
    int32 on the host, which batches read. Users of a block need its window block. Without a user it
    is kept for a later prompt until another block needs it: the least recently used goes first,
    those of `passing` contexts before all others. One thread owns it.
    """

    def __init__(self, num_blocks: int, num_window_blocks: int) -> None:
        self._pool = BlockPool(num_window_blocks)
        self.of_block = torch.full((num_blocks,), SCRATCH_BLOCK, dtype=torch.int32)
        self._numbers = self.of_block.numpy()
        self._num_users = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        # Blocks without users, the least recently used first.
        self._passing: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """All window blocks but the scratch block."""
        return self._pool.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """Window blocks that are free, or that no sequence uses."""
        return self._pool.num_free + len(self._passing) + len(self._idle)

    def has(self, block: int) -> bool:
        """Whether a block has a window block."""
        return bool(self._numbers[block])

    def are_there(self, blocks: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Return [len(blocks)] bool: which blocks have a window block."""
        return np.asarray(self._numbers[list(blocks)] != SCRATCH_BLOCK)

    # Giving and taking

    def make_room(self, count: int) -> bool:
        """Free window blocks without users until `count` are free; false if there are too few."""
        if count > self.num_available:
            return False
        while self._pool.num_free < count:
            least = self._passing or self._idle
            self._free(next(iter(least)))
        return True

    def give(self, blocks: Sequence[int]) -> None:
        """Give each of `blocks`, which have none, a window block with one user.

        There must be room for them. The lowest are given first: pages that were never written take
        no memory.
        """
        numbers = self._pool.allocate(len(blocks), after=SCRATCH_BLOCK)
        for block, number in zip(blocks, numbers, strict=True):
            assert not self._numbers[block]
            self._numbers[block] = number
            self._num_users[block] = 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a user to each of `blocks`, all of which have a window block."""
        for block in blocks:
            assert self._numbers[block], f"block {block} has no window block"
            self._num_users[block] += 1
            self._passing.pop(block, None)
            self._idle.pop(block, None)

    def let_go(self, blocks: Iterable[int], *, is_kept: bool, is_passing: bool = False) -> None:
        """Drop a user of each of `blocks`; a freed block, which has none, is left out.

        A window block without users is free at once, or stays while there is room if one of its
        users wanted it kept.
        """
        for block in blocks:
            if not self._numbers[block]:
                continue
            assert self._num_users[block] > 0
            self._num_users[block] -= 1
            self._is_kept[block] |= is_kept and not is_passing
            if not self._num_users[block]:
                if is_kept or self._is_kept[block]:
                    is_idle = self._is_kept[block]
                    (self._idle if is_idle else self._passing)[block] = None
                else:
                    self._free(block)

    def drop_passing(self, blocks: Iterable[int]) -> None:
        """Free the window blocks of those blocks of which the context goes on."""
        for block in blocks:
            if block in self._passing:
                self._free(block)

    def drop(self, block: int) -> None:
        """Free the window block of a block that is free itself."""
        if self._numbers[block]:
            self._free(block)

    def share(self, own: int, known: int) -> None:
        """Let the user of `own` use `known`, a block of the same tokens, in its place."""
        assert self._num_users[own] == 1
        if self._numbers[known]:
            self.hold([known])
            self._free(own)
        else:
            self._numbers[known], self._num_users[known] = self._numbers[own], 1
            self._is_kept[known] = False
            self._numbers[own] = self._num_users[own] = 0

    def _free(self, block: int) -> None:
        self._passing.pop(block, None)
        self._idle.pop(block, None)
        self._pool.release([int(self._numbers[block])])
        self._numbers[block] = self._num_users[block] = self._is_kept[block] = 0

    # Checking

    def check(self, num_users: Sequence[int] | None = None) -> None:
        """Check every invariant; with the users of each block found elsewhere, the counts too."""
        self._pool.check()
        numbers = [number for number in self._numbers.tolist() if number]
        assert len(set(numbers)) == len(numbers), "two blocks share a window block"
        assert len(numbers) + self.num_free == self.num_usable
        idle = {*self._passing, *self._idle}
        assert len(idle) == len(self._passing) + len(self._idle)
        for block in self._blocks():
            assert (self._num_users[block] == 0) == (block in idle), f"block {block}"
        assert all(self._numbers[block] for block in idle)
        assert all(self._numbers[b] for b, count in enumerate(self._num_users) if count)
        if num_users is not None:
            assert self._num_users == list(num_users), "users differ from those found"

    def _blocks(self) -> Iterator[int]:
        """Yield the blocks that have a window block."""
        yield from np.flatnonzero(self._numbers).tolist()


class WindowedBlockPool(BlockPool):
    """A BlockPool whose blocks begin with a window block, and give it back when they are free."""

    def __init__(self, num_blocks: int, windows: WindowBlocks) -> None:
        super().__init__(num_blocks)
        self._windows = windows

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take free blocks with a window block each, for which there must be room."""
        blocks = super().allocate(count, after)
        self._windows.give(blocks)
        return blocks

    def allocate_without(self, count: int, after: int | None = None) -> list[int]:
        """Take free blocks without window blocks."""
        return super().allocate(count, after)

    def release(self, blocks: Sequence[int]) -> int:
        num_freed = super().release(blocks)
        for block in blocks:
            if not self.references[block]:
                self._windows.drop(block)
        return num_freed
