"""Tests the products of packed weights on a GPU against plain torch with the unpacked weights.

The paths that the self-test compares multiply by the same kernels, so it does not see a kernel that
is wrong on a device. One matrix of each form is tested: a row, several, and unpacked.
"""

from collections.abc import Iterator

import torch
from torch import nn

from kvchat.model.packed.experts import DeviceExpertPacks, expert_packs_of
from kvchat.model.packed.quantise import DevicePack, pack_of
from kvchat_kernels.experts import block_experts
from kvchat_kernels.linear.block_linear import MAX_ROWS, block_linear
from kvchat_kernels.linear.blocks import BlockWeights, dequantised

# Rows of a matrix that are tested, and experts.
_OUTPUTS, _EXPERTS = 64, 2
# In bfloat16 rounding makes 0.004.
_MOST_OFF = 0.02


def device_forms(module: nn.Module) -> list[str]:
    """Return the forms of a model's weights on a GPU, each once; empty where it has none."""
    packs = [*_matrices(module), *(part for pack in _experts(module) for part in _parts(pack))]
    return sorted({f"{weights.layout} {weights.num_in}" for weights in packs})


@torch.inference_mode()
def product_fault(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Return which packed weights a GPU multiplies wrongly, as a noun; None if it does not.

    What a kernel raises is raised.
    """
    for weights in {(w.layout, w.num_in): w for w in _matrices(module)}.values():
        some = weights.rows(0, min(_OUTPUTS, weights.num_out))
        for num_rows in (1, 2, MAX_ROWS + 1):
            x = _rows(num_rows, some, dtype)
            if _is_off(block_linear(x, some), x.float() @ dequantised(some).t()):
                return f"weights of {weights.bits} bits, {num_rows} rows"
    for packs in {_forms_of(pack): pack for pack in _experts(module)}.values():
        for num_rows in (1, 3):
            if _are_experts_off(packs, num_rows, dtype):
                return f"experts of {packs.down.bits} bits, {num_rows} rows"
    return None


def _are_experts_off(packs: DeviceExpertPacks, num_rows: int, dtype: torch.dtype) -> bool:
    num_experts = packs.down.num_out // packs.gate_up[0].num_in
    count = min(_EXPERTS, num_experts)
    *gate_up, down = (part.rows(0, part.num_out // num_experts * count) for part in _parts(packs))
    x = _rows(num_rows, gate_up[0], dtype)
    chosen = torch.arange(count, device=x.device).repeat(num_rows, 1)
    factors = torch.ones(chosen.shape, dtype=dtype, device=x.device)
    products, expected = (
        block_experts(x, chosen, factors, gate_up, down, _gated, impl=impl)
        for impl in ("auto", "reference")
    )
    return _is_off(products, expected.float())


def _gated(both: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    gates, ups = both.chunk(2, dim=1)
    return gates * ups


def _rows(num_rows: int, weights: BlockWeights, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, weights.num_in, generator=generator)
    return rows.to(weights.device, dtype)


def _is_off(products: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether products differ more than rounding makes them, or are no numbers."""
    return not bool((products.float() - expected).norm() <= _MOST_OFF * expected.norm())


def _matrices(module: nn.Module) -> Iterator[BlockWeights]:
    for pack in map(pack_of, module.modules()):
        if isinstance(pack, DevicePack):
            yield pack.weights


def _experts(module: nn.Module) -> Iterator[DeviceExpertPacks]:
    for packs in map(expert_packs_of, module.modules()):
        if isinstance(packs, DeviceExpertPacks):
            yield packs


def _parts(packs: DeviceExpertPacks) -> tuple[BlockWeights, ...]:
    return (*packs.gate_up, packs.down)


def _forms_of(packs: DeviceExpertPacks) -> object:
    return tuple((part.layout, part.num_in) for part in _parts(packs))
