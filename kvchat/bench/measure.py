"""How things are measured: warm-up, repeats, medians, and what this machine cannot exceed.

The ceilings are memory bandwidth and the rate of products, both measured; a GPU's bandwidth is also
known from its datasheet.
"""

import statistics
import time
from collections.abc import Callable, Iterator
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


_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 7
# Bytes a second that makers promise, by the name torch has for a device.
_DATASHEETS = {
    "NVIDIA B200": 8.0e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second; a copy counts what it reads and what it writes.

    `datasheet` is what the device's maker promises, None where that is not known.
    """

    read: float
    copy: float
    datasheet: float | None = None

    def ceilings(self) -> Iterator[tuple[str, float]]:
        """Yield each by a name to be read in a table."""
        yield "reading, measured", self.read
        yield "a copy, measured", self.copy
        if self.datasheet is not None:
            yield "the datasheet", self.datasheet

    def __str__(self) -> str:
        named = [f"{name} {rate / 1e9:,.1f} GB/s" for name, rate in self.ceilings()]
        return f"bandwidth: {', '.join(named)}"


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Measure by a sum and by a copy of a buffer far larger than any cache; best of several."""
    num_bytes = _BYTES[device.type]
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = timed(lambda: source.sum(), _REPEATS)
    copy = timed(lambda: target.copy_(source), _REPEATS)
    datasheet = None
    if device.type == "cuda":
        datasheet = _DATASHEETS.get(torch.cuda.get_device_name(device))
    return Bandwidth(num_bytes / min(read.values), 2 * num_bytes / min(copy.values), datasheet)


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the multiplications and additions a second of one large product; best of several."""
    size = _PRODUCT_SIZE[device.type]
    one = torch.randn(size, size, dtype=dtype, device=device)
    other = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / min(timed(lambda: one @ other, _REPEATS).values)
