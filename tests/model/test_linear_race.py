"""The race between products of few rows: choice follows times, and a wrong kernel never wins."""

import logging
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch.nn.functional import linear

from kvchat.model.linear_race import (
    ROW_BUCKETS,
    LinearFunction,
    LinearRace,
    LinearShape,
    Outcome,
    bucket_of,
    rows_won,
)
from support.linear_races import Cost, TimedProduct, VirtualStopwatch, layers_of

SHAPE = LinearShape(24, 16, "float32", False)


def raced(
    kernel: LinearFunction,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
    num_layers: int = 2,
) -> dict[tuple[LinearShape, int], Outcome]:
    """Race a product that costs nothing beside torch's, which does."""
    watch = VirtualStopwatch()
    layers = layers_of((24, 16), num_layers=num_layers, dtype=dtype, has_bias=has_bias)
    own = TimedProduct(watch, lambda *_: 1e-6)
    return LinearRace(watch, TimedProduct(watch, lambda *_: 1e-9, kernel), own).run(layers, {})


@pytest.mark.parametrize(
    ("kernel_us", "is_won"), [(5.0, True), (9.6, True), (9.8, False), (10.0, False), (30.0, False)]
)
def test_the_kernel_is_taken_where_it_is_faster_by_a_margin(kernel_us: float, is_won: bool) -> None:
    watch = VirtualStopwatch()
    race = LinearRace(
        watch,
        TimedProduct(watch, lambda *_: kernel_us * 1e-6),
        TimedProduct(watch, lambda *_: 10e-6),
    )

    outcomes = race.run(layers_of((24, 16)), {})

    assert set(outcomes) == {(SHAPE, num_rows) for num_rows in ROW_BUCKETS}
    assert all(outcome.is_won == is_won for outcome in outcomes.values())
    assert outcomes[SHAPE, 4].torch_s == pytest.approx(10e-6)
    assert outcomes[SHAPE, 4].kernel_s == pytest.approx(kernel_us * 1e-6)


def test_each_shape_and_bucket_has_an_outcome_of_its_own() -> None:
    """The kernel pads to 16 rows and costs the same for all; torch's is cheap for a few."""
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, lambda rows, weight: len(weight) * 1e-8)
    own = TimedProduct(watch, lambda rows, weight: rows * 24 * 1e-8 / 4)

    outcomes = LinearRace(watch, kernel, own).run(layers_of((24, 16), (12, 16)), {})

    won = {(shape.out_features, rows) for (shape, rows), found in outcomes.items() if found.is_won}
    assert won == {(24, 8), (24, 16), (12, 4), (12, 8), (12, 16)}


def test_a_few_times_out_of_line_decide_nothing() -> None:
    watch = VirtualStopwatch()
    calls = count()
    # Some of the machine's hiccups fall on one and not on the other.
    own = TimedProduct(watch, lambda *_: 1e-3 if next(calls) % 97 == 0 else 10e-6)
    kernel = TimedProduct(watch, lambda *_: 10.1e-6)

    outcomes = LinearRace(watch, kernel, own).run(layers_of((24, 16)), {})

    assert not any(outcome.is_won for outcome in outcomes.values())


def test_passes_rotate_through_all_layers_of_a_shape() -> None:
    watch = VirtualStopwatch()
    layers = layers_of((24, 16), num_layers=7)
    kernel = TimedProduct(watch, lambda *_: 1e-6)

    LinearRace(watch, kernel, TimedProduct(watch, lambda *_: 1e-6)).run(layers, {})

    runs = [weight for num_rows, weight in kernel.seen if num_rows == 16]
    assert set(runs) == {layer.weight.data_ptr() for layer in layers[SHAPE]}
    assert all(len(set(runs[i : i + 7])) == 7 for i in range(0, 28, 7)), "a weight came back early"


# Kernels that may not win


