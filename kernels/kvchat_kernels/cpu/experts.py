"""Mixtures of experts: choosing a row's experts, products with the chosen ones alone, their sum.

A pair is a row and one of its experts. The pairs of a step are sorted by expert: those of one
expert are a group, whose rows lie side by side, so that each expert that is chosen is read once for
all its rows. A product with the experts runs an ordinary product's kernel for each group. Which
experts a row has and how their outputs are added does not depend on the rows beside it.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache

from kvchat_kernels.cpu.block_rows import NUM_PLACES
from kvchat_kernels.cpu.code import F32, F32S, I64, LANES, Code, Kernel, Value, Variable
from kvchat_kernels.cpu.maths import exp, sigmoid
from kvchat_kernels.cpu.step import NUM_HEADERS, Header

# A score that counts as none: of an expert that was taken, and beyond the last expert.
NO_SCORE = -3e38


class Place(IntEnum):
    """The task that choosing, gathering and adding share. Integers are int64.

    SCORES         float32 [rows, WIDTH_OF_SCORES], changed; NO_SCORE from NUM_EXPERTS on
    NUM_EXPERTS, TOP_K
    CHOSEN         an expert for each pair, [rows, TOP_K]
    FACTORS        what the pair's output is multiplied with, float32 [rows, TOP_K]
    PLACES         the pair's place in the order of experts, [rows, TOP_K]
    ROWS           the row of each place
    COUNTS         room for a number for each expert
    GROUPS         headers of the groups: NUM_ROWS, and see Group
    NUM_GROUPS     address of their number
    X, OUT         float32 [rows, WIDTH] and [pairs, WIDTH] to gather, the other way to add
    SHARED         what an expert of all rows adds, float32 [rows, WIDTH]
    SHARED_GATE    float32 [rows], before the sigmoid
    BIAS           what scores are raised by for choosing alone, float32 [NUM_EXPERTS]
    SCALE          what factors that are sigmoids or shares are multiplied with, float32
    LEAST_SUM      what their sum is added to, float32; of shares, the least they are divided by
    TOLERANCE      of a sparse mixer, float32
    """

    SCORES = 0
    WIDTH_OF_SCORES = 1
    NUM_EXPERTS = 2
    TOP_K = 3
    CHOSEN = 4
    FACTORS = 5
    PLACES = 6
    ROWS = 7
    COUNTS = 8
    GROUPS = 9
    NUM_GROUPS = 10
    X = 11
    OUT = 12
    WIDTH = 13
    SHARED = 14
    SHARED_GATE = 15
    BIAS = 16
    SCALE = 17
    LEAST_SUM = 18
    TOLERANCE = 19


class Group(IntEnum):
    """What the header of a group has beside NUM_ROWS, in places that products do not read."""

    FIRST = 1
    EXPERT = 2


class GroupPlace(IntEnum):
    """The task of a product with experts.

    KERNEL               address of the product's kernel
    TASK                 the product's own task, of NUM_PLACES numbers, for the expert 0 and the
                         first pair
    BY_EXPERT, BY_PAIR   what each of its numbers grows by, from expert to expert and pair to pair
    UNITS                units of one expert
    GROUPS, NUM_GROUPS   as in Place
    """

    KERNEL = 0
    TASK = 1
    BY_EXPERT = 2
    BY_PAIR = 3
    UNITS = 4
    GROUPS = 5
    NUM_GROUPS = 6


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
class Choice:
    """How experts are chosen, and what their factors are.

    normalises   the factors of a row have the sum 1, or nearly so; not of a sparse mixer
    has_bias     those with the largest sum of bias and sigmoid, or share, are chosen
    """

    normalises: bool
    factors: Factors = Factors.SOFTMAX
    has_bias: bool = False


@cache
def choosing_kernel(choice: Choice) -> Kernel:
    """Return the kernel that chooses the experts of all rows. Units: 1."""
    return Kernel("choosing", (choice,), lambda code: _write_choosing(code, choice))


@cache
def gathering_kernel() -> Kernel:
    """Return the kernel that copies the row of a pair to the pair's place. Units: pairs."""
    return Kernel("gathering", (), _write_gathering)


@cache
def group_kernel() -> Kernel:
    """Return the kernel that runs a product's kernel. Units: UNITS for each possible group."""
    return Kernel("group", (), _write_group)


