"""BlockPool: which blocks of the device are free, and how many users each has."""

from collections.abc import Iterable, Sequence
from operator import not_

from kvchat.core.errors import GenerationError

SCRATCH_BLOCK = 0


class OutOfBlocks(GenerationError):
    """An allocation needs more blocks than are free."""


class BlockPool:
    """Reference counts of blocks 1 to `num_blocks - 1`; block 0 is scratch, never allocated.

    `references[block]` is the count of a block, which only the pool changes; 0 if it is free.
    Padding rows write to the scratch block. One thread owns a pool.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the scratch block and one more"
        self.references = [0] * num_blocks
        self.references[SCRATCH_BLOCK] = 1
        # One byte per block, 1 if it is free: bytearray.find finds a free block.
        self._free = bytearray(b"\x00" + b"\x01" * (num_blocks - 1))
        self._num_free = num_blocks - 1
        self._cursor = 1

    @property
    def num_blocks(self) -> int:
        """All blocks, the scratch block included."""
        return len(self.references)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free blocks with one reference each.

        Prefers the blocks that follow `after`, then runs of adjacent blocks: attention reads a run
        without copying it. Raises OutOfBlocks if fewer are free; then nothing changes.
        """
        if count > self._num_free:
            raise OutOfBlocks(f"{count} cache blocks are needed and {self._num_free} are free.")
        if after is not None:
            self._cursor = after + 1
        blocks = [self._take_next() for _ in range(count)]
        self._num_free -= count
        return blocks

    def _take_next(self) -> int:
        block = self._free.find(1, self._cursor)
        if block < 0:
            block = self._free.find(1)
        self._free[block] = 0
        self.references[block] = 1
        self._cursor = block + 1
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, all of which are in use."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is free"
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Drop one reference from each of `blocks`; return how many became free."""
        num_freed = 0
        for block in blocks:
            assert block != SCRATCH_BLOCK
            assert self.references[block] > 0, f"block {block} is free"
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = 1
                num_freed += 1
        self._num_free += num_freed
        return num_freed

    def check(self) -> None:
        """Check every invariant; raises AssertionError."""
        assert self.references[SCRATCH_BLOCK] == 1
        assert min(self.references) >= 0
        unused = bytes(map(not_, self.references))
        assert self._free == unused, "a block with references is free, or one without is not"
        assert self._num_free == sum(unused)
