"""A linear layer on one row, where the cost is reading the weights once.

README.md describes the kernel, and where it is faster than torch's product.
"""

import torch

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.one_row_linear.reference import one_row_linear_reference

__all__ = ["one_row_linear"]


def one_row_linear(
    row: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Return `row @ weight.T + bias`, summed in float32 and rounded once.

    row      [1, in_size], contiguous
    weight   [out_size, in_size], the layout of nn.Linear, in the dtype of `row`, contiguous
    bias     [out_size] or None
    impl     auto, triton or reference

    Returns [1, out_size] in the dtype of `row`, owned by the caller.
    """
    assert row.shape == (1, weight.shape[1]), (row.shape, weight.shape)
    assert row.dtype == weight.dtype
    if uses_triton(row.device, impl):
        from kvchat_kernels.one_row_linear.kernel import one_row_linear_launch

        out = row.new_empty(1, weight.shape[0])
        one_row_linear_launch(row, weight, bias, out).run()
        return out
    return one_row_linear_reference(row, weight, bias)
