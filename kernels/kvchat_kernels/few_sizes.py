"""Few sizes for what would come in any: numbers of rows and keys that torch's products are given.

oneDNN, which multiplies bfloat16 on a CPU, compiles every shape anew, 2 to 5 ms each, and keeps
what it has compiled, 0.7 MB a shape. TorchScript compiles this too: it keeps to what that knows.
"""

import torch
from torch.nn.functional import linear, pad


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
