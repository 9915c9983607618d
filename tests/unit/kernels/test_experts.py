"""The kernels of a mixture of experts alone, each against its formula in torch."""

from typing import Any

import numpy as np
import pytest
import torch

from kvchat_kernels.cpu import experts, products
from kvchat_kernels.cpu.experts import (
    AddingTask,
    Choice,
    ChoosingTask,
    ExpertSets,
    Factors,
    GatheringTask,
    group_task,
)
from kvchat_kernels.cpu.maths import Stored
from kvchat_kernels.cpu.matrix_products import Product
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.step import MAX_ROWS, NUM_HEADERS, Header
from kvchat_kernels.cpu.task import Task
from support.cpu_tasks import run_units

WIDTH = 64


class Scene:
    """Rows that choose `top_k` of `num_experts`, and the memory that kernels share."""

    def __init__(self, num_rows: int, num_experts: int, top_k: int) -> None:
        self.num_rows, self.num_experts, self.top_k = num_rows, num_experts, top_k
        self.num_pairs = num_rows * top_k
        width = experts.padded(num_experts)
        self.scores = torch.full((num_rows, width), experts.NO_SCORE)
        self.chosen = torch.full((num_rows, top_k), -1)
        self.factors = torch.zeros(num_rows, top_k)
        self.places = torch.full((num_rows, top_k), -1)
        self.rows = torch.full((self.num_pairs,), -1)
        self.counts = torch.full((num_experts,), -1)
        self.groups = torch.full((min(num_experts, self.num_pairs), NUM_HEADERS), -1)
        self.num_groups = torch.full((1,), -1)
        self.header = np.zeros(NUM_HEADERS, np.int64)
        self.header[Header.NUM_ROWS] = num_rows

    def choose(self, scores: torch.Tensor, choice: Choice | None = None, **rule: Any) -> None:
        self.scores[:, : self.num_experts] = scores
        task = ChoosingTask(
            scores=self.scores,
            width_of_scores=self.scores.shape[1],
            num_experts=self.num_experts,
            top_k=self.top_k,
            counts=self.counts,
            chosen=self.chosen,
            factors=self.factors,
            places=self.places,
            rows=self.rows,
            groups=self.groups,
            num_groups=self.num_groups,
            **rule,
        )
        self.run(experts.choosing_kernel(choice or Choice(normalises=True)), task, 1)

    def gather(self, x: torch.Tensor, out: torch.Tensor, num_threads: int = 1) -> None:
        task = GatheringTask(x=x, out=out, width=WIDTH, rows=self.rows)
        self.run(experts.gathering_kernel(), task, self.num_pairs, num_threads)

    def add(self, x: torch.Tensor, out: torch.Tensor, kernel: Any, **shared: Any) -> None:
        task = AddingTask(
            x=x,
            out=out,
            width=WIDTH,
            top_k=self.top_k,
            places=self.places,
            factors=self.factors,
            **shared,
        )
        self.run(kernel, task, self.num_rows)

    def run(self, kernel: Any, task: Task, num_units: int, num_threads: int = 1) -> None:
        run_units(Operation(kernel, task, self.header, None), num_units, num_threads)


