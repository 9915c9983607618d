"""What a mixture's experts in block weights must compute, by the Triton kernels and by plain torch.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear, silu

from kvchat.model.gpu.cuda_graph import trapping_host_reads
from kvchat_kernels.experts import MAX_ROWS, block_experts, block_experts_reference
from kvchat_kernels.experts_kernels import Groups, group_launch
from kvchat_kernels.linear.blocks import BlockWeights, dequantised
from support.block_linear_checks import KINDS, Kind, random_blocks
from support.rounding import assert_as_exact, poisoned_memory


@dataclass(frozen=True)
class Case:
    """A step of a mixture; `kinds` are the layouts of gate and up, one or two, and of down."""

    num_rows: int = 5
    num_experts: int = 6
    top_k: int = 2
    hidden: int = 96
    width: int = 64
    kinds: tuple[Kind, ...] = (KINDS[0], KINDS[0])
    dtype: torch.dtype = torch.float32
    can_repeat: bool = False
    has_bias: bool = False


@dataclass(frozen=True)
class Step:
    """The arguments of `block_experts`, in its order."""

    x: torch.Tensor
    chosen: torch.Tensor
    factors: torch.Tensor
    gate_up: tuple[BlockWeights, ...]
    down: BlockWeights
    down_bias: torch.Tensor | None = None

    def by(self, impl: str) -> torch.Tensor:
        return block_experts(
            self.x,
            self.chosen,
            self.factors,
            self.gate_up,
            self.down,
            gate,
            self.down_bias,
            impl=impl,
        )


def gate(both: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """A gate that has a factor for each expert."""
    gates, ups = both.chunk(2, dim=1)
    return silu(gates) * ups * (1 + experts[:, None] % 3).to(both.dtype)


def random_step(case: Case, device: str) -> Step:
    """A row's experts are different ones unless they `can_repeat`; most rows share some.

    Sizes are those of the case, or the next that its layouts can have.
    """
    unit = max(kind.columns for kind in case.kinds)
    sizes = (-(-size // unit) * unit for size in (case.hidden, case.width))
    case = replace(case, hidden=next(sizes), width=next(sizes))
    torch.manual_seed(case.num_rows + case.hidden)
    shape = case.num_rows, case.num_experts
    scores = torch.rand(shape)
    chosen = scores.topk(case.top_k).indices
    if case.can_repeat:
        chosen = torch.randint(case.num_experts, chosen.shape)
    rows = 2 * case.width * case.num_experts
    *first, last = case.kinds
    gate_up = [random_blocks((rows // len(first), case.hidden), kind, device) for kind in first]
    down = random_blocks((case.hidden * case.num_experts, case.width), last, device)
    # The products of gate and up are about 1.
    x = torch.randn(case.num_rows, case.hidden) / case.hidden**0.5
    factors = torch.rand(chosen.shape)
    bias = torch.randn(case.num_experts, case.hidden) if case.has_bias else None
    return Step(
        x.to(case.dtype).to(device),
        chosen.to(device),
        factors.to(case.dtype).to(device),
        tuple(gate_up),
        down,
        None if bias is None else bias.to(case.dtype).to(device),
    )


def computed(step: Step, wanted: torch.dtype, rounds_weights: bool) -> torch.Tensor:
    """The experts of a step pair by pair in plain torch, each operation in the dtype `wanted`."""
    num_experts = step.down.num_out // step.x.shape[1]

    def experts_of(weights: BlockWeights) -> torch.Tensor:
        own = dequantised(weights).view(num_experts, -1, weights.num_in)
        return (own.to(step.x.dtype) if rounds_weights else own).to(wanted)

    gate_up = torch.cat([experts_of(weights) for weights in step.gate_up], dim=1)
    down = experts_of(step.down)
    out = torch.zeros(step.x.shape, dtype=torch.promote_types(wanted, torch.float32))
    for row, experts in enumerate(step.chosen.tolist()):
        for place, expert in enumerate(experts):
            both = linear(step.x[row].to(wanted), gate_up[expert])
            gated = gate(both[None], step.chosen[row, place : place + 1])[0]
            product = linear(gated, down[expert])
            if step.down_bias is not None:
                product += step.down_bias[expert].to(wanted)
            out[row] += product.cpu() * step.factors[row, place].cpu().to(out.dtype)
    return out


def check_block_experts(case: Case, device: str = "cpu", impl: str = "triton") -> None:
    """The sum of a row's experts is as exact as with the unpacked weights."""
    step = random_step(case, device)
    rounds_weights = case.num_rows > 1
    oracle = computed(step, torch.float64, rounds_weights)
    plain = computed(step, case.dtype, rounds_weights).to(case.dtype)

    with poisoned_memory():
        out = step.by(impl)

    assert_as_exact(out, plain.to(device), oracle.to(device))
    exact = replace(step, x=step.x.float(), factors=step.factors.float())
    twin = block_experts_reference(
        exact.x, exact.chosen, exact.factors, exact.gate_up, exact.down, gate, exact.down_bias
    )
    limit = 1e-5 if case.dtype == torch.float32 else 0.02
    assert (out.float() - twin).norm() <= limit * twin.norm()


def check_groups(experts: Sequence[int], num_experts: int, device: str = "cpu") -> None:
    """Every pair is in one group, with others of its expert, in order, 16 at most."""
    chosen = torch.tensor(experts, device=device)[:, None]
    with poisoned_memory():
        groups = Groups.empty(chosen, num_experts)
    group_launch(chosen, num_experts, groups).run()

    order = groups.order.tolist()
    assert order == chosen.flatten().argsort(stable=True).tolist()
    starts, is_over, last = 0, False, (-1, 0)
    for expert, first, size in zip(*groups.groups.tolist(), strict=True):
        is_over |= size == 0
        if is_over:
            assert size == 0, "a group after the last one"
            continue
        assert first == starts
        assert {experts[pair] for pair in order[first : first + size]} == {expert}
        assert expert > last[0] or last == (expert, 16), "a group before it had room"
        starts, last = starts + size, (expert, size)
        assert 0 < size <= 16
    assert starts == len(experts)


def check_rows_beside_others(device: str = "cpu") -> None:
    """From 2 rows on, a row's result is the same to the bit, whatever else is computed."""
    step = random_step(Case(num_rows=12, dtype=torch.float16), device)
    together = step.by("triton")
    for rows in ([0, 1], [3, 7, 11], list(range(2, 12))):
        part = replace(step, x=step.x[rows], chosen=step.chosen[rows], factors=step.factors[rows])
        assert torch.equal(part.by("triton"), together[rows])


def check_many_rows(device: str = "cpu", impl: str = "triton") -> None:
    """More rows than the kernels take are multiplied expert by expert; one expert has no rows."""
    step = random_step(Case(num_rows=MAX_ROWS + 9, num_experts=5), device)
    chosen = torch.where(step.chosen == 3, 4, step.chosen)
    step = replace(step, chosen=chosen)
    expected = computed(step, torch.float64, True)

    found = step.by(impl).cpu().double()

    assert (found - expected).norm() <= 1e-5 * expected.norm()


def check_no_host_reads(num_rows: int, device: str = "cpu") -> None:
    """A step that a graph may capture reads nothing on the host."""
    step = random_step(Case(num_rows=num_rows), device)
    with trapping_host_reads():
        step.by("triton")
