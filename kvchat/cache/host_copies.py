"""HostCopies: images between the device and rows of host memory, one copy each way.

On a CUDA device the copies have a stream of their own, beside whatever is being computed; waiting
for them is the calling thread's, which is not the engine's. Knows tensors; knows no block.
"""

from collections import deque
from collections.abc import Sequence

import torch

# Memory of so many pieces is kept for the next ones.
_MAX_KEPT = 4


class HostCopies:
    """Copies to and from one device, of `image_bytes` each, in pieces of `piece_blocks` at most.

    `mark` belongs to the thread that computes. Staging may be taken and given back by any: on a CPU
    it is used again, for memory that is fresh from the system costs a fault a page, several times
    what copying does. A CUDA device's allocator sees to that itself.
    """

    def __init__(self, device: torch.device, image_bytes: int, piece_blocks: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._image_bytes = image_bytes
        self._piece_blocks = piece_blocks
        self._kept: deque[torch.Tensor] = deque(maxlen=_MAX_KEPT)

    def staging(self, num_blocks: int) -> torch.Tensor:
        """Return memory on the device for the images of a piece, [num_blocks, image_bytes] bytes.

        The caller's until it is given back; what it holds is anything.
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
        """Take back staging that nobody reads or writes any more."""
        if self._stream is None:
            shape = (self._piece_blocks, self._image_bytes)
            self._kept.append(staging.as_strided(shape, (self._image_bytes, 1)))

    def mark(self) -> torch.cuda.Event | None:
        """Return what tells when all that was queued so far has been computed; None on a CPU."""
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
