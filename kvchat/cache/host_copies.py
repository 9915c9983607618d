"""HostCopies: images between the device and rows of host memory, one copy each way.

On a CUDA device the copies have a stream of their own, beside whatever is being computed; waiting
for them is the calling thread's, which is not the engine's. Knows tensors; knows no block.
"""

from collections.abc import Sequence

import torch


class HostCopies:
    """Copies to and from one device. `mark` belongs to the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

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
        """Return rows as images on the device, [len(rows), bytes]; returns when they are there."""
        if self._stream is None:
            return torch.stack(tuple(rows))
        with torch.cuda.stream(self._stream):
            shape = (len(rows), len(rows[0]))
            staging = torch.empty(shape, dtype=torch.uint8, device=self._device)
            for image, row in zip(staging, rows, strict=True):
                image.copy_(row, non_blocking=True)
        self._stream.synchronize()
        return staging


def _copy(staging: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    for image, row in zip(staging, rows, strict=True):
        row.copy_(image, non_blocking=True)
