"""Slots and positions of a sequence, and SlotPositions, which tells one from the other.

A slot is room for the KV of one token. The slots of a sequence are numbered through the blocks of
its table: slot `s` is that at offset `s % block_size` of block `table[s // block_size]`. A position
is where a token stands in its sequence: rotation, window, chunk and the causal rule look at
positions only.

In a shared table slot `s` holds position `s`. A private table has positions of its own: it has
fewer slots than its sequence has positions, or slots without a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

EMPTY = -1


@dataclass(frozen=True, slots=True)
class SlotPositions:
    """The positions of a private table's slots.

    first           the positions of the table's first slots, ascending; EMPTY in a slot without a
                    token, which is never read
    next_position   that of the slot after these. Later tokens have one slot each, in order
    """

    first: tuple[int, ...]
    next_position: int

    def __post_init__(self) -> None:
        filled = [position for position in self.first if position != EMPTY]
        after = [*filled[1:], self.next_position] if filled else []
        assert self.next_position >= 0
        assert all(0 <= low < high for low, high in zip(filled, after, strict=True))

    def slot_of(self, position: int) -> int:
        """Return the slot of a position from `next_position` on."""
        assert position >= self.next_position
        return position - self.next_position + len(self.first)

    def of_slots(self, num_slots: int) -> Iterator[int]:
        """Yield the positions of the first `num_slots` slots, of which there may be any number."""
        yield from self.first[:num_slots]
        yield from range(
            self.next_position, self.next_position + max(0, num_slots - len(self.first))
        )