def off_at_the_end(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = linear(x, w, bias)
    out[-1, -1] += out.square().mean().sqrt() / 4
    return out


def no_number(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = linear(x, w, bias)
    out[0, 3] = torch.nan
    return out


def forgets_bias(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, w)


def a_row_too_few(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, w, bias)[:, 1:]


def in_double(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, w, bias).double()


def raises(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("PassManager::run failed\nand a hundred lines more")


def has_no_memory(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise torch.OutOfMemoryError("tried to allocate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kernel", [off_at_the_end, no_number, forgets_bias, a_row_too_few, in_double]
)
def test_a_kernel_of_other_numbers_never_wins(
    kernel: LinearFunction, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = raced(kernel, dtype, has_bias=True)

    assert len(outcomes) == len(ROW_BUCKETS)
    for outcome in outcomes.values():
        assert outcome.refusal == "it computes other numbers than torch"
        assert not outcome.is_won
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "24x16" in warnings[0].getMessage()
    assert "other numbers, and 4 more" in warnings[0].getMessage().replace(" than torch", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_orders_of_addition_are_no_other_numbers(dtype: torch.dtype) -> None:
    def backwards(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.flip(1).float() @ w.flip(1).float().T
        return (out if bias is None else out + bias.float()).to(x.dtype)

    outcomes = raced(backwards, dtype, has_bias=True)

    assert all(outcome.is_won for outcome in outcomes.values())


def test_one_layer_it_is_wrong_for_is_enough() -> None:
    weights: list[int] = []

    def only_the_first(x: torch.Tensor, w: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        weights.append(w.data_ptr())
        return linear(x, w) * (1.0 if w.data_ptr() == weights[0] else 1.01)

    assert not any(outcome.is_won for outcome in raced(only_the_first, num_layers=5).values())


def test_a_kernel_that_fails_never_wins_and_says_why_in_a_line() -> None:
    outcomes = raced(raises)

    assert {o.refusal for o in outcomes.values()} == {"RuntimeError: PassManager::run failed"}
    assert not rows_won(outcomes, SHAPE)


def test_no_memory_to_race_in_is_no_outcome() -> None:
    assert raced(has_no_memory) == {}


# Time


def test_no_shape_is_begun_once_time_is_over_and_the_next_run_goes_on() -> None:
    layers = layers_of((24, 16), (48, 16), (12, 16))
    known: dict[tuple[LinearShape, int], Outcome] = {}
    num_runs = 0
    while len(known) < 3 * len(ROW_BUCKETS):
        watch = VirtualStopwatch()
        kernel = TimedProduct(watch, lambda *_: 5e-4)
        own = TimedProduct(watch, lambda *_: 5e-4)
        before = set(known)
        known = LinearRace(watch, kernel, own, budget_s=2.0).run(layers, known)
        num_runs += 1

        one_race_s = 2 * 25 * 32 * 5e-4 + 2 * 2 * 5e-4
        assert watch.spent_s < 2.0 + 1.01 * one_race_s
        assert set(known) > before, "no progress"
        if num_runs == 1:
            assert [shape.out_features for shape, _ in known] == [48, 24, 12]
            assert {num_rows for _, num_rows in known} == {1}
    assert num_runs == 5


def test_compiling_leaves_time_to_race_in() -> None:
    """Two seconds were over with the second kernel that was compiled: a new GPU's products were
    torch's for a dozen loads, whichever was faster."""
    layers = layers_of((24, 16), (48, 16), (12, 16))
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, compiling(1.2))

    outcomes = LinearRace(watch, kernel, TimedProduct(watch, lambda *_: 1e-5)).run(layers, {})

    assert len(outcomes) == 3 * len(ROW_BUCKETS)
    assert watch.spent_s > 6 * 1.2


def test_no_shape_is_begun_once_compiling_has_taken_too_long() -> None:
    layers = layers_of(*((size, 16) for size in range(8, 20)))
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, compiling(3.0))

    outcomes = LinearRace(watch, kernel, linear, limit_s=10.0).run(layers, {})

    assert len(outcomes) == 4
    assert 12.0 < watch.spent_s < 13.0


def compiling(seconds: float) -> Cost:
    """What a kernel costs that is compiled once for one row, and once for more, for each shape."""
    compiled = set[tuple[bool, int]]()

    def cost(num_rows: int, weight: torch.Tensor) -> float:
        variant = (num_rows > 1, weight.shape[0])
        compiles = variant not in compiled
        compiled.add(variant)
        return seconds if compiles else 1e-5

    return cost


def test_what_is_known_is_not_raced_again() -> None:
    watch = VirtualStopwatch()
    product = TimedProduct(watch, lambda *_: 1e-6)
    race = LinearRace(watch, product, product)
    known = {
        (SHAPE, 1): Outcome(2.0, 1.0),
        (SHAPE, 2): Outcome(refusal="it was wrong"),
        (LinearShape(5, 5, "float32", False), 1): Outcome(1.0, 1.0),
    }

    outcomes = race.run(layers_of((24, 16)), known)

    assert watch.num_timed == len(ROW_BUCKETS) - 2
    assert {key: outcomes[key] for key in known} == known


# Buckets


def naive_rows(has_won: Callable[[int], bool]) -> set[int]:
    buckets = {1: 1, 2: 2, 3: 4, 4: 4}
    buckets |= dict.fromkeys(range(5, 9), 8) | dict.fromkeys(range(9, 17), 16)
    return {num_rows for num_rows, bucket in buckets.items() if has_won(bucket)}


@pytest.mark.parametrize("won", range(32))
def test_rows_have_the_outcome_of_the_next_larger_bucket(won: int) -> None:
    winners = {bucket for index, bucket in enumerate(ROW_BUCKETS) if won >> index & 1}
    outcomes = {
        (SHAPE, bucket): Outcome(1.0, 0.5 if bucket in winners else 1.0) for bucket in ROW_BUCKETS
    }

    assert rows_won(outcomes, SHAPE) == naive_rows(winners.__contains__)


def test_what_was_not_raced_is_torchs() -> None:
    outcomes = {(SHAPE, 4): Outcome(2.0, 1.0)}

    assert rows_won(outcomes, SHAPE) == {3, 4}
    assert not rows_won(outcomes, LinearShape(24, 16, "float32", True))
    assert [bucket_of(n) for n in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]
