"""What the kernels that work row by row must do, on any device that runs them.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device. Each check makes its
own data from a seed and raises AssertionError.
"""

import torch
from torch.nn import functional

from kvchat_kernels.row_operations import (
    add_rms_norm,
    gelu_tanh_mul,
    one_row_linear,
    rms_norm,
    silu_mul,
)
from support.rounding import assert_as_exact, assert_same_bits, poisoned_memory, sparse_memory

EPS = 1e-6


def _rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random rows inside wider ones, whose other numbers are NaN; one row is nearly zero."""
    wider = torch.full((*shape[:-1], shape[-1] + 16), float("nan"))
    wider[..., : shape[-1]] = torch.randn(shape) * 3
    if len(shape) > 1 and shape[0]:
        wider[0] *= 1e-3
    return wider.to(dtype).to(device)[..., : shape[-1]]


def check_rms_norm(
    shape: tuple[int, ...], dtype: torch.dtype, offset: float, device: str = "cpu"
) -> None:
    """Rows alone and after an addition are normed as exactly as by the twin."""
    torch.manual_seed(shape[-1])
    hidden, residual = _rows(shape, dtype, device), _rows(shape, dtype, device)
    weight = (torch.rand(shape[-1]) + 0.5 - offset).to(dtype).to(device)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.double()
        root = (rows.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
        return rows / root * (weight.double() + offset)

    with poisoned_memory():
        out = rms_norm(hidden, weight, EPS, offset=offset, impl="triton")
        after, total = add_rms_norm(hidden, residual, weight, EPS, offset=offset, impl="triton")

    plain_out = rms_norm(hidden, weight, EPS, offset=offset, impl="reference")
    assert_as_exact(out, plain_out, normed(hidden))
    plain, plain_total = add_rms_norm(
        hidden, residual, weight, EPS, offset=offset, impl="reference"
    )
    assert_same_bits(total, plain_total, "the sum")
    assert_as_exact(after, plain, normed(total))
    alone = rms_norm(total, weight, EPS, offset=offset, impl="triton")
    assert_same_bits(after, alone, "what is normed is not what is returned")
    for impl in ("triton", "reference"):  # weights may be wider than the rows
        wide = rms_norm(hidden, weight.float(), EPS, offset=offset, impl=impl)
        assert_as_exact(wide, plain_out, normed(hidden))


def check_gates(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    """Both gates on the halves of a merged projection; large arguments saturate."""
    torch.manual_seed(shape[-1])
    merged = torch.randn(*shape[:-1], 2 * shape[-1]) * 4
    # Beside others: alone, 60 times log2(e) rounded is twenty last places of an exponential.
    if merged.numel() > 2:
        merged.view(-1)[:2] = torch.tensor([-60.0, 60.0])
    gate, up = merged.to(dtype).to(device).chunk(2, dim=-1)
    wide_gate, wide_up = gate.double(), up.double()
    oracles = {
        silu_mul: functional.silu(wide_gate) * wide_up,
        gelu_tanh_mul: functional.gelu(wide_gate, approximate="tanh") * wide_up,
    }
    for gated, oracle in oracles.items():
        with poisoned_memory():
            out = gated(gate, up, impl="triton")
        assert_as_exact(out, gated(gate, up, impl="reference"), oracle)


def check_one_row_linear(
    sizes: tuple[int, int], dtype: torch.dtype, has_bias: bool, device: str = "cpu"
) -> None:
    """A product of `sizes`: inputs, outputs; memory around the operands is NaN."""
    torch.manual_seed(sum(sizes))
    in_size, out_size = sizes
    row = _between_nans((1, in_size), dtype, device)
    weight = _between_nans((out_size, in_size), dtype, device)
    bias = _between_nans((out_size,), dtype, device) if has_bias else None
    oracle = row.double() @ weight.double().T + (bias.double() if bias is not None else 0)

    with poisoned_memory():
        out = one_row_linear(row, weight, bias, impl="triton")

    assert_as_exact(out, one_row_linear(row, weight, bias, impl="reference"), oracle)


def _between_nans(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    count = torch.Size(shape).numel()
    memory = torch.full((count + 4096,), float("nan"), dtype=dtype, device=device)
    part = memory[2048 : 2048 + count].view(shape)
    return part.copy_(torch.randn(shape))


def check_rows_in_any_order(device: str = "cpu") -> None:
    """Heads that were transposed before they are normed, or gated, give the same."""
    torch.manual_seed(2)
    rows = torch.randn(3, 5, 24, device=device).transpose(0, 1)
    weight = torch.rand(24, device=device)
    dense = rows.contiguous()
    for one, other in zip(
        [
            rms_norm(rows, weight, EPS, impl="triton"),
            *add_rms_norm(rows, dense, weight, EPS, impl="triton"),
            silu_mul(rows, dense, impl="triton"),
        ],
        [
            rms_norm(dense, weight, EPS, impl="triton"),
            *add_rms_norm(dense, rows, weight, EPS, impl="triton"),
            silu_mul(dense, rows, impl="triton"),
        ],
        strict=True,
    ):
        assert one.is_contiguous()
        assert_same_bits(one, other, "rows in another order")


def check_distant_rows() -> None:
    """Rows further from the first than 32 bits can count; on the CPU."""
    size, stride = 64, 2**30
    memory = sparse_memory(3 * stride, torch.float16)
    far = memory.view(3, stride)[:, :size]
    far.copy_(torch.randn(3, size))
    near = far.clone()
    weight = torch.rand(size).half()

    assert_same_bits(
        rms_norm(far, weight, EPS, impl="triton"), rms_norm(near, weight, EPS, impl="triton"), ""
    )
    for normed, same in zip(
        add_rms_norm(far, far, weight, EPS, impl="triton"),
        add_rms_norm(near, near, weight, EPS, impl="triton"),
        strict=True,
    ):
        assert_same_bits(normed, same, "the norm of a sum")
    assert_same_bits(silu_mul(far, far, impl="triton"), silu_mul(near, near, impl="triton"), "")
