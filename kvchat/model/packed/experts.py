"""Plain experts of a mixture in blocks: their products, module by module.

transformers keeps the weights of a layer's experts as two tensors, [experts, 2 * width, hidden] and
[experts, hidden, width], and so do most mixtures. Packed, they are matrices with the rows of
all experts one below another; a step multiplies with the rows of the chosen experts alone. On a GPU
`kvchat_kernels.experts` has the products.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from kvchat.model.device import can_change_threads
from kvchat.model.hf.gates import GATES, activation_of
from kvchat_kernels.experts import block_experts
from kvchat_kernels.linear.blocks import BlockWeights, fits, quantised_matrices
from kvchat_kernels.linear.cpu import FEW_ROWS, BlockProduct

EXPERT_TENSORS = ("gate_up_proj", "down_proj")
# Flags that transformers gives a class of experts, and what they are where experts are plain.
_PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
}
# The same of gpt-oss's experts, whose gate and up are by turns the columns of a matrix.
_BY_TURNS = {"has_gate": True, "has_bias": True, "is_transposed": True, "is_concatenated": False}
# Older versions of transformers know no such norm, and have no flag for it.
_NORMED = "has_post_expert_norm"


Act = Callable[[torch.Tensor], torch.Tensor]


class ExpertPacks:
    """The matrices of a layer's experts on a CPU; stands for the forward of their module.

    `gate_up` is one, gate above up in each expert, or two.
    """

    def __init__(self, module: Any, gate_up: Sequence[BlockWeights], down: BlockWeights) -> None:
        self.gate_up = tuple(BlockProduct(weights) for weights in gate_up)
        self.down = BlockProduct(down)
        self._num_experts: int = module.gate_up_proj.shape[0]
        self._module = module

    def __deepcopy__(self, memo: object) -> "ExpertPacks":
        return self  # nothing ever changes it

    @property
    def products(self) -> tuple[BlockProduct, ...]:
        return (*self.gate_up, self.down)

    @property
    def num_bytes(self) -> int:
        return sum(product.weights.num_bytes for product in self.products)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts [rows, hidden] that `top_k_index` names."""
        x, factors = hidden_states.float(), top_k_weights.float()
        out = torch.zeros_like(x)
        experts = top_k_index.unique().tolist()
        chosen = [torch.where(top_k_index == expert) for expert in experts]

        @torch.inference_mode()
        def computed(number: int) -> torch.Tensor:
            return self._of_expert(x[chosen[number][0]], experts[number])

        for (rows, places), outputs in zip(
            chosen, _mapped(computed, len(chosen), len(x)), strict=True
        ):
            out.index_add_(0, rows, outputs * factors[rows, places, None])
        return out.to(hidden_states.dtype)

    def _of_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return what one expert makes of x [rows, hidden] float32."""
        outputs = [self._of(product, expert)(x) for product in self.gate_up]
        gated = self._gated(outputs, expert).contiguous()
        return self._with_bias(self._of(self.down, expert)(gated), expert)

    def _gated(self, outputs: Sequence[torch.Tensor], expert: int) -> torch.Tensor:
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        act: Act = self._module.act_fn
        return act(gate) * up

    def _with_bias(self, out: torch.Tensor, expert: int) -> torch.Tensor:
        return out

    def _of(self, product: BlockProduct, expert: int) -> BlockProduct:
        size = product.weights.num_out // self._num_experts
        return BlockProduct(product.weights.rows(expert * size, (expert + 1) * size))


class ExpertPacksByTurns(ExpertPacks):
    """The same of experts by turns, whose biases and gate are their module's."""

    def _gated(self, outputs: Sequence[torch.Tensor], expert: int) -> torch.Tensor:
        both = torch.stack(tuple(outputs), dim=-1).flatten(1) if len(outputs) == 2 else outputs[0]
        module = self._module
        gated: torch.Tensor = module._apply_gate(both + module.gate_up_proj_bias[expert].float())
        return gated

    def _with_bias(self, out: torch.Tensor, expert: int) -> torch.Tensor:
        bias: torch.Tensor = self._module.down_proj_bias[expert]
        return out + bias.float()


class DeviceExpertPacks:
    """The matrices of a layer's experts on a GPU, as those of `ExpertPacks`."""

    def __init__(self, module: Any, gate_up: Sequence[BlockWeights], down: BlockWeights) -> None:
        self.gate_up = tuple(gate_up)
        self.down = down
        self._module = module

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts [rows, hidden] that `top_k_index` names."""
        x, bias = hidden_states.contiguous(), self._down_bias
        matrices = self.gate_up, self.down
        return block_experts(x, top_k_index, top_k_weights, *matrices, self._gated, bias)

    @property
    def _down_bias(self) -> torch.Tensor | None:
        return None

    def _gated(self, both: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return what the gate makes of products [n, 2 * width] of these experts [n]."""
        act: Act = self._module.act_fn
        gates, ups = both.chunk(2, dim=1)
        known = GATES.get(activation_of(act))
        return act(gates) * ups if known is None else known(gates, ups)

    @property
    def num_bytes(self) -> int:
        return sum(weights.num_bytes for weights in (*self.gate_up, self.down))

    def __deepcopy__(self, memo: object) -> "DeviceExpertPacks":
        return self  # nothing ever changes it


