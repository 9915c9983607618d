"""The torch reference of a layer's experts: each pair of a row and an expert by itself."""

from collections.abc import Callable, Sequence

import torch

from kvchat_kernels.linear.blocks import BlockWeights, dequantised

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def block_experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Sequence[BlockWeights],
    down: BlockWeights,
    gate: Gate,
) -> torch.Tensor:
    """Return what `block_experts` returns, computed in float32 with unpacked weights."""
    num_experts = down.num_out // x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            inputs = x[row : row + 1].float()
            both = [inputs @ _matrix(weights, expert, num_experts).T for weights in gate_up]
            gated = gate(*torch.cat(both, dim=1).chunk(2, dim=1))
            product = gated @ _matrix(down, expert, num_experts).T
            out[row] += product[0] * factors[row, place].float()
    return out.to(x.dtype)


def _matrix(weights: BlockWeights, expert: int, num_experts: int) -> torch.Tensor:
    size = weights.num_out // num_experts
    return dequantised(weights.rows(expert * size, (expert + 1) * size))
