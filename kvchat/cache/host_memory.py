"""HostMemory: places for block images in host RAM, taken from the system as they are needed.

Where there is a CUDA device the memory is pinned, so that a copy needs no stop on the way. Knows
bytes and slots; does not know what lies in them.
"""

import torch

# Pinned memory comes in powers of two; a segment of another size would take more than it says.
_SEGMENT_BYTES = 64 << 20
_MIN_SEGMENTS = 8


class HostMemory:
    """Up to `limit_bytes` of images of `block_bytes` each. One thread takes and gives back slots.

    `num_bytes` is what was taken from the system; it never exceeds `limit_bytes`.
    """

    def __init__(self, block_bytes: int, limit_bytes: int, is_pinned: bool) -> None:
        self.block_bytes = block_bytes
        self._is_pinned = is_pinned
        self._segment_bytes = _segment_bytes(block_bytes, limit_bytes)
        self._max_segments = limit_bytes // self._segment_bytes
        self._segments: list[torch.Tensor] = []
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """Slots there can be at most."""
        return self._max_segments * self._segment_slots

    @property
    def num_free(self) -> int:
        """Slots that could be taken now."""
        return len(self._free) + (self._max_segments - len(self._segments)) * self._segment_slots

    @property
    def num_bytes(self) -> int:
        return len(self._segments) * self._segment_bytes

    @property
    def _segment_slots(self) -> int:
        return self._segment_bytes // self.block_bytes

    def take(self) -> int | None:
        """Take a slot; None where none is free."""
        if not self._free:
            self._grow()
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Take back a slot that was taken; its bytes are the next taker's."""
        self._free.append(slot)

    def row(self, slot: int) -> torch.Tensor:
        """Return a slot's memory: [block_bytes] bytes, owned by the HostMemory."""
        segment, place = divmod(slot, self._segment_slots)
        start = place * self.block_bytes
        return self._segments[segment][start : start + self.block_bytes]

    def _grow(self) -> None:
        """Take one more segment; where the system has none left, be content with what there is."""
        if len(self._segments) >= self._max_segments:
            return
        try:
            segment = torch.empty(
                self._segment_bytes, dtype=torch.uint8, pin_memory=self._is_pinned
            )
        except (RuntimeError, MemoryError):
            self._max_segments = len(self._segments)
            return
        first = len(self._segments) * self._segment_slots
        self._segments.append(segment)
        self._free.extend(reversed(range(first, first + self._segment_slots)))


def _segment_bytes(block_bytes: int, limit_bytes: int) -> int:
    """Return a power of two that holds a block and, if it can, fits the limit several times."""
    largest = 1 << max(0, (limit_bytes // _MIN_SEGMENTS).bit_length() - 1)
    smallest = 1 << (block_bytes - 1).bit_length()
    return max(smallest, min(_SEGMENT_BYTES, largest))