SIZES = [(1, 8, 2), (5, 10, 3), (MAX_ROWS, 5, 5), (7, 64, 6), (3, 1, 1)]


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_takes_its_best_experts_and_their_softmax(size, normalises):
    torch.manual_seed(size[1])
    scene, scores = Scene(*size), torch.randn(size[0], size[1]) * 5

    scene.choose(scores, Choice(normalises))

    best, order = scores.topk(scene.top_k, dim=-1)
    shares = scores.softmax(dim=-1).gather(1, order)
    assert torch.equal(scene.chosen, order)
    expected = best.softmax(dim=-1) if normalises else shares
    assert torch.allclose(scene.factors, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Factors.SIGMOID, Factors.SHARE])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_bias_may_choose_and_is_in_no_factor(size, normalises, has_bias, kind):
    """ERNIE's is added to the softmax of the scores, not to the scores.

    The sum that shares are divided by has a lower limit, which was once added to it.
    """
    is_share = kind is Factors.SHARE
    torch.manual_seed(size[1])
    scene, scores = Scene(*size), torch.randn(size[0], size[1]) * (2 if is_share else 5)
    bias, scale, least = torch.randn(size[1]), *((1.0, 0.3) if is_share else (2.5, 1e-2))

    for _ in range(2):  # the scores beyond the last expert must stay what they are
        choice = Choice(normalises, kind, has_bias)
        scene.choose(scores, choice, bias=bias, scale=scale, least_sum=least)

    shares = scores.softmax(dim=-1) if is_share else scores.sigmoid()
    order = (shares + bias if has_bias else shares).topk(scene.top_k, dim=-1)[1]
    expected = shares.gather(1, order)
    if normalises:
        total = expected.sum(dim=-1, keepdim=True)
        expected = expected / (total.clamp(min=least) if is_share else total + least)
    assert torch.equal(scene.chosen, order)
    assert torch.allclose(scene.factors, expected * scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "has_bias", "of_score"), [(Factors.SIGMOID, True, 2), (Factors.SHARE, False, 1)]
)
@pytest.mark.parametrize(
    ("size", "number", "num_best"),
    [((1, 8, 2), 4, 1), ((MAX_ROWS, 64, 6), 8, 3), ((7, 12, 4), 2, 1), ((5, 10, 3), 5, 5)],
)
def test_a_row_takes_its_experts_of_its_best_sets(size, number, num_best, kind, has_bias, of_score):
    """DeepSeek V3 adds up the two best of a set, V2 takes the best."""
    torch.manual_seed(size[1])
    scene, scores = Scene(*size), torch.randn(size[0], size[1])
    bias, sets = 0.5 * torch.randn(size[1]), ExpertSets(number, num_best, of_score)

    scene.choose(scores, Choice(False, kind, has_bias, sets=sets), bias=bias)

    shares = scores.sigmoid() if kind is Factors.SIGMOID else scores.softmax(dim=-1)
    by = (shares + bias if has_bias else shares).view(size[0], number, -1)
    best = by.topk(of_score, dim=-1)[0].sum(dim=-1).topk(num_best, dim=-1)[1]
    is_wrong = torch.ones(size[0], number, dtype=torch.bool).scatter(1, best, False)
    order = by.masked_fill(is_wrong[..., None], -torch.inf).flatten(1).topk(scene.top_k, dim=-1)[1]
    assert torch.equal(scene.chosen, order)
    assert torch.allclose(scene.factors, shares.gather(1, order), rtol=1e-5, atol=1e-6)


def test_of_equal_sets_the_first_are_taken() -> None:
    scene = Scene(2, 8, 2)
    scores = torch.zeros(2, 8)
    scores[1, 4:] = 1.0

    scene.choose(scores, Choice(False, Factors.SIGMOID, sets=ExpertSets(4, 1, 2)))

    assert scene.chosen.tolist() == [[0, 1], [4, 5]]


