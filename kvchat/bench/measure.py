"""How things are measured: warm-up, repeats, medians; the clock and what it is read around.

Knows nothing of what is measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing, in one unit."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The range of the values as a share of their median: how quiet the machine was."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


def timed(function: Callable[[], object], repeats: int, warm_up: int = 1) -> Sample:
    """Return the seconds `function` takes, waiting for the device before each reading."""
    for _ in range(warm_up):
        function()
    return Sample(tuple(_seconds(function) for _ in range(repeats)))


def alternated(
    one: Callable[[], float], other: Callable[[], float], repeats: int
) -> tuple[Sample, Sample]:
    """Measure two things in turn, so that a machine that changes its speed changes it for both.

    Each returns its own measurement. Neither has a warm-up but its first call, which is dropped.
    """
    one(), other()
    pairs = [(one(), other()) for _ in range(repeats)]
    return Sample(tuple(a for a, _ in pairs)), Sample(tuple(b for _, b in pairs))


def _seconds(function: Callable[[], object]) -> float:
    wait_for_device()
    start_s = time.perf_counter()
    function()
    wait_for_device()
    return time.perf_counter() - start_s


def wait_for_device() -> None:
    """Wait until the GPU has done what it was given; returns at once without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
