"""Helpers for fast matrix products on a CPU: native dtypes, and a small set of sizes.

oneDNN, torch's library for bfloat16 products on a CPU, compiles code for every shape: 2 to 5 ms and
0.7 MB each. Therefore numbers of rows and keys are rounded up to few sizes.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear, pad

_log = logging.getLogger(__name__)

# The processor features with multiplication instructions for a dtype.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}


@cache
def multiplies_in(dtype: torch.dtype) -> bool:
    """Return whether the processor has instructions for products in `dtype`, bfloat16 or float16.

    Without them torch converts, and is several times slower than in float32. Returns True if this
    version of torch cannot tell.
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _INSTRUCTIONS[dtype])


@cache
def multiplies_fast_in(dtype: torch.dtype) -> bool:
    """Return whether torch's products of weights in `dtype` are faster than in float32.

    Intel's processors without AMX have instructions for bfloat16 that multiply no more numbers in a
    cycle than those for float32, and torch reaches half of it: 80 GFLOP/s on a core of a Xeon of
    2023, and 150 in float32, the conversion of the weights included.
    """
    if dtype != torch.bfloat16 or not multiplies_in(dtype):
        return multiplies_in(dtype)
    if not hasattr(torch.cpu, "get_capabilities"):
        return True
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16")) or "Intel" not in str(found.get("cpu_name"))


def is_fast_by_torch(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies many rows with weights in `dtype` faster than our kernels."""
    return dtype == torch.float32 or multiplies_fast_in(dtype)


@cache
def compiled_calls() -> Any:
    """Return `cpu/calls.py`, which imports llvmlite; None, logged once, where nothing compiles."""
    try:
        from kvchat_kernels.cpu import calls

        calls.check()
    except (ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError for its own faults
        _log.warning("nothing is compiled here, and products are slower: %s", error)
        return None
    return calls


def few_sizes(count: int) -> int:
    """Return `count` rounded up: exact to 16, multiples of 16 to 128, then 4 sizes per doubling."""
    if count <= 16:
        return count
    step = 16
    while count > 8 * step:
        step *= 2
    return (count + step - 1) // step * step


def linear_of_few_sizes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return torch's linear of x [..., num_rows, in_features].

    In low precision pads the rows to one of few sizes, and removes them from the result.
    """
    count = x.shape[-2]
    size = few_sizes(count)
    if size == count or x.dtype == torch.float32:
        return linear(x, weight, bias)
    return linear(pad(x, [0, 0, 0, size - count]), weight, bias).narrow(-2, 0, count)
