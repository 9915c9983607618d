"""Launches Triton kernels, decides which devices run them, sends numbers to a device and back.

Every kernel's launcher returns a Launch, so that tests without a GPU compile exactly what a GPU
would run. Importing this module does not import Triton, because a machine without a GPU never needs
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch

_Numbers = np.ndarray[Any, np.dtype[Any]]
# The dtypes in which numbers are sent to a device.
_NUMPY: Mapping[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A prepared call of a kernel.

    kernel     a function under `@triton.jit`
    grid       programs along each axis; nothing runs if one of them is 0
    values     one value per parameter of the kernel, by name
    num_warps, num_stages   Triton's launch options
    """

    kernel: Any
    grid: tuple[int, ...]
    values: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3

    def run(self) -> None:
        """Queue the kernel on the current stream."""
        if 0 not in self.grid:
            self.kernel[self.grid](
                **self.values, num_warps=self.num_warps, num_stages=self.num_stages
            )


def uses_triton(device: torch.device, impl: str) -> bool:
    """Return whether an operation on `device` uses its Triton kernel.

    impl   auto, triton or reference; auto uses the kernel if the device can run it
    """
    assert impl in ("auto", "triton", "reference"), impl
    if impl == "auto":
        return device.type == "cuda" and kernel_refusal(device) is None
    return impl == "triton"


@cache
def kernel_refusal(device: torch.device) -> str | None:
    """Return why kernels cannot run on a CUDA device, as the end of a sentence; None if they can.

    The first call for a device compiles and runs a small kernel.
    """
    # Before compute capability 8.0 there is no bfloat16 and no asynchronous copy.
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    if find_spec("triton") is None:
        return "Triton is not installed"
    from kvchat_kernels.smoke_test import smoke_test_error

    return smoke_test_error(device)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not less than `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def dense(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with a stride of 1 in the last dimension: a copy if needed."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def evenly_spaced(rows: torch.Tensor) -> torch.Tensor:
    """Return dense rows with one constant stride between them: a copy if needed."""
    is_dense = rows.stride(-1) == 1 or rows.shape[-1] == 1
    # Each leading dimension's stride must be the size times the stride of the next one.
    leading = list(zip(rows.shape[:-1], rows.stride()[:-1], strict=True))
    leading = [(size, stride) for size, stride in leading if size > 1]
    is_even = all(
        outer == inner_size * inner for (_, outer), (inner_size, inner) in pairwise(leading)
    )
    return rows if is_dense and is_even else rows.contiguous()


def row_stride(rows: torch.Tensor) -> int:
    """Return the stride between rows, in elements; the rows come from `evenly_spaced`."""
    if rows.ndim == 1 or not rows.numel():
        return rows.shape[-1]
    return rows.view(-1, rows.shape[-1]).stride(0)


def on_device(
    numbers: Sequence[Any] | _Numbers, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return numbers, or rows of numbers, as a new tensor on `device`; does not wait for it.

    dtype   int32, int64 or float32

    `torch.tensor(..., device="cuda")` copies from unpinned memory, and returns only after all
    earlier queued work, such as the current step, has finished.

    On a CUDA device the copy is queued on the current stream, so only work queued after it sees the
    values. Must not be called while a graph is captured.
    """
    if device.type == "cpu":  # by way of numpy it takes a third of the time of `torch.tensor`
        return torch.from_numpy(np.array(numbers, dtype=_NUMPY[dtype]))
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    if isinstance(numbers, np.ndarray):
        numbers = numbers.tolist()  # torch pins no tensor of an array
    # torch's pinned-memory allocator does not reuse the memory before the copy has finished.
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def begin_reading(tensor: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy a vector of integers to the host; return what waits for it and returns it.

    On a CUDA device the copy is queued on the current stream. The wait is for the copy alone:
    `tensor.tolist()` would wait for everything queued since. The caller may drop the tensor.
    """
    if tensor.device.type != "cuda":
        return tensor.clone().tolist
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    memory.copy_(tensor, non_blocking=True)
    mark = torch.cuda.Event()
    mark.record(torch.cuda.current_stream(tensor.device))

    def read() -> list[int]:
        mark.synchronize()
        return memory.tolist()

    return read
