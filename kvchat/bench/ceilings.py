"""What this machine cannot exceed, measured: memory bandwidth for reading and for copying.

Knows how to saturate memory; knows no model.
"""

from dataclasses import dataclass

import torch

from kvchat.bench.measure import timed

_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second; a copy counts what it reads and what it writes."""

    read: float
    copy: float


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Measure by a sum and by a copy of a buffer far larger than any cache; best of several."""
    num_bytes = _BYTES[device.type]
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = timed(lambda: source.sum(), _REPEATS)
    copy = timed(lambda: target.copy_(source), _REPEATS)
    return Bandwidth(num_bytes / min(read.values), 2 * num_bytes / min(copy.values))
