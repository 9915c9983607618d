"""What the processor that runs torch's CPU operators can do.

Knows instruction sets by torch's names for them.
"""

from functools import cache

import torch

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
