"""What torch's products cost on a CPU: dtypes that the processor multiplies in, and few sizes.

oneDNN, which multiplies bfloat16 on a CPU, compiles every shape anew, 2 to 5 ms each, and keeps
what it has compiled, 0.7 MB a shape: numbers of rows and keys are rounded up to few sizes.
TorchScript compiles `linear_of_few_sizes` too, so that keeps to what TorchScript supports.
"""

from functools import cache

import torch
from torch.nn.functional import linear, pad

# Instructions that multiply in a dtype.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}


@cache
def multiplies_in(dtype: torch.dtype) -> bool:
    """Tell whether there are instructions for products in `dtype`, bfloat16 or float16.

    Without them torch converts, and is several times slower than in float32. A torch that does not
    tell is taken to be on a processor that has them.
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _INSTRUCTIONS[dtype])


def few_sizes(count: int) -> int:
    """Return `count` up to 16, and above the next of 7 sizes up to 128 and 4 to each doubling."""
    if count <= 16:
        return count
    step = 16
    while count > 8 * step:
        step *= 2
    return (count + step - 1) // step * step


def linear_of_few_sizes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return torch's linear of x [..., num_rows, in_features]; low precision with rows added to it
    that are cut off again.
    """
    count = x.shape[-2]
    size = few_sizes(count)
    if size == count or x.dtype == torch.float32:
        return linear(x, weight, bias)
    return linear(pad(x, [0, 0, 0, size - count]), weight, bias).narrow(-2, 0, count)
