"""The plain experts of a mixture whose weights are blocks, on a GPU.

experts.md describes the kernels. A CPU's are in `cpu/experts.py`.
"""

from collections.abc import Callable, Sequence

import torch

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.linear.block_linear import block_linear
from kvchat_kernels.linear.blocks import BlockWeights, dequantised

# Gets products of gate and up side by side [n, 2 * width], and the expert of each [n].
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Up to so many rows nothing is read by the host: steps of graphs have no more.
MAX_ROWS = 64


def block_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Sequence[BlockWeights],
    down: BlockWeights,
    gate: Gate,
    down_bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Return the weighted sum of each row's experts: `sum factor * down(gate(gate_i x, up_i x))`.

    x         [num_rows, hidden], contiguous, floating
    chosen    [num_rows, top_k], the numbers of experts, whole numbers
    factors   [num_rows, top_k], floating
    gate_up   [experts * 2 * width, hidden], each expert's rows together; or two matrices
              [experts * width, hidden], gate and up
    down      [experts * hidden, width]
    gate      makes [n, width] of the products of both, such as act(gate) * up
    down_bias [experts, hidden] or None: added to what `down` makes
    impl      auto, triton or reference; auto without Triton multiplies expert by expert

    Returns [num_rows, hidden] in the dtype of `x`, owned by the caller. Products are summed in
    float32; those of gate and up, and what `gate` makes of them, are rounded to the dtype of `x`.
    From 2 rows on weights are rounded to it too. With at most MAX_ROWS rows the kernels read
    nothing on the host.
    """
    num_rows, hidden = x.shape
    assert chosen.shape == factors.shape == (num_rows, chosen.shape[1])
    assert down.num_out % hidden == 0, (down.num_out, hidden)
    num_experts = down.num_out // hidden
    assert sum(weights.num_out for weights in gate_up) == 2 * num_experts * down.num_in
    if not chosen.numel():
        return torch.zeros_like(x)
    if impl == "reference":
        return block_experts_reference(x, chosen, factors, gate_up, down, gate, down_bias)
    if num_rows <= MAX_ROWS and uses_triton(x.device, impl):
        return _by_kernels(x, chosen, factors, gate_up, down, gate, down_bias)
    return _expert_by_expert(x, chosen, factors, gate_up, down, gate, down_bias, impl)


def _by_kernels(
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Sequence[BlockWeights],
    down: BlockWeights,
    gate: Gate,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    from kvchat_kernels.experts_kernels import Groups, add_up_launch, group_launch, product_launch

    num_pairs, num_experts = chosen.numel(), down.num_out // x.shape[1]
    chosen, groups = chosen.contiguous(), None
    if len(x) > 1:  # the experts of one row are different ones
        groups = Groups.empty(chosen, num_experts)
        group_launch(chosen, num_experts, groups).run()
    both = x.new_empty(num_pairs, 2 * down.num_in)
    for weights, room in zip(gate_up, both.chunk(len(gate_up), dim=1), strict=True):
        product_launch(x, chosen, groups, weights, num_experts, room).run()
    experts = chosen.flatten()
    gated = gate(both, experts).contiguous()
    products = x.new_empty(num_pairs, x.shape[1], dtype=torch.float32)
    product_launch(gated, chosen, groups, down, num_experts, products).run()
    if down_bias is not None:
        products += down_bias[experts]
    out = torch.empty_like(x)
    add_up_launch(products, factors.contiguous(), out).run()
    return out


def _expert_by_expert(
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Sequence[BlockWeights],
    down: BlockWeights,
    gate: Gate,
    down_bias: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    """Multiply each expert's rows at once: `block_linear` unpacks a tile of its weights at a time.

    The host reads how many rows each expert has.
    """
    num_experts, top_k = down.num_out // x.shape[1], chosen.shape[1]
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
    sizes.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, size in enumerate(sizes.tolist()):
        if not size:
            continue
        pairs = order[start : start + size]
        start += size
        rows = pairs // top_k
        inputs = x[rows]
        parts = [_of(weights, expert, num_experts) for weights in gate_up]
        both = [block_linear(inputs, part, impl=impl) for part in parts]
        gated = gate(torch.cat(both, dim=1), experts[pairs]).contiguous()
        products = block_linear(gated, _of(down, expert, num_experts), impl=impl).float()
        if down_bias is not None:
            products += down_bias[expert]
        out.index_add_(0, rows, products * factors.flatten()[pairs, None].float())
    return out.to(x.dtype)


def _of(weights: BlockWeights, expert: int, num_experts: int) -> BlockWeights:
    """Return one expert's matrix, which shares memory with `weights`."""
    size = weights.num_out // num_experts
    return weights.rows(expert * size, (expert + 1) * size)


def block_experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    gate_up: Sequence[BlockWeights],
    down: BlockWeights,
    gate: Gate,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `block_experts` returns, computed in float32 with unpacked weights."""
    num_experts = down.num_out // x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            inputs = x[row : row + 1].float()
            both = [inputs @ _matrix(weights, expert, num_experts).T for weights in gate_up]
            gated = gate(torch.cat(both, dim=1), chosen[row, place : place + 1])
            product = gated.float() @ _matrix(down, expert, num_experts).T
            if down_bias is not None:
                product += down_bias[expert]
            out[row] += product[0] * factors[row, place].float()
    return out.to(x.dtype)


def _matrix(weights: BlockWeights, expert: int, num_experts: int) -> torch.Tensor:
    size = weights.num_out // num_experts
    return dequantised(weights.rows(expert * size, (expert + 1) * size))
