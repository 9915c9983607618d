"""Mixtures of experts: choosing a row's experts, products with the chosen ones alone, their sum.

A pair is a row and one of its experts. The pairs of a step are sorted by expert: those of one
expert are a group, whose rows lie side by side, so that each expert that is chosen is read once for
all its rows. A product with the experts runs an ordinary product's kernel for each group. Which
experts a row has and how their outputs are added does not depend on the rows beside it.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import Any

import numpy as np
import torch

from kvchat_kernels.cpu.code import F32, F32S, I64, LANES, Code, Kernel, Value, Variable, kernel
from kvchat_kernels.cpu.maths import copy_floats, exp, sigmoid
from kvchat_kernels.cpu.matrix_products import Product
from kvchat_kernels.cpu.step import MANY_ROWS, NUM_HEADERS, Header
from kvchat_kernels.cpu.task import Memory, Task

# A score that counts as none: of an expert that was taken, and beyond the last expert.
NO_SCORE = -3e38
# What a product's task has a row of for each row of activations; all else is of weights.
_OF_PAIRS = frozenset({"x", "x_scales", "x_sums", "x_starts", "out"})


class ChoosingTask(Task):
    """Choosing the experts of rows. Whole numbers are int64.

    scores         float32 [rows, width_of_scores], changed; NO_SCORE from `num_experts` on
    bias           what scores are raised by for choosing alone, float32 [num_experts]
    scale          what factors that are sigmoids or shares are multiplied with
    least_sum      what their sum is added to; of shares, the least they are divided by
    tolerance      of a sparse mixer
    of_experts     what each expert's factor is multiplied with at last, float32 [num_experts]
    counts         room for a number for each expert

    It writes:

    chosen         an expert for each pair, [rows, top_k]
    factors        what the pair's output is multiplied with, float32 [rows, top_k]
    places         the pair's place in the order of experts, [rows, top_k]
    rows           the row of each place
    groups         headers of the groups, with NUM_ROWS, ARE_MANY, EXPERT and FIRST_PAIR
    num_groups     their number
    """

    scores: Memory
    width_of_scores: int
    num_experts: int
    top_k: int
    bias: Memory | None = None
    scale: float = 1.0
    least_sum: float = 0.0
    tolerance: float = 0.0
    of_experts: Memory | None = None
    counts: Memory
    chosen: Memory
    factors: Memory
    places: Memory
    rows: Memory
    groups: Memory
    num_groups: Memory


class GatheringTask(Task):
    """`x` is float32 [rows, width], `out` [pairs, width]; `rows` is as of choosing."""

    x: Memory
    out: Memory
    width: int
    rows: Memory


class AddingTask(Task):
    """`x` is float32 [pairs, width], `out` [rows, width]; `places` and `factors` as of choosing.

    shared        what an expert of all rows adds, float32 [rows, width]
    shared_gate   float32 [rows], before the sigmoid
    """

    x: Memory
    out: Memory
    width: int
    top_k: int
    places: Memory
    factors: Memory
    shared: Memory | None = None
    shared_gate: Memory | None = None


class GroupTask(Task):
    """A product with experts.

    kernel, task         of the product, for the expert 0 and the first pair
    by_expert, by_pair   what each number of its task grows by, from expert to expert and pair to
                         pair
    units                units of one expert
    groups, num_groups   as of choosing
    """

    kernel: Kernel[Any]
    task: Task
    by_expert: Memory
    by_pair: Memory
    units: int
    groups: Memory
    num_groups: Memory


def group_task(
    product: Product, num_experts: int, groups: torch.Tensor, num_groups: torch.Tensor
) -> GroupTask:
    """Return the task of a product whose matrix has the rows of all experts, one below another."""
    by_expert, by_pair = np.zeros((2, len(product.task.numbers)), np.int64)
    for place, (name, value) in enumerate(product.task.items()):
        if isinstance(value, torch.Tensor):
            row_bytes = value.stride(0) * value.itemsize
            if name in _OF_PAIRS:
                by_pair[place] = row_bytes
            else:
                by_expert[place] = row_bytes * (len(value) // num_experts)
    return GroupTask(
        kernel=product.kernel,
        task=product.task,
        by_expert=by_expert,
        by_pair=by_pair,
        units=product.num_units,
        groups=groups,
        num_groups=num_groups,
    )


def padded(num_experts: int) -> int:
    """Return the width of scores."""
    return -(-num_experts // LANES) * LANES


class Factors(StrEnum):
    """What the factors of experts are.

    SOFTMAX   a softmax of all scores, or, if they are normalised, of those of the chosen
    SIGMOID   the sigmoid of each score
    SHARE     a softmax of all scores, made before the bias chooses
    SPARSE    for one expert after another: its share of the softmax of those not yet chosen whose
              scores are within a tolerance of its own, as Phi's sparse mixer has it
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SHARE = "share"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class ExpertSets:
    """Sets of experts of the same size, one after another; a row's experts are of its best sets.

    number     how many there are, of which `num_best` are taken
    of_score   of how many of its best experts a set's score is the sum, at most the size of a set
    """

    number: int
    num_best: int
    of_score: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen, and what their factors are.

    normalises   the factors of a row have the sum 1, or nearly so; not of a sparse mixer
    has_bias     those with the largest sum of bias and sigmoid, or share, are chosen
    has_scales   factors that are a softmax are multiplied with a number of the expert
    sets         the sets of experts; None: all are one set. Not of a sparse mixer
    """

    normalises: bool
    factors: Factors = Factors.SOFTMAX
    has_bias: bool = False
    has_scales: bool = False
    sets: ExpertSets | None = None


@kernel("choosing", ChoosingTask)
def choosing_kernel(code: Code, choice: Choice) -> None:
    """Write the kernel that chooses the experts of all rows. Units: 1."""
    num_rows, top_k = code.header(Header.NUM_ROWS), code.task.top_k
    with code.loop(0, num_rows) as row:
        _write_row(code, row, choice)
    num_experts, num_pairs = code.task.num_experts, num_rows * top_k
    counts, chosen = code.task.counts, code.task.chosen
    with code.loop(0, num_experts) as expert:
        code.store(code.whole(0), counts, expert * 8)
    with code.loop(0, num_pairs) as pair:
        expert = code.load(chosen, pair * 8, I64)
        code.store(code.load(counts, expert * 8, I64) + 1, counts, expert * 8)
    _write_groups(code, num_experts, num_pairs, counts)
    with code.loop(0, num_pairs) as pair:
        expert = code.load(chosen, pair * 8, I64)
        place = code.load(counts, expert * 8, I64)
        code.store(place + 1, counts, expert * 8)
        code.store(place, code.task.places, pair * 8)
        code.store(pair // top_k, code.task.rows, place * 8)


def _write_groups(code: Code, num_experts: Value, num_pairs: Value, counts: Value) -> None:
    """Write: a header for each expert that has pairs; its count becomes its first place.

    All experts' rows are many, or none's: they are rounded together.
    """
    are_many = code.convert("zext", num_pairs >= num_experts * MANY_ROWS, I64)
    first, number = code.variable(code.whole(0)), code.variable(code.whole(0))
    with code.loop(0, num_experts) as expert:
        count = code.load(counts, expert * 8, I64)
        code.store(first.get(), counts, expert * 8)
        with code.when(count > 0):
            group = code.task.groups + number.get() * (8 * NUM_HEADERS)
            code.store(count, group, 8 * Header.NUM_ROWS)
            code.store(are_many, group, 8 * Header.ARE_MANY)
            code.store(first.get(), group, 8 * Header.FIRST_PAIR)
            code.store(expert, group, 8 * Header.EXPERT)
            number.set(number.get() + 1)
            first.set(first.get() + count)
    code.store(number.get(), code.task.num_groups, 0)


def _write_row(code: Code, row: Value, choice: Choice) -> None:
    """Write: take the expert with the largest score `top_k` times, and the factors of all."""
    width, top_k = code.task.width_of_scores, code.task.top_k
    scores = code.task.scores + row * width * 4
    chosen = code.task.chosen + row * top_k * 8
    factors = code.task.factors + row * top_k * 4
    total = code.variable(code.single(0.0))
    if choice.factors is Factors.SIGMOID:
        _write_sigmoids(code, scores)
    elif choice.factors is Factors.SHARE:
        _write_shares(code, scores)
    elif choice.factors is Factors.SOFTMAX:
        largest = _write_exponentials(code, scores, total, choice)
    if choice.sets is not None:
        _leave_best_sets(code, scores, choice, choice.sets)
    with code.loop(0, top_k) as number:
        expert = _best(code, scores, choice)
        factor = code.load(scores, expert * 4, F32)
        if choice.factors is Factors.SOFTMAX:
            factor = code.lane(exp(code, code.spread(factor - largest)), 0)
        elif choice.factors is Factors.SPARSE:
            factor = _sparse_share(code, scores, factor)
        code.store(expert, chosen, number * 8)
        code.store(factor, factors, number * 4)
        code.store(code.single(NO_SCORE), scores, expert * 4)
        if choice.normalises:
            total.set(total.get() + factor)
    if choice.factors is Factors.SPARSE:
        return
    if choice.factors is not Factors.SOFTMAX:
        scale, least = code.task.scale, code.task.least_sum
        is_share = choice.factors is Factors.SHARE
        divisor = code.greatest(total.get(), least) if is_share else total.get() + least
        share = scale / divisor if choice.normalises else scale
        with code.loop(0, top_k) as number:
            code.store(code.load(factors, number * 4, F32) * share, factors, number * 4)
        return
    with code.loop(0, top_k) as number:
        factor = code.load(factors, number * 4, F32) / total.get()
        if choice.has_scales:
            expert = code.load(chosen, number * 8, I64)
            factor = factor * code.load(code.task.of_experts, expert * 4, F32)
        code.store(factor, factors, number * 4)


def _leave_best_sets(code: Code, scores: Value, choice: Choice, sets: ExpertSets) -> None:
    """Write: experts of all but the best sets get no score. Of equal sets the first are best."""
    size = code.task.num_experts // sets.number
    of_sets = code.room(4 * sets.number)
    with code.loop(0, sets.number) as number:
        best = [code.variable(code.single(NO_SCORE)) for _ in range(sets.of_score)]
        with code.loop(0, size) as index:
            score = _score(code, scores, number * size + index, choice)
            for place in best:  # the largest is the first
                larger = code.greatest(place.get(), score)
                score = code.least(place.get(), score)
                place.set(larger)
        total = reduce(lambda one, other: one + other, [place.get() for place in best])
        code.store(total, of_sets, number * 4)
    with code.loop(0, sets.number) as number:
        own, num_better = code.load(of_sets, number * 4, F32), code.variable(code.whole(0))
        with code.loop(0, sets.number) as other:
            score = code.load(of_sets, other * 4, F32)
            is_better = code.select(other < number, score >= own, score > own)
            num_better.set(num_better.get() + code.convert("zext", is_better, I64))
        first = number * size
        end = code.select(num_better.get() < sets.num_best, first, first + size)
        with code.loop(first, end) as expert:
            code.store(code.single(NO_SCORE), scores, expert * 4)


def _score(code: Code, scores: Value, expert: Value, choice: Choice) -> Value:
    """Load what an expert is chosen by."""
    score = code.load(scores, expert * 4, F32)
    return score + code.load(code.task.bias, expert * 4, F32) if choice.has_bias else score


def _write_sigmoids(code: Code, scores: Value) -> None:
    with code.loop(0, code.task.width_of_scores, LANES) as index:
        score = code.load(scores, index * 4, F32S)
        code.store(sigmoid(code, score), scores, index * 4)


def _write_shares(code: Code, scores: Value) -> None:
    """Write the shares of all scores in their sum; what is beyond the last expert stays."""
    largest = code.spread(code.load(scores, _best(code, scores, Choice(normalises=False)) * 4, F32))
    sums = code.variable(code.floats(0.0))
    with code.loop(0, code.task.width_of_scores, LANES) as index:
        sums.set(sums.get() + exp(code, code.load(scores, index * 4, F32S) - largest))
    share = code.spread(code.single(1.0) / code.total(sums.get()))
    with code.loop(0, code.task.width_of_scores, LANES) as index:
        score = code.load(scores, index * 4, F32S)
        value = exp(code, score - largest) * share
        code.store(code.select(score > NO_SCORE / 2, value, score), scores, index * 4)


def _sparse_share(code: Code, scores: Value, largest: Value) -> Value:
    """Return the share of the largest score, in the softmax of those within the tolerance."""
    sums = code.variable(code.floats(0.0))
    best, zero = code.spread(largest), code.floats(0.0)
    tolerance = code.spread(code.task.tolerance)
    with code.loop(0, code.task.width_of_scores, LANES) as index:
        score = code.load(scores, index * 4, F32S)
        size = code.greatest(code.greatest(score, zero - score), best)
        is_far = (best - score) / size > tolerance
        sums.set(sums.get() + code.select(is_far, zero, exp(code, score - best)))
    return code.single(1.0) / code.total(sums.get())


def _write_exponentials(code: Code, scores: Value, total: Variable, choice: Choice) -> Value:
    """Write the sum of all exponentials into `total`; return the score they are relative to."""
    largest = code.load(scores, _best(code, scores, choice) * 4, F32)
    if not choice.normalises:
        sums = code.variable(code.floats(0.0))
        with code.loop(0, code.task.width_of_scores, LANES) as index:
            score = code.load(scores, index * 4, F32S)
            sums.set(sums.get() + exp(code, score - code.spread(largest)))
        total.set(code.total(sums.get()))
    return largest


def _best(code: Code, scores: Value, choice: Choice) -> Value:
    """Return the expert with the largest score; of equal ones the first. Without a number: 0."""
    best, expert = code.variable(code.single(NO_SCORE)), code.variable(code.whole(0))
    with code.loop(0, code.task.num_experts) as index:
        score = _score(code, scores, index, choice)
        is_better = score > best.get()
        expert.set(code.select(is_better, index, expert.get()))
        best.set(code.select(is_better, score, best.get()))
    return expert.get()


@kernel("gathering", GatheringTask)
def gathering_kernel(code: Code) -> None:
    """Write the kernel that copies the row of a pair to the pair's place. Units: pairs."""
    width = code.task.width
    row = code.load(code.task.rows, code.unit * 8, I64)
    source = code.task.x + row * width * 4
    copy_floats(code, source, code.task.out + code.unit * width * 4, width)


