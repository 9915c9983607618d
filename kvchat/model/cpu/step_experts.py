"""The operations of a gated MLP, and of a mixture of experts, in a step's program.

A mixture is: scores, choosing, gathering the rows of the chosen experts, their MLP, adding up. An
expert that all rows have is an MLP of its own, whose output is where adding up begins.
"""

import torch

from kvchat.model.cpu.step_operations import (
    Activations,
    Pairs,
    StepOperations,
    Unfit,
    check_widths,
)
from kvchat.model.decoder.decoder import Mixture, Mlp
from kvchat_kernels.cpu import experts, gates
from kvchat_kernels.cpu.experts import AddingTask, Choice, ChoosingTask, GatheringTask
from kvchat_kernels.cpu.step import MAX_ROWS


def add_mlp(
    operations: StepOperations,
    mlp: Mlp,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
    pairs: Pairs | None = None,
) -> None:
    """Add an MLP of `values` [rows, hidden], rounded into `source`; writes `out`.

    With `pairs`, rows are pairs, and the matrices have the rows of all experts.
    """
    width, num_rows = mlp.down.num_in, len(values)
    check_widths(width)
    is_gated = mlp.is_gated
    both = operations.output("gate and up", 2 * width if is_gated else width, num_rows)
    operations.products(mlp.gate_up, source, values, both, pairs=pairs)
    operations.add_adapters(mlp.adapters, source, values, both)
    gated = operations.input("gated", width, num_rows)
    task = gates.GateTask(both=both, out=gated.floats, width=width, **mlp.constants)
    units = -(-width // gates.UNIT_COLUMNS)
    header = None if pairs is None else pairs.header
    kernel = gates.gate_kernel(mlp.activation, is_gated, mlp.is_by_turns)
    operations.add(kernel, task, units, header=header)
    operations.products((mlp.down,), gated, gated.floats, out, pairs=pairs)


def add_mixture(
    operations: StepOperations,
    mixture: Mixture,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
    for_router: Activations | None = None,
) -> None:
    """Add a mixture of `values` [rows, hidden], rounded into `source`; writes `out`.

    `for_router` is the router's input, where it is another.
    """
    if not 0 < mixture.top_k <= mixture.num_experts:
        raise Unfit(f"chooses {mixture.top_k} of {mixture.num_experts} experts")
    hidden, most, routing = values.shape[1], MAX_ROWS * mixture.top_k, mixture.routing
    pairs = operations.pairs(mixture.top_k, mixture.num_experts)
    width = experts.padded(mixture.num_experts)
    scores = operations.output(f"scores of {mixture.num_experts}", width)
    scores.fill_(experts.NO_SCORE)
    given = (source, values) if for_router is None else (for_router, for_router.floats)
    operations.products((mixture.router,), *given, scores)
    choosing = _choosing_task(mixture, scores, pairs)
    choice = Choice(
        mixture.normalises,
        routing.factors,
        routing.bias is not None,
        routing.of_experts is not None,
        routing.sets,
    )
    operations.add(experts.choosing_kernel(choice), choosing, 1)
    gathered = operations.input("gathered", hidden, most)
    gathering = GatheringTask(x=values, out=gathered.floats, width=hidden, rows=choosing.rows)
    operations.add_of_pairs(experts.gathering_kernel(), gathering, pairs)
    of_pairs = operations.output("experts", hidden, most)
    add_mlp(operations, mixture.experts, gathered, gathered.floats, of_pairs, pairs)
    shared = gate = None
    if mixture.shared is not None:
        shared = operations.output("shared", hidden)
        add_mlp(operations, mixture.shared, source, values, shared)
    if mixture.shared_gate is not None:
        gate = operations.output("shared gate", 1)
        operations.products((mixture.shared_gate,), source, values, gate)
    adding = AddingTask(
        x=of_pairs,
        out=out,
        width=hidden,
        top_k=mixture.top_k,
        places=choosing.places,
        factors=choosing.factors,
        shared=shared,
        shared_gate=gate,
    )
    operations.add(experts.adding_kernel(shared is not None, gate is not None), adding, None)


def _choosing_task(mixture: Mixture, scores: torch.Tensor, pairs: Pairs) -> ChoosingTask:
    routing, most = mixture.routing, MAX_ROWS * mixture.top_k
    return ChoosingTask(
        scores=scores,
        width_of_scores=scores.shape[1],
        num_experts=mixture.num_experts,
        top_k=mixture.top_k,
        bias=routing.bias,
        scale=routing.scale,
        least_sum=routing.least_sum,
        tolerance=routing.tolerance,
        of_experts=routing.of_experts,
        counts=_wholes(mixture.num_experts),
        chosen=_wholes(most),
        factors=torch.zeros(most, dtype=torch.float32),
        places=_wholes(most),
        rows=_wholes(most),
        groups=pairs.groups,
        num_groups=pairs.num_groups,
    )


def _wholes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)
