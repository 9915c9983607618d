"""Autotuning of products of few rows: choice follows times, and a wrong kernel never wins.

Timings survive the process, and nothing that their file says is believed unchecked.
"""

import json
import logging
import random
import stat
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from kvchat.core.config import ModelConfig
from kvchat.model import self_test
from kvchat.model.batch import SequencePiece
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.gpu import fused_parts
from kvchat.model.gpu.fused_parts import LinearShape, few_rows_linear
from kvchat.model.gpu.gemm_autotune import (
    ROW_BUCKETS,
    AutotuneCache,
    GemmAutotuner,
    LinearFunction,
    Outcome,
    autotune_products,
    bucket_of,
    rows_for_kernel,
)
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.self_test import ensure_trusted
from support.autotuning import Cost, TimedProduct, VirtualStopwatch, layers_of
from support.checkpoints import save_checkpoint, tiny_model
from support.fused_models import fused, without_cpu_code
from support.graph_recorder import Recorder
from support.paged_scene import Scene

SHAPE = LinearShape(24, 16, "float32", False)


def tuned(
    kernel: LinearFunction,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
    num_layers: int = 2,
) -> dict[tuple[LinearShape, int], Outcome]:
    """Tune a product that costs nothing beside torch's, which does."""
    watch = VirtualStopwatch()
    layers = layers_of((24, 16), num_layers=num_layers, dtype=dtype, has_bias=has_bias)
    own = TimedProduct(watch, lambda *_: 1e-6)
    return GemmAutotuner(watch, TimedProduct(watch, lambda *_: 1e-9, kernel), own).run(layers, {})


@pytest.mark.parametrize(
    ("kernel_us", "is_faster"),
    [(5.0, True), (9.6, True), (9.8, False), (10.0, False), (30.0, False)],
)
def test_the_kernel_is_taken_where_it_is_faster_by_a_margin(
    kernel_us: float, is_faster: bool
) -> None:
    watch = VirtualStopwatch()
    tuner = GemmAutotuner(
        watch,
        TimedProduct(watch, lambda *_: kernel_us * 1e-6),
        TimedProduct(watch, lambda *_: 10e-6),
    )

    outcomes = tuner.run(layers_of((24, 16)), {})

    assert set(outcomes) == {(SHAPE, num_rows) for num_rows in ROW_BUCKETS}
    assert all(outcome.is_faster == is_faster for outcome in outcomes.values())
    assert outcomes[SHAPE, 4].torch_s == pytest.approx(10e-6)
    assert outcomes[SHAPE, 4].kernel_s == pytest.approx(kernel_us * 1e-6)


def test_each_shape_and_bucket_has_an_outcome_of_its_own() -> None:
    """The kernel pads to 16 rows and costs the same for all; torch's is cheap for a few."""
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, lambda rows, weight: len(weight) * 1e-8)
    own = TimedProduct(watch, lambda rows, weight: rows * 24 * 1e-8 / 4)

    outcomes = GemmAutotuner(watch, kernel, own).run(layers_of((24, 16), (12, 16)), {})

    won = {
        (shape.out_features, rows) for (shape, rows), found in outcomes.items() if found.is_faster
    }
    assert won == {(24, 8), (24, 16), (12, 4), (12, 8), (12, 16)}


def test_a_few_times_out_of_line_decide_nothing() -> None:
    watch = VirtualStopwatch()
    calls = count()
    # Some of the machine's hiccups fall on one and not on the other.
    own = TimedProduct(watch, lambda *_: 1e-3 if next(calls) % 97 == 0 else 10e-6)
    kernel = TimedProduct(watch, lambda *_: 10.1e-6)

    outcomes = GemmAutotuner(watch, kernel, own).run(layers_of((24, 16)), {})

    assert not any(outcome.is_faster for outcome in outcomes.values())


