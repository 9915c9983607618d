"""Measurement: warm-up, repeats, medians, and the machine's ceilings.

The ceilings are the memory bandwidth and the rate of matrix products. Both are measured; for known
GPUs the datasheet's bandwidth is added.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one quantity, in one unit. There is at least one."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median: shows how stable the machine was."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


def timed(function: Callable[[], object], repeats: int, warm_up: int = 1) -> Sample:
    """Return the seconds per call of `function`; waits for the device before each clock reading."""
    for _ in range(warm_up):
        function()
    return Sample(tuple(_seconds(function) for _ in range(repeats)))


def alternated(
    one: Callable[[], float], other: Callable[[], float], repeats: int
) -> tuple[Sample, Sample]:
    """Measure two functions alternately, so that a change of machine speed affects both.

    Each function returns its own measurement. The first call of each is a warm-up and is dropped.
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
    """Wait until the GPU has finished its queued work; return at once without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
_SMALLEST_PRODUCT = 256
_LONG_PRODUCT_S = 0.05
_REPEATS = 7
# Bandwidth in bytes per second from the datasheets, by torch's device name.
_DATASHEETS = {
    "NVIDIA B200": 8.0e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth in bytes per second; a copy counts both reads and writes.

    `datasheet` is the manufacturer's figure, None if unknown.
    """

    read: float
    copy: float
    datasheet: float | None = None

    def ceilings(self) -> Iterator[tuple[str, float]]:
        """Yield (name for a table, bytes per second) of each known bandwidth."""
        yield "reading, measured", self.read
        yield "a copy, measured", self.copy
        if self.datasheet is not None:
            yield "the datasheet", self.datasheet

    def __str__(self) -> str:
        named = [f"{name} {rate / 1e9:,.1f} GB/s" for name, rate in self.ceilings()]
        return f"bandwidth: {', '.join(named)}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`products` is in FLOP per second."""

    bandwidth: Bandwidth
    products: float

    @property
    def product(self) -> tuple[str, float]:
        """The rate of products, with its name for a table."""
        return "one large product, measured", self.products


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Measure a sum and a copy of a buffer far larger than any cache; the best of several runs."""
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
    """Return FLOP per second of one large matrix product; the best of several runs.

    Sizes grow until a product takes `_LONG_PRODUCT_S`: a CPU without instructions for a dtype may
    be a hundred times slower than others.
    """
    size = min(_PRODUCT_SIZE[device.type], _SMALLEST_PRODUCT)
    while True:
        one, other = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        product = functools.partial(torch.matmul, one, other)
        if size >= _PRODUCT_SIZE[device.type] or min(timed(product, 1).values) > _LONG_PRODUCT_S:
            return 2 * size**3 / min(timed(product, _REPEATS).values)
        size *= 2
