"""When a kernel counts as exact, and memory that shows what a kernel forgot to write.

The rule of tolerance is FlashAttention's: an error against a float64 oracle at most twice that of
plain arithmetic in the same dtype, plus one unit in the last place of the largest number. In
float32 a GPU's product without tensor cores adds one term after another, where plain arithmetic
adds parts of a sum: measured 23 units over 4,096 terms on an H200. It has 32 units, and tf32, which
such a product must not be, has thousands.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PLACES_ONE_BY_ONE = 32
EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_as_exact(out: torch.Tensor, plain: torch.Tensor, oracle: torch.Tensor) -> None:
    """Hold `out` to the rule; `plain` is the same in plain arithmetic, `oracle` in float64."""
    assert out.dtype == plain.dtype, (out.dtype, plain.dtype)
    assert out.shape == oracle.shape, (out.shape, oracle.shape)
    if not out.numel():
        return
    assert torch.isfinite(out).all(), "something was not written, or a NaN was read"
    oracle = oracle.double()
    allowed = (plain.double() - oracle).abs().max()
    error = (out.double() - oracle).abs().max()
    ulp = EPSILON[out.dtype] * oracle.abs().max()
    if out.is_cuda and out.dtype == torch.float32:
        ulp *= _PLACES_ONE_BY_ONE
    message = f"error {error:.3g}, plain arithmetic {allowed:.3g}, last place {ulp:.3g}"
    assert error <= 2 * allowed + ulp, message


def assert_same_bits(out: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare two tensors byte by byte: a NaN equals itself."""
    assert out.dtype == expected.dtype, (what, out.dtype, expected.dtype)
    same = out.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    assert same.all(), f"{what}: {int((~same).sum())} bytes differ"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what torch allocates without filling it: with NaN, or with integers that fit nowhere."""
    plain_empty, plain_new_empty = torch.empty, torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        poison = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
        return tensor.fill_(poison)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poisoned(plain_empty(*args, **kwargs))

    def new_empty(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return poisoned(plain_new_empty(self, *args, **kwargs))

    torch.empty, torch.Tensor.new_empty = empty, new_empty  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = plain_empty, plain_new_empty  # type: ignore[method-assign]


def sparse_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed tensor on the CPU that takes memory only where it is touched."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)