def test_passes_rotate_through_all_layers_of_a_shape() -> None:
    watch = VirtualStopwatch()
    layers = layers_of((24, 16), num_layers=7)
    kernel = TimedProduct(watch, lambda *_: 1e-6)

    GemmAutotuner(watch, kernel, TimedProduct(watch, lambda *_: 1e-6)).run(layers, {})

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
    outcomes = tuned(kernel, dtype, has_bias=True)

    assert len(outcomes) == len(ROW_BUCKETS)
    for outcome in outcomes.values():
        assert outcome.refusal == "it computes other results than torch"
        assert not outcome.is_faster
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "24x16" in warnings[0].getMessage()
    assert "other results than torch, and 4 more" in warnings[0].getMessage()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_orders_of_addition_are_no_other_numbers(dtype: torch.dtype) -> None:
    def backwards(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.flip(1).float() @ w.flip(1).float().T
        return (out if bias is None else out + bias.float()).to(x.dtype)

    outcomes = tuned(backwards, dtype, has_bias=True)

    assert all(outcome.is_faster for outcome in outcomes.values())


def test_one_layer_it_is_wrong_for_is_enough() -> None:
    weights: list[int] = []

    def only_the_first(x: torch.Tensor, w: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        weights.append(w.data_ptr())
        return linear(x, w) * (1.0 if w.data_ptr() == weights[0] else 1.01)

    assert not any(outcome.is_faster for outcome in tuned(only_the_first, num_layers=5).values())


def test_a_kernel_that_fails_never_wins_and_says_why_in_a_line() -> None:
    outcomes = tuned(raises)

    assert {o.refusal for o in outcomes.values()} == {"RuntimeError: PassManager::run failed"}
    assert not rows_for_kernel(outcomes, SHAPE)


def test_no_memory_to_measure_in_is_no_outcome() -> None:
    assert tuned(has_no_memory) == {}


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
        known = GemmAutotuner(watch, kernel, own, budget_s=2.0).run(layers, known)
        num_runs += 1

        one_shape_s = 2 * 25 * 32 * 5e-4 + 2 * 2 * 5e-4
        assert watch.spent_s < 2.0 + 1.01 * one_shape_s
        assert set(known) > before, "no progress"
        if num_runs == 1:
            assert [shape.out_features for shape, _ in known] == [48, 24, 12]
            assert {num_rows for _, num_rows in known} == {1}
    assert num_runs == 5


def test_compiling_leaves_time_to_measure_in() -> None:
    """Two seconds were over with the second kernel that was compiled: a new GPU's products were
    torch's for a dozen loads, whichever was faster."""
    layers = layers_of((24, 16), (48, 16), (12, 16))
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, compiling(1.2))

    outcomes = GemmAutotuner(watch, kernel, TimedProduct(watch, lambda *_: 1e-5)).run(layers, {})

    assert len(outcomes) == 3 * len(ROW_BUCKETS)
    assert watch.spent_s > 6 * 1.2


def test_no_shape_is_begun_once_compiling_has_taken_too_long() -> None:
    layers = layers_of(*((size, 16) for size in range(8, 20)))
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, compiling(3.0))

    outcomes = GemmAutotuner(watch, kernel, linear, limit_s=10.0).run(layers, {})

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


def test_what_is_known_is_not_timed_again() -> None:
    watch = VirtualStopwatch()
    product = TimedProduct(watch, lambda *_: 1e-6)
    tuner = GemmAutotuner(watch, product, product)
    known = {
        (SHAPE, 1): Outcome(2.0, 1.0),
        (SHAPE, 2): Outcome(refusal="it was wrong"),
        (LinearShape(5, 5, "float32", False), 1): Outcome(1.0, 1.0),
    }

    outcomes = tuner.run(layers_of((24, 16)), known)

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

    assert rows_for_kernel(outcomes, SHAPE) == naive_rows(winners.__contains__)


def test_what_was_not_timed_is_torchs() -> None:
    outcomes = {(SHAPE, 4): Outcome(2.0, 1.0)}

    assert rows_for_kernel(outcomes, SHAPE) == {3, 4}
    assert not rows_for_kernel(outcomes, LinearShape(24, 16, "float32", True))
    assert [bucket_of(n) for n in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]


KEPT_SHAPE = LinearShape(4096, 12288, "bfloat16", False)
BIASED = LinearShape(4096, 12288, "bfloat16", True)
SOME = {
    (KEPT_SHAPE, 1): Outcome(2e-5, 1e-5),
    (BIASED, 16): Outcome(refusal="it computes other results than torch"),
}
FILE = "linear_race.json"


def test_outcomes_are_those_that_were_kept(tmp_path: Path) -> None:
    AutotuneCache(tmp_path / "state", "H200").write(SOME)

    assert AutotuneCache(tmp_path / "state", "H200").read() == SOME
    assert stat.S_IMODE((tmp_path / "state" / FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "state").iterdir()] == [FILE]


