"""The product of a matrix with one row as a Triton kernel.

Shapes: N outputs of a tile; K inputs of a loop step.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch


@triton.jit
def one_row_kernel(
    row_ptr, weight_ptr, bias_ptr, out_ptr, out_size, IN_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs; each thread sums its own columns, then all add."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # [N, 1]
    inner = tl.arange(0, BLOCK_K)[None, :]  # [1, K]
    weights = weight_ptr + output.to(tl.int64) * IN_SIZE + inner
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, IN_SIZE, BLOCK_K, num_stages=STAGES):
        is_input = start + inner < IN_SIZE
        inside = (output < out_size) & is_input
        weight = tl.load(weights + start, mask=inside, other=0.0)  # [N, K]
        row = tl.load(row_ptr + start + inner, mask=is_input, other=0.0)  # [1, K]
        total += weight.to(tl.float32) * row.to(tl.float32)
    result = tl.sum(total, axis=1)[:, None]  # [N, 1]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + output, mask=output < out_size, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, result.to(out_ptr.dtype.element_ty), mask=output < out_size)


def one_row_linear_launch(
    row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    """Return the launch that fills `out`; see `one_row_linear` for the shapes."""
    assert row.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    out_size, in_size = weight.shape
    is_exact = row.dtype == torch.float32
    tile = {"BLOCK_N": 4, "BLOCK_K": 512 if is_exact else 1024, "STAGES": 4}
    grid = (triton.cdiv(out_size, tile["BLOCK_N"]),)
    values = {
        "row_ptr": row,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "out_size": out_size,
        "IN_SIZE": in_size,
    }
    return Launch(one_row_kernel, grid, {**values, **tile})
