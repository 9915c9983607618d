"""BlockTable: one sequence's blocks in position order, and its place in the radix tree.

Knows position-to-slot arithmetic. Changed only by the manager that made it.
"""

from dataclasses import dataclass, field

from kvchat.cache.radix_node import Node


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence. Every block in `blocks` carries one reference of this table.

    # [0, num_committed)              in the tree, below or at `node`, which this table locks
    # [num_committed, len(blocks))    this table's own, or shared with a fork until written

    `cached_len` counts the tokens whose KV was there when the table was made.
    """

    block_size: int
    node: Node
    blocks: list[int]
    cached_len: int
    num_committed: int
    is_released: bool = field(default=False)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks at hand."""
        return len(self.blocks) * self.block_size

    def slots(self, start: int, end: int) -> list[int]:
        """Return the slots of positions `start` to `end - 1`."""
        assert 0 <= start <= end <= self.capacity
        size = self.block_size
        return [self.blocks[p // size] * size + p % size for p in range(start, end)]
