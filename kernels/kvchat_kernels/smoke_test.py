"""The smoke test: runs one small kernel to check that Triton works on a device.

An installed Triton may still fail: at run time it needs a C compiler and Python's headers, which
many machines with a GPU lack.
"""

import subprocess

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

_SIZE = 100
# What a launch raises where a kernel cannot be compiled, loaded or run; some are no RuntimeError.
FAILURES = (TritonError, RuntimeError, OSError, ImportError, subprocess.SubprocessError)


@triton.jit
def double_kernel(number_ptr, size, BLOCK: tl.constexpr):
    """Program (part,) doubles BLOCK numbers."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(number_ptr + index, mask=index < size, other=0.0)
    tl.store(number_ptr + index, 2.0 * number, mask=index < size)


def smoke_test_error(device: torch.device) -> str | None:
    """Return why kernels do not run on `device`, as the end of a sentence; None if they run."""
    numbers = torch.arange(float(_SIZE), device=device)
    try:
        double_kernel[(triton.cdiv(_SIZE, 64),)](numbers, _SIZE, BLOCK=64)
        is_right = torch.equal(numbers.cpu(), 2.0 * torch.arange(float(_SIZE)))
    except FAILURES as error:
        return f"Triton does not work here: {reason_of(error)}"
    return None if is_right else "Triton computes wrong results here"


def reason_of(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
