"""Copies of images between a device and host memory, which the thread that computes does not wait
for.

A CUDA device copies by streams of its own. HostCopies is for the host tier, whose rows are pinned.
ImageCopies is for tiers that read and write plain memory: their images pass through two
PinnedRings, one for each direction, because a copy from the device waits for the computation.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

# Staging buffers kept for reuse.
_MAX_KEPT = 4
# Bytes of a pack and of a slot of a ring, if a block's image is not larger.
PACK_BYTES = 4 << 20
# Slots for images that wait to be written, and for images on their way to the device. Larger slots
# are fewer, for no program may page out what is pinned; but one copies while another is written.
_DOWN_SLOTS, _UP_SLOTS, _FEWEST_SLOTS = 17, 4, 2


class Mark(Protocol):
    """The end of a queued copy, as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the copy is over."""

    def synchronize(self) -> None:
        """Wait until the copy is over."""


class CopyStream(Protocol):
    """A device's queue of copies beside its computation. Its thread is the one that computes."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return new host memory that the device can copy from and to, [num_bytes] uint8."""

    def down(self, images: torch.Tensor, memory: torch.Tensor) -> Mark:
        """Queue a copy of `images` to pinned memory, after all computation queued so far.

        The caller may drop `images` at once, and reads the memory only after the mark.
        """

    def up(self, memory: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Queue a copy of pinned memory to new memory on the device; return that and the mark.

        Computation that is queued later sees the copy. The memory must not change before the mark.
        """


class CudaCopyStream:
    """The CopyStream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory, or plain memory if there is none left: then the copies wait."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(num_bytes, dtype=torch.uint8)

    def down(self, images: torch.Tensor, memory: torch.Tensor) -> Mark:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            memory.copy_(images, non_blocking=True)
        images.record_stream(self._stream)
        return self._mark()

    def up(self, memory: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        with torch.cuda.stream(self._stream):
            images = torch.empty(memory.shape, dtype=torch.uint8, device=self._device)
            images.copy_(memory, non_blocking=True)
        mark = self._mark()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(mark)
        images.record_stream(computing)
        return images, mark

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark


class Images(Protocol):
    """Images of blocks that leave the device."""

    def read(self) -> memoryview:
        """Wait until the images are in host memory; return them, valid until `release`."""

    def release(self) -> None:
        """End their use; once, from any thread."""


class _Slot(NamedTuple):
    """Pinned memory of a ring, and the mark after which the device does not use it."""

    memory: torch.Tensor
    mark: Mark | None


class PinnedImages:
    """Images on their way to pinned memory. They hold a slot of a ring until `release`."""

    def __init__(
        self, ring: "PinnedRing", memory: torch.Tensor, mark: Mark, shape: torch.Size
    ) -> None:
        self._ring = ring
        self._memory = memory
        self._mark = mark
        self._num_bytes = shape.numel()

    def read(self) -> memoryview:
        """Wait until the images are there and return them; valid until `release`. Any thread."""
        self._mark.synchronize()
        return self._memory[: self._num_bytes].numpy().data

    def release(self) -> None:
        """Give the slot back; once, from any thread."""
        self._ring.give_back(_Slot(self._memory, self._mark))


class PinnedRing:
    """Up to `num_slots` slots of pinned memory of `slot_bytes` each, allocated when first needed.

    One thread calls `down` or `up`, the one that computes; any thread gives slots back.
    """

    def __init__(self, stream: CopyStream, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._stream = stream
        self._num_left = num_slots
        self._free: deque[_Slot] = deque()  # the one that was given back first is used first

    def down(self, images: torch.Tensor) -> PinnedImages | None:
        """Queue a copy of images on the device; None if no slot is free. Waits for nothing."""
        assert images.numel() <= self.slot_bytes
        slot = self._take(may_wait=False)
        if slot is None:
            return None
        try:
            mark = self._stream.down(images.flatten(), slot.memory[: images.numel()])
        except BaseException:
            self.give_back(slot)
            raise
        return PinnedImages(self, slot.memory, mark, images.shape)

    def up(self, images: torch.Tensor) -> torch.Tensor:
        """Queue a copy of images in host memory to the device; return them there.

        The caller may reuse its memory at once. Waits only if every slot is under way, until the
        oldest copy is over.
        """
        slot = self._take(may_wait=True)
        assert slot is not None, "an upload holds its slot within this call only"
        memory = slot.memory[: images.numel()]
        memory.copy_(images.flatten())
        try:
            there, mark = self._stream.up(memory)
        except BaseException:  # the device has no memory left, for one: a slot is not lost by it
            self.give_back(slot)
            raise
        self.give_back(_Slot(slot.memory, mark))
        return there.view(images.shape)

    def give_back(self, slot: _Slot) -> None:
        """Let a slot be used again after its mark."""
        self._free.append(slot)

    def _take(self, may_wait: bool) -> _Slot | None:
        """Return a slot that the device does not use, and rather a new one than wait."""
        is_idle = bool(self._free) and (self._free[0].mark is None or self._free[0].mark.query())
        if not is_idle and self._num_left:
            self._num_left -= 1
            return _Slot(self._stream.pinned(self.slot_bytes), None)
        if not self._free or not (is_idle or may_wait):
            return None
        slot = self._free.popleft()
        if slot.mark is not None:
            slot.mark.synchronize()
        return slot


class ImageCopies:
    """Copies of blocks' images of `image_bytes` between a device and plain host memory."""

    def __init__(self, downwards: CopyStream, upwards: CopyStream, image_bytes: int) -> None:
        self.slot_blocks = max(1, PACK_BYTES // image_bytes)
        slot_bytes = self.slot_blocks * image_bytes
        self._num_down = _slots(_DOWN_SLOTS, slot_bytes)
        self.downwards = PinnedRing(downwards, slot_bytes, self._num_down)
        self.upwards = PinnedRing(upwards, slot_bytes, _slots(_UP_SLOTS, slot_bytes))

    @property
    def waiting_bytes(self) -> int:
        """What may wait to be written: all slots but the one that is being written."""
        return (self._num_down - 1) * self.downwards.slot_bytes


def _slots(most: int, slot_bytes: int) -> int:
    """Return how many slots take no more memory than `most` of a pack each, or the fewest."""
    return max(_FEWEST_SLOTS, min(most, most * PACK_BYTES // slot_bytes))


class HostCopies:
    """Copies to and from one device, of `image_bytes` each, in pieces of `piece_blocks` at most.

    `mark` belongs to the thread that computes. Staging may be taken and given back by any: on a CPU
    it is used again, for memory that is fresh from the system costs a fault a page, several times
    the time of the copy. The allocator of a CUDA device reuses memory by itself.
    """

    def __init__(self, device: torch.device, image_bytes: int, piece_blocks: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._image_bytes = image_bytes
        self._piece_blocks = piece_blocks
        self._kept: deque[torch.Tensor] = deque(maxlen=_MAX_KEPT)

    def staging(self, num_blocks: int) -> torch.Tensor:
        """Return memory on the device for the images of a piece, [num_blocks, image_bytes] bytes.

        The caller owns it until `give_back`; its contents are undefined.
        """
        assert num_blocks <= self._piece_blocks
        if self._stream is not None:
            shape = (num_blocks, self._image_bytes)
            return torch.empty(shape, dtype=torch.uint8, device=self._device)
        try:
            whole = self._kept.pop()
        except IndexError:
            whole = torch.empty((self._piece_blocks, self._image_bytes), dtype=torch.uint8)
        return whole[:num_blocks]

    def give_back(self, staging: torch.Tensor) -> None:
        """Take back staging memory that no thread uses any more."""
        if self._stream is None:
            shape = (self._piece_blocks, self._image_bytes)
            self._kept.append(staging.as_strided(shape, (self._image_bytes, 1)))

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all work queued so far on the current stream; None on a CPU."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def down(
        self, staging: torch.Tensor, rows: Sequence[torch.Tensor], mark: torch.cuda.Event | None
    ) -> None:
        """Copy images on the device, complete at `mark`, to rows; returns when they are there."""
        if self._stream is None:
            _copy(staging, rows)
            return
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            _copy(staging, rows)
        self._stream.synchronize()

    def up(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return rows as images on the device, [len(rows), bytes]; returns when they are there.

        They lie in staging, to be given back.
        """
        if self._stream is None:
            staging = self.staging(len(rows))
            torch.stack(tuple(rows), out=staging)
            return staging
        with torch.cuda.stream(self._stream):
            staging = self.staging(len(rows))
            for image, row in zip(staging, rows, strict=True):
                image.copy_(row, non_blocking=True)
        self._stream.synchronize()
        return staging


def _copy(staging: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    for image, row in zip(staging, rows, strict=True):
        row.copy_(image, non_blocking=True)