def test_machines_do_not_share_outcomes(tmp_path: Path) -> None:
    AutotuneCache(tmp_path, "H200, torch 2.11").write(SOME)
    other = AutotuneCache(tmp_path, "H200, torch 2.13")

    assert other.read() == {}
    other.write({(KEPT_SHAPE, 1): Outcome(1.0, 3.0)})
    assert AutotuneCache(tmp_path, "H200, torch 2.11").read() == SOME


def test_models_of_one_machine_add_up(tmp_path: Path) -> None:
    AutotuneCache(tmp_path, "H200").write(SOME)
    AutotuneCache(tmp_path, "H200").write({(KEPT_SHAPE, 2): Outcome(1.0, 3.0)})

    assert AutotuneCache(tmp_path, "H200").read() == {**SOME, (KEPT_SHAPE, 2): Outcome(1.0, 3.0)}


def test_any_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    choose = random.Random(7)
    outcomes = {}
    for _ in range(300):
        dtype = choose.choice(("float32", "float16", "bfloat16"))
        sizes = choose.randint(1, 999_999_999), choose.randint(1, 999_999_999)
        shape = LinearShape(*sizes, dtype, choose.random() < 0.5)
        times = choose.uniform(1e-9, 1.0), choose.uniform(1e-9, 1.0)
        outcome = Outcome(*times) if choose.random() < 0.8 else Outcome(refusal='"\n\u2028é')
        outcomes[shape, choose.choice(ROW_BUCKETS)] = outcome
    AutotuneCache(tmp_path, "H200").write(outcomes)

    assert AutotuneCache(tmp_path, "H200").read() == outcomes


def test_a_file_of_as_much_as_is_kept_can_be_read(tmp_path: Path) -> None:
    refused = Outcome(refusal="x" * 140)
    for machine in range(20):
        outcomes = {
            (LinearShape(100_000_000 + i, 100_000_000, "bfloat16", True), 16): refused
            for i in range(1100)
        }
        AutotuneCache(tmp_path, f"GPU {machine}").write(outcomes)

    assert len(AutotuneCache(tmp_path, "GPU 19").read()) == 1000
    assert len(AutotuneCache(tmp_path, "GPU 4").read()) == 1000
    assert AutotuneCache(tmp_path, "GPU 3").read() == {}


NAME = "4096x12288 bfloat16, 1 rows"


@pytest.mark.parametrize(
    "outcomes",
    [
        {NAME: [1.0]},
        {NAME: [1.0, -1.0]},
        {NAME: [1.0, float("nan")]},
        {NAME: ["1", "2"]},
        {NAME: ""},
        {NAME: None},
        {"4096x12288 bfloat16, 3 rows": [1.0, 2.0]},
        {"4096 bfloat16, 1 rows": [1.0, 2.0]},
        [NAME],
        17,
        None,
    ],
    ids=str,
)
def test_what_no_outcome_can_be_is_left_out(outcomes: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "machines": {"H200": outcomes}}))
    memory = AutotuneCache(tmp_path, "H200")

    assert memory.read() == {}
    memory.write(SOME)
    assert memory.read() == SOME


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"version": 2, "machines": {"H200": {}}}', '{"version": 1}',
        '{"version": 1, "machines": 3}', '{"version": 1, "machines": null}', "[" * 200_000,
        "\ud800",
    ],
    ids=range(10),
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_as_good_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content.encode("utf-8", "surrogatepass"))
    memory = AutotuneCache(tmp_path, "H200")

    assert memory.read() == {}
    memory.write(SOME)
    assert memory.read() == SOME


def test_a_directory_that_cannot_be_used_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    memory = AutotuneCache(tmp_path / "file", "H200")

    memory.write(SOME)

    assert memory.read() == {}


def test_without_a_directory_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = AutotuneCache(None, "H200")

    memory.write(SOME)

    assert memory.read() == {}
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = Path(tmp_path_factory.mktemp("model"))
    return find_model(str(save_checkpoint(directory, tiny_model("llama"))))


def load(source: ModelSource, dtype: str = "float32") -> LoadedModel:
    """Return a model that is fused as on a GPU."""
    config = ModelConfig(device="cpu", dtype=dtype)
    return fused(without_cpu_code(load_model(source, config, None, lambda _: None)))


def tuner_of(cost: Cost) -> tuple[GemmAutotuner, VirtualStopwatch]:
    """A tuner against torch's product at 10 us."""
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, cost, few_rows_linear)
    return GemmAutotuner(watch, kernel, TimedProduct(watch, lambda *_: 1e-5), budget_s=100), watch


def few_rows_win(num_rows: int, weight: torch.Tensor) -> float:
    return 5e-6 if num_rows <= 4 else 2e-5