@kernel("group", GroupTask)
def group_kernel(code: Code, num_numbers: int) -> None:
    """Write the kernel that runs the kernel of a product whose task has so many numbers.

    Units: `units` for each possible group.
    """
    units = code.task.units
    number = code.unit // units
    num_groups = code.load(code.task.num_groups, 0, I64)
    task = code.room(8 * num_numbers)
    with code.when(number < num_groups):
        group = code.task.groups + number * (8 * NUM_HEADERS)
        first, expert = (
            code.load(group, 8 * place, I64) for place in (Header.FIRST_PAIR, Header.EXPERT)
        )
        for place in range(0, 8 * num_numbers, 8):
            own, by_expert, by_pair = (
                code.load(numbers, place, I64)
                for numbers in (code.task.task, code.task.by_expert, code.task.by_pair)
            )
            code.store(own + expert * by_expert + first * by_pair, task, place)
        code.run_kernel(code.task.kernel, task, group, code.unit % units)


@kernel("adding experts", AddingTask)
def adding_kernel(code: Code, has_shared: bool, has_gate: bool) -> None:
    """Write the kernel that adds up a row's experts. Units: rows."""
    width, top_k = code.task.width, code.task.top_k
    offset = code.unit * width * 4
    out, start = code.task.out + offset, code.floats(0.0)
    factor = code.floats(1.0)
    if has_gate:
        gate = code.load(code.task.shared_gate, code.unit * 4, F32)
        factor = sigmoid(code, code.spread(gate))
    with code.loop(0, width, LANES) as index:
        if has_shared:
            start = code.load(code.task.shared + offset, index * 4, F32S) * factor
        code.store(start, out, index * 4)
    with code.loop(0, top_k) as number:
        pair = code.unit * top_k + number
        output = code.task.x
        output = output + code.load(code.task.places, pair * 8, I64) * width * 4
        factor = code.spread(code.load(code.task.factors, pair * 4, F32))
        with code.loop(0, width, LANES) as index:
            value = code.load(output, index * 4, F32S) * factor
            code.store(code.load(out, index * 4, F32S) + value, out, index * 4)
