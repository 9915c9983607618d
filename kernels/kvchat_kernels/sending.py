"""How numbers of the host's get to a device that is still computing: without waiting for it.

torch.tensor on a CUDA device copies from memory that is not pinned, and returns once everything
that was queued before is done: a step's results, say. Knows devices.
"""

from collections.abc import Sequence
from typing import Any

import torch


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers, or rows of them, as a new tensor on `device`, for whatever is queued next.

    On a CUDA device this is only queued, on the current stream. Not for steps that are captured.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    # The pinned memory is not used again before it was read: its allocator sees to that.
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def each_on_device(
    lists: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return a tensor of each list, as `on_device` makes them."""
    return [on_device(numbers, dtype, device) for numbers in lists]
