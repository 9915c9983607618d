"""BlockTable: the blocks of one sequence; TableState: its recurrent state, if the model has any."""

from dataclasses import dataclass, field

import torch

from kvchat.cache.radix_tree import Node
from kvchat.core.types import TokenIds
from kvchat_kernels.slot_positions import SlotPositions
from kvchat_kernels.state_buffer import StateBuffer


@dataclass(slots=True, eq=False)
class TableState:
    """The recurrent state of one table's sequence.

    `buffer` is the running state; until the first step it is None, and `blocks` (with a reference
    each) hold the snapshot that the sequence starts from, if there is one. `num_known` counts the
    leading tokens whose KV the tree had: where a prompt leaves a known context. `taken` are
    snapshots by their number of tokens, not entered in the tree yet; those in `wanted` are entered
    as soon as their tokens are committed, another at the end of the sequence. `before` is the state
    before a step with drafts; it counts while the step `is_verified`: until it is known which of
    them were right.
    """

    blocks: list[int]
    num_known: int
    buffer: StateBuffer | None = None
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    before: StateBuffer | None = None
    is_verified: bool = False


@dataclass(slots=True)
class TableWindow:
    """Which of one table's blocks have the window blocks that its sequence may look at.

    These are the blocks from number `first` on. `ends` are numbers of blocks after which another
    sequence may begin: where the prompt left a known context, and where it ended. `num_more` blocks
    behind the window are used too, while there is room.
    """

    first: int
    ends: tuple[int, ...] = ()
    num_more: int = 0


@dataclass(slots=True)
class BlockTable:
    """Blocks of one sequence, in slot order. Every block carries one reference of this table.

    # [0, num_committed)              in the tree, at or above `node`, which this table locks
    # [num_committed, len(blocks))    this table's own, or shared with a fork until written

    A shared table holds position `s` in slot `s`. A private one has `positions` of its own, and
    nothing of it is entered in the tree: `num_committed` is 0. Where it `is_thinned`, it is below
    the root of a thinned beginning, and entered by the ids of its slots (`thinned_kv.py`).
    `cached_len` counts the tokens whose KV was cached when the table was made. `state` is the
    recurrent state of its sequence, None for a model without any; `window` is None where layers
    with a window keep all that others do.
    """

    block_size: int
    node: Node
    blocks: list[int]
    cached_len: int
    num_committed: int
    is_released: bool = field(default=False)
    state: TableState | None = None
    positions: SlotPositions | None = None
    window: TableWindow | None = None
    is_thinned: bool = False

    @property
    def capacity(self) -> int:
        """The slots of the table's blocks."""
        return len(self.blocks) * self.block_size

    def slot_of(self, position: int) -> int:
        """Return the slot of a position; of a private table's, that of one still to be written."""
        return position if self.positions is None else self.positions.slot_of(position)

    @property
    def is_entered(self) -> bool:
        """Whether the tree may have its blocks."""
        return self.positions is None or self.is_thinned

    def ids_of_slots(self, token_ids: TokenIds) -> TokenIds:
        """Return the ids of the slots of a sequence's leading tokens, in slot order."""
        if self.positions is None or not token_ids:
            return token_ids
        num_slots = self.slot_of(len(token_ids))
        return [token_ids[position] for position in self.positions.of_slots(num_slots)]

    def slots(self, start: int, end: int) -> list[int]:
        """Return the pool's slots of positions `start` to `end - 1`."""
        first, last = self.slot_of(start), self.slot_of(end)
        assert 0 <= first <= last <= self.capacity
        size = self.block_size
        return [self.blocks[s // size] * size + s % size for s in range(first, last)]