@pytest.fixture
def kernel_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows the kernel was run on by the model's products."""
    runs: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        runs.append(x.numel() // x.shape[-1])
        return few_rows_linear(x, weight, bias)

    monkeypatch.setattr(fused_parts, "few_rows_linear", counted)
    return runs


def test_few_rows_take_the_kernel_and_more_take_torchs(
    source: ModelSource, kernel_runs: list[int]
) -> None:
    loaded = load(source)
    scene = Scene(loaded, Recorder(), num_blocks=400)
    steps = {n: [scene.read(5, list(range(2, 2 + n)))] for n in (1, 3, 4, 5, 16, 17, 40)}
    before = {n: scene.eager(pieces).clone() for n, pieces in steps.items()}
    assert not kernel_runs

    won = autotune_products(loaded, None, tuner_of(few_rows_win)[0])

    # Q, K and V, the output, gate and up, down in both layers, and the head.
    num_products = 4 * len(loaded.spec.layers) + 1
    assert len({shape.partition(",")[0] for shape in won}) * 3 == len(won)
    for num_rows, pieces in steps.items():
        kernel_runs.clear()
        logits = scene.eager(pieces)
        assert kernel_runs == ([num_rows] * num_products if num_rows <= 4 else [])
        assert torch.allclose(logits, before[num_rows], atol=1e-5)


def test_a_head_of_few_rows_takes_it_after_a_long_prefill(
    source: ModelSource, kernel_runs: list[int]
) -> None:
    loaded = load(source)
    autotune_products(loaded, None, tuner_of(few_rows_win)[0])
    scene = Scene(loaded, Recorder())
    piece = scene.read(0, list(range(2, 40)))

    scene.eager([SequencePiece(piece.token_ids, 0, piece.blocks, 1)])

    assert kernel_runs == [1]


def test_the_choice_is_the_same_at_capture_and_at_every_replay(
    source: ModelSource, kernel_runs: list[int]
) -> None:
    loaded = load(source)
    autotune_products(loaded, None, tuner_of(few_rows_win)[0])
    scene = Scene(loaded, Recorder())
    piece = scene.read(20, [1])

    scene.capture_for([piece])
    assert not scene.graphs.status().trouble
    scene.check([piece])
    scene.check([scene.read(33, [7])])
    assert set(kernel_runs) == {1}


def test_the_next_load_times_nothing_again(source: ModelSource, tmp_path: Path) -> None:
    tuner, watch = tuner_of(few_rows_win)
    won = autotune_products(load(source), tmp_path, tuner)
    assert won
    assert watch.num_timed

    again, watch = tuner_of(lambda *_: 1.0)
    assert autotune_products(load(source), tmp_path, again) == won
    assert watch.num_timed == 0
    assert autotune_products(load(source), None, again) == ()


def test_a_kernel_that_fails_leaves_every_product_torchs_own(
    source: ModelSource, tmp_path: Path, kernel_runs: list[int]
) -> None:
    def fails(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    watch = VirtualStopwatch()
    loaded = load(source)

    assert autotune_products(loaded, tmp_path, GemmAutotuner(watch, fails)) == ()

    scene = Scene(loaded, Recorder())
    scene.eager([scene.read(3, [1])])
    assert not kernel_runs
    assert watch.num_timed == 0


def test_nothing_is_timed_or_kept_on_a_cpu(source: ModelSource, tmp_path: Path) -> None:
    ensure_trusted(load(source), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["self_test.json"]


def test_an_abandoned_fusion_has_no_products(source: ModelSource) -> None:
    loaded = load(source)
    assert loaded.fusing is not None
    loaded.fusing.abandon()
    tuner, watch = tuner_of(few_rows_win)

    assert autotune_products(loaded, None, tuner) == ()
    assert watch.num_timed == 0


def test_the_self_test_is_taken_with_the_products_that_will_run(
    source: ModelSource,
    tmp_path: Path,
    kernel_runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A verdict on torch's products says nothing about others."""
    ensure_trusted(load(source), tmp_path)
    tuner = tuner_of(few_rows_win)[0]
    monkeypatch.setattr(
        self_test, "autotune_products", lambda loaded, _: autotune_products(loaded, None, tuner)
    )

    ensure_trusted(load(source), tmp_path)
    assert kernel_runs, "a verdict was believed that others had"

    kernel_runs.clear()
    ensure_trusted(load(source), tmp_path)
    assert not kernel_runs
