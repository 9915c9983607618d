"""Copies numbers from the host to a device without waiting for the device.

`torch.tensor(..., device="cuda")` copies from unpinned memory, and returns only after all earlier
queued work, such as the current step, has finished.
"""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers, or rows of numbers, as a new tensor on `device`.

    On a CUDA device the copy is queued on the current stream, so only work queued after it sees the
    values. Must not be called while a graph is captured.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    # torch's pinned-memory allocator does not reuse the memory before the copy has finished.
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def each_on_device(
    lists: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return a tensor of each list, as `on_device` makes them."""
    return [on_device(numbers, dtype, device) for numbers in lists]