@cache
def adding_kernel(has_shared: bool, has_gate: bool) -> Kernel:
    """Return the kernel that adds up a row's experts. Units: rows."""
    return Kernel(
        "adding experts",
        (has_shared, has_gate),
        lambda code: _write_adding(code, has_shared, has_gate),
    )


def _write_choosing(code: Code, choice: Choice) -> None:
    num_rows, top_k = code.header(Header.NUM_ROWS), code.field(Place.TOP_K)
    with code.loop(0, num_rows) as row:
        _write_row(code, row, choice)
    num_experts, num_pairs = code.field(Place.NUM_EXPERTS), num_rows * top_k
    counts, chosen = code.field(Place.COUNTS), code.field(Place.CHOSEN)
    with code.loop(0, num_experts) as expert:
        code.store(code.whole(0), counts, expert * 8)
    with code.loop(0, num_pairs) as pair:
        expert = code.load(chosen, pair * 8, I64)
        code.store(code.load(counts, expert * 8, I64) + 1, counts, expert * 8)
    _write_groups(code, num_experts, counts)
    with code.loop(0, num_pairs) as pair:
        expert = code.load(chosen, pair * 8, I64)
        place = code.load(counts, expert * 8, I64)
        code.store(place + 1, counts, expert * 8)
        code.store(place, code.field(Place.PLACES), pair * 8)
        code.store(pair // top_k, code.field(Place.ROWS), place * 8)


def _write_groups(code: Code, num_experts: Value, counts: Value) -> None:
    """Write: a header for each expert that has pairs; its count becomes its first place."""
    first, number = code.variable(code.whole(0)), code.variable(code.whole(0))
    with code.loop(0, num_experts) as expert:
        count = code.load(counts, expert * 8, I64)
        code.store(first.get(), counts, expert * 8)
        with code.when(count > 0):
            group = code.field(Place.GROUPS) + number.get() * (8 * NUM_HEADERS)
            code.store(count, group, 8 * Header.NUM_ROWS)
            code.store(first.get(), group, 8 * Group.FIRST)
            code.store(expert, group, 8 * Group.EXPERT)
            number.set(number.get() + 1)
            first.set(first.get() + count)
    code.store(number.get(), code.field(Place.NUM_GROUPS), 0)


def _write_row(code: Code, row: Value, choice: Choice) -> None:
    """Write: take the expert with the largest score, TOP_K times, and the factors of all taken."""
    width, top_k = code.field(Place.WIDTH_OF_SCORES), code.field(Place.TOP_K)
    scores = code.field(Place.SCORES) + row * width * 4
    chosen = code.field(Place.CHOSEN) + row * top_k * 8
    factors = code.field(Place.FACTORS) + row * top_k * 4
    total = code.variable(code.single(0.0))
    if choice.factors is Factors.SIGMOID:
        _write_sigmoids(code, scores)
    elif choice.factors is Factors.SHARE:
        _write_shares(code, scores)
    elif choice.factors is Factors.SOFTMAX:
        largest = _write_exponentials(code, scores, total, choice)
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
        scale, least = (code.float_field(place) for place in (Place.SCALE, Place.LEAST_SUM))
        is_share = choice.factors is Factors.SHARE
        divisor = code.greatest(total.get(), least) if is_share else total.get() + least
        share = scale / divisor if choice.normalises else scale
        with code.loop(0, top_k) as number:
            code.store(code.load(factors, number * 4, F32) * share, factors, number * 4)
        return
    with code.loop(0, top_k) as number:
        factor = code.load(factors, number * 4, F32)
        code.store(factor / total.get(), factors, number * 4)


def _write_sigmoids(code: Code, scores: Value) -> None:
    with code.loop(0, code.field(Place.WIDTH_OF_SCORES), LANES) as index:
        score = code.load(scores, index * 4, F32S)
        code.store(sigmoid(code, score), scores, index * 4)


def _write_shares(code: Code, scores: Value) -> None:
    """Write the shares of all scores in their sum; what is beyond the last expert stays."""
    largest = code.spread(code.load(scores, _best(code, scores, Choice(normalises=False)) * 4, F32))
    sums = code.variable(code.floats(0.0))
    with code.loop(0, code.field(Place.WIDTH_OF_SCORES), LANES) as index:
        sums.set(sums.get() + exp(code, code.load(scores, index * 4, F32S) - largest))
    share = code.spread(code.single(1.0) / code.total(sums.get()))
    with code.loop(0, code.field(Place.WIDTH_OF_SCORES), LANES) as index:
        score = code.load(scores, index * 4, F32S)
        value = exp(code, score - largest) * share
        code.store(code.select(score > NO_SCORE / 2, value, score), scores, index * 4)


def _sparse_share(code: Code, scores: Value, largest: Value) -> Value:
    """Return the share of the largest score, in the softmax of those within the tolerance."""
    sums = code.variable(code.floats(0.0))
    best, zero = code.spread(largest), code.floats(0.0)
    tolerance = code.spread(code.float_field(Place.TOLERANCE))
    with code.loop(0, code.field(Place.WIDTH_OF_SCORES), LANES) as index:
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
        with code.loop(0, code.field(Place.WIDTH_OF_SCORES), LANES) as index:
            score = code.load(scores, index * 4, F32S)
            sums.set(sums.get() + exp(code, score - code.spread(largest)))
        total.set(code.total(sums.get()))
    return largest


def _best(code: Code, scores: Value, choice: Choice) -> Value:
    """Return the expert with the largest score; of equal ones the first. Without a number: 0."""
    best, expert = code.variable(code.single(NO_SCORE)), code.variable(code.whole(0))
    with code.loop(0, code.field(Place.NUM_EXPERTS)) as index:
        score = code.load(scores, index * 4, F32)
        if choice.has_bias:
            score = score + code.load(code.field(Place.BIAS), index * 4, F32)
        is_better = score > best.get()
        expert.set(code.select(is_better, index, expert.get()))
        best.set(code.select(is_better, score, best.get()))
    return expert.get()


def _write_gathering(code: Code) -> None:
    width = code.field(Place.WIDTH)
    row = code.load(code.field(Place.ROWS), code.unit * 8, I64)
    source = code.field(Place.X) + row * width * 4
    target = code.field(Place.OUT) + code.unit * width * 4
    with code.loop(0, width, LANES) as index:
        code.store(code.load(source, index * 4, F32S), target, index * 4)


def _write_group(code: Code) -> None:
    units = code.field(GroupPlace.UNITS)
    number = code.unit // units
    num_groups = code.load(code.field(GroupPlace.NUM_GROUPS), 0, I64)
    task = code.room(8 * NUM_PLACES)
    with code.when(number < num_groups):
        group = code.field(GroupPlace.GROUPS) + number * (8 * NUM_HEADERS)
        first, expert = (code.load(group, 8 * place, I64) for place in (Group.FIRST, Group.EXPERT))
        for place in range(0, 8 * NUM_PLACES, 8):
            own, by_expert, by_pair = (
                code.load(code.field(part), place, I64)
                for part in (GroupPlace.TASK, GroupPlace.BY_EXPERT, GroupPlace.BY_PAIR)
            )
            code.store(own + expert * by_expert + first * by_pair, task, place)
        code.run_kernel(code.field(GroupPlace.KERNEL), task, group, code.unit % units)


def _write_adding(code: Code, has_shared: bool, has_gate: bool) -> None:
    width, top_k = code.field(Place.WIDTH), code.field(Place.TOP_K)
    offset = code.unit * width * 4
    out, start = code.field(Place.OUT) + offset, code.floats(0.0)
    factor = code.floats(1.0)
    if has_gate:
        gate = code.load(code.field(Place.SHARED_GATE), code.unit * 4, F32)
        factor = sigmoid(code, code.spread(gate))
    with code.loop(0, width, LANES) as index:
        if has_shared:
            start = code.load(code.field(Place.SHARED) + offset, index * 4, F32S) * factor
        code.store(start, out, index * 4)
    with code.loop(0, top_k) as number:
        pair = code.unit * top_k + number
        output = code.field(Place.X)
        output = output + code.load(code.field(Place.PLACES), pair * 8, I64) * width * 4
        factor = code.spread(code.load(code.field(Place.FACTORS), pair * 4, F32))
        with code.loop(0, width, LANES) as index:
            value = code.load(output, index * 4, F32S) * factor
            code.store(code.load(out, index * 4, F32S) + value, out, index * 4)
