"""A linear layer on at most 16 rows, where the cost is reading the weights once.

README.md describes the kernels. The caller decides when they are faster than torch's product.
"""

import torch

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.skinny_linear.reference import skinny_linear_reference

__all__ = ["MAX_ROWS", "skinny_linear"]

MAX_ROWS = 16


def skinny_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Return `rows @ weight.T + bias`, summed in float32 and rounded once.

    rows     [num_rows, in_size], 1 to 16 rows, contiguous
    weight   [out_size, in_size], the layout of nn.Linear, in the dtype of `rows`, contiguous
    bias     [out_size] or None
    impl     auto, triton or reference

    Returns [num_rows, out_size] in the dtype of `rows`, owned by the caller. From two rows on, the
    order in which an output is summed does not depend on the number of rows.
    """
    assert rows.ndim == 2, rows.shape
    assert 0 < rows.shape[0] <= MAX_ROWS, rows.shape
    assert rows.shape[1] == weight.shape[1], (rows.shape, weight.shape)
    assert rows.dtype == weight.dtype
    if uses_triton(rows.device, impl):
        from kvchat_kernels.skinny_linear.kernel import skinny_linear_launch

        out = rows.new_empty(rows.shape[0], weight.shape[0])
        skinny_linear_launch(rows, weight, bias, out).run()
        return out
    return skinny_linear_reference(rows, weight, bias)