class DeviceExpertPacksByTurns(DeviceExpertPacks):
    """The same of experts by turns, whose biases and gate are their module's."""

    @property
    def _down_bias(self) -> torch.Tensor:
        bias: torch.Tensor = self._module.down_proj_bias
        return bias

    def _gated(self, both: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if len(self.gate_up) == 2:
            both = both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        bias = self._module.gate_up_proj_bias[experts].to(both.dtype)
        gated: torch.Tensor = self._module._apply_gate(both + bias)
        return gated


# By whether experts are plain: what holds them on a CPU, and on a GPU.
EXPERT_PACKS = {
    True: (ExpertPacks, DeviceExpertPacks),
    False: (ExpertPacksByTurns, DeviceExpertPacksByTurns),
}


def are_plain_experts(module: Any) -> bool:
    """Return whether a module is experts of the plain form, with their weights as parameters."""
    if not _has_weights(module):
        return False
    # Where transformers names it otherwise, no experts are plain, and all run as they are.
    gate = getattr(type(module), "_apply_gate", None)
    is_plain = getattr(gate, "__name__", "") == "_default_apply_gate"
    if not is_plain or getattr(module, _NORMED, False):
        return False
    return all(getattr(module, name, None) == flag for name, flag in _PLAIN.items())


def are_experts_by_turns(module: Any) -> bool:
    """Return whether a module is experts of gpt-oss's form, with their weights as parameters."""
    has_gate = hasattr(module, "_apply_gate") and not getattr(module, _NORMED, False)
    has_flags = all(getattr(module, name, None) == flag for name, flag in _BY_TURNS.items())
    return has_gate and has_flags and _has_weights(module)


@torch.inference_mode()
def lay_by_rows(module: nn.Module) -> None:
    """Let a model's experts by turns lie in memory as products read them, [experts, out, in].

    Their parameters stay [experts, in, out], as views.
    """
    for experts in filter(are_experts_by_turns, module.modules()):
        for name in EXPERT_TENSORS:
            parameter = getattr(experts, name)
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)


def _has_weights(module: Any) -> bool:
    parameters = [getattr(module, name, None) for name in EXPERT_TENSORS]
    return all(isinstance(part, nn.Parameter) and part.dim() == 3 for part in parameters)


def expert_packs_of(module: nn.Module) -> ExpertPacks | DeviceExpertPacks | None:
    """Return what holds the packed weights of a module of experts, None if it has none."""
    forward: object = module.forward
    return forward if isinstance(forward, ExpertPacks | DeviceExpertPacks) else None


def has_packed_experts(module: nn.Module) -> bool:
    """Return whether any part of a model is experts with packed weights."""
    return any(expert_packs_of(part) is not None for part in module.modules())


def expert_weights(module: Any) -> list[torch.Tensor]:
    """Return the weights of plain experts, each [experts, out, in]."""
    return [getattr(module, name).detach() for name in EXPERT_TENSORS]


def expert_tensors(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of the tensors, gate and up before down, of experts that multiply in blocks.

    They are plain or by turns. `use_blocks` of `quantise.py` takes both or none.
    """
    owners = [
        name
        for name, part in module.named_modules()
        if are_plain_experts(part) or are_experts_by_turns(part)
    ]
    return [tuple(f"{owner}.{name}" for name in EXPERT_TENSORS) for owner in owners]


def can_pack_experts(module: Any) -> bool:
    """Return whether a module is plain experts that are not packed and whose rows fit blocks."""
    if expert_packs_of(module) is not None or not are_plain_experts(module):
        return False
    return all(fits(part.shape[-1]) for part in (module.gate_up_proj, module.down_proj))


@torch.inference_mode()
def pack_experts(module: Any, pack: Callable[[str, torch.Tensor], BlockWeights], name: str) -> None:
    """Pack the weights of `can_pack_experts` on a CPU, and free them.

    `pack` gets the name of a tensor, below the module's `name`, and it as a matrix.
    """
    named = zip(EXPERT_TENSORS, expert_weights(module), strict=True)
    gate_up, down = (pack(f"{name}.{part}", weight.flatten(0, 1)) for part, weight in named)
    use_packs(module, ExpertPacks(module, (gate_up,), down))


@torch.inference_mode()
def pack_experts_on_gpu(module: Any, bits: int, device: torch.device) -> None:
    """Round the weights of `can_pack_experts` to blocks on a GPU, and free them.

    An expert after another: no more of a layer is there in 16 bits.
    """
    gate_up, down = (quantised_matrices(part, bits, device) for part in expert_weights(module))
    use_packs(module, DeviceExpertPacks(module, (gate_up,), down))


def use_packs(module: Any, packs: ExpertPacks | DeviceExpertPacks) -> None:
    """Let a module of experts multiply with block weights, and free its own."""
    dtype = module.gate_up_proj.dtype
    module.forward = packs
    for name in EXPERT_TENSORS:
        setattr(module, name, nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False))


def _mapped(
    computed: Callable[[int], torch.Tensor], count: int, num_rows: int
) -> Iterator[torch.Tensor]:
    """Yield what `computed` returns for each number below `count`, in order.

    The experts of a step of many rows are shared out among threads, each of which computes alone.
    If all threads took part in each product, each product would wait for the slowest of them, and
    the products are small and many: beside a busy program that took many times as long.
    """
    most = torch.get_num_threads()
    if min(most, count) == 1 or num_rows <= FEW_ROWS or not can_change_threads():
        yield from map(computed, range(count))
        return
    workers = min(most, count)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(computed, range(count))
    finally:
        torch.set_num_threads(most)  # threads that begin later take the number that was set last
