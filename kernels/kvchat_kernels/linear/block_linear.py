"""Products of rows with block weights on the rows' device, in the rows' dtype.

Up to 16 rows a Triton kernel unpacks the weights in registers. More rows, and GPUs without Triton,
multiply with tiles of unpacked weights, so that the whole matrix is never held unpacked.
`cpu.py` has the products of a CPU, which rounds activations.
"""

import torch
from torch.nn.functional import linear

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.linear.blocks import BlockWeights, dequantised

MAX_ROWS = 16
# A tile of unpacked weights: large products lose nothing, and little memory is taken.
_TILE_BYTES = 64 << 20


def block_linear(
    rows: torch.Tensor,
    weights: BlockWeights,
    bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Return `rows @ weights.T + bias`, summed in float32 and rounded once.

    rows      [num_rows, in_size], contiguous, floating; the weights' columns beyond are zeros
    weights   on the device of `rows`
    bias      [out] or None
    impl      auto, triton or reference

    Returns [num_rows, out] in the dtype of `rows`, owned by the caller. From 2 rows on, weights
    are rounded to that dtype before they are multiplied.
    """
    num_rows, in_size = rows.shape
    assert in_size <= weights.num_in < in_size + 32, (rows.shape, weights.num_in)
    is_fast = uses_triton(rows.device, impl)
    if not num_rows:
        return rows.new_empty(0, weights.num_out)
    if is_fast and num_rows <= MAX_ROWS:
        from kvchat_kernels.linear.kernel import block_linear_launch

        out = rows.new_empty(num_rows, weights.num_out)
        block_linear_launch(rows, weights, bias, out).run()
        return out
    return _by_tiles(rows, weights, bias, is_fast)


def _by_tiles(
    rows: torch.Tensor, weights: BlockWeights, bias: torch.Tensor | None, is_fast: bool
) -> torch.Tensor:
    step = max(1, _TILE_BYTES // (rows.itemsize * weights.num_in))
    if step >= weights.num_out:
        return linear(rows, _unpacked(weights, rows, is_fast), bias)
    out = rows.new_empty(len(rows), weights.num_out)
    for start in range(0, weights.num_out, step):
        end = min(start + step, weights.num_out)
        tile = _unpacked(weights.rows(start, end), rows, is_fast)
        out[:, start:end] = linear(rows, tile, None if bias is None else bias[start:end])
    return out


def _unpacked(weights: BlockWeights, rows: torch.Tensor, is_fast: bool) -> torch.Tensor:
    """Return weights [out, in_size] in the dtype of `rows`."""
    in_size = rows.shape[1]
    if not is_fast:
        return dequantised(weights)[:, :in_size].to(rows.dtype)
    from kvchat_kernels.linear.kernel import unpack_launch

    room = rows.new_empty(weights.num_out, weights.num_in)
    unpack_launch(weights, room).run()
    return room[:, :in_size]
