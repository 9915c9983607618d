"""The operations of a gated MLP, and of a mixture of experts, in a step's program.

A mixture is: scores, choosing, gathering the rows of the chosen experts, their MLP, adding up. An
expert that all rows have is an MLP of its own, whose output is where adding up begins.
"""

import torch

from kvchat.model.cpu.step_operations import (
    Activations,
    Pairs,
    StepOperations,
    Task,
    Unfit,
    check_widths,
)
from kvchat.model.decoder.decoder import Mixture, Mlp
from kvchat_kernels.cpu import experts, gates
from kvchat_kernels.cpu.experts import Choice
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
    gated = operations.input("gated", width, num_rows)
    place = gates.Place
    task: Task = {place.BOTH: both, place.OUT: gated.floats, place.WIDTH: width}
    constants = (place.POSITIVE, place.NEGATIVE, place.LINEAR, place.LARGEST)
    task |= dict(zip(constants, mlp.constants, strict=False))
    units = -(-width // gates.UNIT_COLUMNS)
    header = None if pairs is None else pairs.header
    operations.add(gates.gate_kernel(mlp.activation, is_gated), task, units, header=header)
    operations.products((mlp.down,), gated, gated.floats, out, pairs=pairs)


def add_mixture(
    operations: StepOperations,
    mixture: Mixture,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add a mixture of `values` [rows, hidden], rounded into `source`; writes `out`."""
    hidden, num_experts, top_k = values.shape[1], mixture.num_experts, mixture.top_k
    if not 0 < top_k <= num_experts:
        raise Unfit(f"chooses {top_k} of {num_experts} experts")
    pairs = operations.pairs(top_k, num_experts)
    width = experts.padded(num_experts)
    scores = operations.output(f"scores of {num_experts}", width)
    scores.fill_(experts.NO_SCORE)
    place, most = experts.Place, MAX_ROWS * top_k
    task: Task = {
        place.SCORES: scores,
        place.WIDTH_OF_SCORES: width,
        place.NUM_EXPERTS: num_experts,
        place.TOP_K: top_k,
        place.CHOSEN: _wholes(most),
        place.FACTORS: torch.zeros(most, dtype=torch.float32),
        place.PLACES: _wholes(most),
        place.ROWS: _wholes(most),
        place.COUNTS: _wholes(num_experts),
        place.GROUPS: pairs.groups,
        place.NUM_GROUPS: pairs.num_groups,
        place.WIDTH: hidden,
    }
    operations.products((mixture.router,), source, values, scores)
    routing = mixture.routing
    choice = Choice(mixture.normalises, routing.factors, routing.bias is not None)
    task |= {
        place.SCALE: routing.scale,
        place.LEAST_SUM: routing.least_sum,
        place.TOLERANCE: routing.tolerance,
    }
    if routing.bias is not None:
        task[place.BIAS] = routing.bias
    operations.add(experts.choosing_kernel(choice), task, 1)
    gathered = operations.input("gathered", hidden, most)
    rows = {place.X: values, place.OUT: gathered.floats}
    operations.add_of_pairs(experts.gathering_kernel(), task | rows, pairs)
    of_pairs = operations.output("experts", hidden, most)
    add_mlp(operations, mixture.experts, gathered, gathered.floats, of_pairs, pairs)
    task |= {place.X: of_pairs, place.OUT: out}
    if mixture.shared is not None:
        shared = task[place.SHARED] = operations.output("shared", hidden)
        add_mlp(operations, mixture.shared, source, values, shared)
    if mixture.shared_gate is not None:
        gate = task[place.SHARED_GATE] = operations.output("shared gate", 1)
        operations.products((mixture.shared_gate,), source, values, gate)
    kernel = experts.adding_kernel(mixture.shared is not None, mixture.shared_gate is not None)
    operations.add(kernel, task, None)


def _wholes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)
