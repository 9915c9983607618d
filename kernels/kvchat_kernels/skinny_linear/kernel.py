"""The skinny product as two Triton kernels: for one row, and for 2 to 16 rows.

Shapes: M rows, padded to 16; N outputs of a tile; K inputs of a loop step.
"""

import torch
import triton
import triton.language as tl

from kvchat_kernels.launch import Launch

_ROWS_OF_A_TILE = 16
# From this many outputs on, tiles of 32 give each of a large GPU's 132 multiprocessors 2 programs.
_OUTPUTS_FOR_WIDE_TILES = 2 * 132 * 32


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


# do_not_specialize: one compilation for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, out_size, IN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Program (tile,) computes BLOCK_N outputs of all rows on the tensor cores."""
    row = tl.arange(0, BLOCK_M)[:, None]  # [M, 1]
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
    inner = tl.arange(0, BLOCK_K)
    rows = rows_ptr + row * IN_SIZE + inner[None, :]  # [M, K]
    weights = weight_ptr + output.to(tl.int64) * IN_SIZE + inner[:, None]  # [K, N]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, IN_SIZE, BLOCK_K):
        is_input = start + inner < IN_SIZE
        left = tl.load(rows + start, mask=(row < num_rows) & is_input[None, :], other=0.0)
        right = tl.load(weights + start, mask=(output < out_size) & is_input[:, None], other=0.0)
        if IS_EXACT:
            total = tl.dot(left, right, total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
    inside = (row < num_rows) & (output < out_size)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=output < out_size, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64) * out_size + output
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


def skinny_linear_launch(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Launch:
    """Return the launch that fills `out`; see `skinny_linear` for the shapes."""
    assert rows.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    num_rows, in_size = rows.shape
    out_size = weight.shape[0]
    values = {
        "weight_ptr": weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "out_size": out_size,
        "IN_SIZE": in_size,
    }
    is_exact = rows.dtype == torch.float32
    if num_rows == 1:
        tile = {"BLOCK_N": 4, "BLOCK_K": 512 if is_exact else 1024, "STAGES": 4}
        grid = (triton.cdiv(out_size, tile["BLOCK_N"]),)
        return Launch(one_row_kernel, grid, {"row_ptr": rows, **values, **tile})
    block_n = 32 if out_size >= _OUTPUTS_FOR_WIDE_TILES else 16
    tile = {"BLOCK_M": _ROWS_OF_A_TILE, "BLOCK_N": block_n, "BLOCK_K": 128 if is_exact else 256}
    grid = (triton.cdiv(out_size, tile["BLOCK_N"]),)
    own = {"rows_ptr": rows, "num_rows": num_rows, "IS_EXACT": is_exact}
    return Launch(few_rows_kernel, grid, {**values, **own, **tile}, num_stages=4)