@pytest.mark.parametrize("shift", [-9.0, 0.0, 9.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_sparse_mixer_compares_an_expert_with_those_near_it(size, shift):
    """Phi's. What is near is measured by the larger of the best score and a score's size."""
    torch.manual_seed(size[1])
    scene, scores = Scene(*size), torch.randn(size[0], size[1]) + shift

    scene.choose(scores, Choice(False, Factors.SPARSE), tolerance=0.3)

    rest = scores.clone()
    for place in range(scene.top_k):
        best, expert = rest.max(dim=-1, keepdim=True)
        is_far = (best - scores) / scores.abs().clamp(min=best) > 0.3
        share = rest.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, expert)
        assert torch.equal(scene.chosen[:, place, None], expert)
        assert torch.allclose(scene.factors[:, place, None], share, rtol=1e-5, atol=1e-6)
        rest = rest.scatter(1, expert, -torch.inf)


def test_of_equal_scores_the_first_expert_is_taken_and_no_number_is_none() -> None:
    scene = Scene(3, 9, 2)
    scores = torch.zeros(3, 9)
    scores[1, 4:] = 7.0
    scores[2] = float("nan")

    scene.choose(scores)

    assert scene.chosen[:2].tolist() == [[0, 1], [4, 5]]
    assert scene.chosen[2].tolist() == [0, 0], "an expert that there is"


@pytest.mark.parametrize("size", SIZES)
def test_pairs_are_sorted_by_expert(size: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    scene = Scene(*size)

    scene.choose(torch.randn(size[0], size[1]))

    flat = scene.chosen.flatten()
    order = flat.argsort(stable=True)
    assert torch.equal(scene.rows, order // scene.top_k)
    assert torch.equal(scene.places.flatten()[order], torch.arange(scene.num_pairs))
    chosen, counts = flat.unique(return_counts=True)
    groups = scene.groups[: int(scene.num_groups)]
    assert torch.equal(groups[:, Header.EXPERT], chosen)
    assert torch.equal(groups[:, Header.NUM_ROWS], counts)
    assert torch.equal(groups[:, Header.FIRST_PAIR], counts.cumsum(0) - counts)
    assert bool((scene.groups[len(groups) :] == -1).all()), "no more than there are"


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_the_chosen_experts(size, num_threads):
    """Gathered, multiplied with each pair's expert, and added up: as a loop over rows does it."""
    torch.manual_seed(2)
    scene, num_out = Scene(*size), 20
    x, weights = torch.randn(scene.num_rows, WIDTH), torch.randn(scene.num_experts, num_out, WIDTH)
    scene.choose(torch.randn(size[0], size[1]))
    # All rows choose alike now: groups of the step before are left behind the new ones.
    scene.choose(torch.randn(1, size[1]).expand(size[0], -1))

    gathered = torch.zeros(scene.num_pairs, WIDTH)
    scene.gather(x, gathered, num_threads)
    out = torch.zeros(scene.num_pairs, num_out)
    multiply(scene, gathered, weights, out, num_threads)

    for row in range(scene.num_rows):
        for which, expert in enumerate(scene.chosen[row].tolist()):
            place = int(scene.places[row, which])
            assert torch.equal(gathered[place], x[row])
            assert torch.allclose(out[place], weights[expert] @ x[row], atol=1e-4)


def multiply(
    scene: Scene, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, num_threads: int
) -> None:
    """Run the product's kernel for each group, two units an expert."""
    num_out, chunk = out.shape[1], 12
    product = products.ProductTask(
        weights=weights.flatten(0, 1),
        num_out=num_out,
        num_in=WIDTH,
        x=x,
        x_stride=WIDTH * 4,
        out=out,
        out_stride=num_out * 4,
        chunk=chunk,
    )
    kernel, units = products.product_kernel(Stored.FLOAT, False), -(-num_out // chunk)
    whole = Product(kernel, product, units)
    task = group_task(whole, scene.num_experts, scene.groups, scene.num_groups)
    group = experts.group_kernel(len(product.numbers))
    # As a step has it: units for as many groups as there can be, also for those that there are not.
    scene.run(group, task, units * len(scene.groups), num_threads)


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
def test_outputs_are_added_by_their_factors(has_shared: bool, has_gate: bool) -> None:
    torch.manual_seed(3)
    scene = Scene(5, 10, 3)
    scene.choose(torch.randn(5, 10))
    outputs, shared = torch.randn(scene.num_pairs, WIDTH), torch.randn(5, WIDTH)
    gate, out = torch.randn(5), torch.full((5, WIDTH), float("nan"))
    kernel = experts.adding_kernel(has_shared, has_gate)

    scene.add(outputs, out, kernel, shared=shared, shared_gate=gate)

    expected = (outputs[scene.places] * scene.factors[..., None]).sum(dim=1)
    if has_shared:
        expected += shared * (gate.sigmoid()[:, None] if has_gate else 1.0)
    assert torch.allclose(out, expected, atol=1e-5)


def test_a_row_is_the_same_beside_others_to_the_bit() -> None:
    torch.manual_seed(4)
    scores, x = torch.randn(MAX_ROWS, 8), torch.randn(MAX_ROWS, WIDTH)
    weights = torch.randn(8, WIDTH, WIDTH)

    def mixed(rows: slice) -> torch.Tensor:
        scene = Scene(len(x[rows]), 8, 2)
        scene.choose(scores[rows])
        gathered, out = torch.zeros(2, scene.num_pairs, WIDTH)
        added, source = torch.zeros(scene.num_rows, WIDTH), x[rows].contiguous()
        scene.gather(source, gathered)
        multiply(scene, gathered, weights, out, 1)
        scene.add(out, added, experts.adding_kernel(False, False))
        return added

    together = mixed(slice(None))

    for row in range(MAX_ROWS):
        assert torch.equal(mixed(slice(row, row + 1))[0], together[row])
