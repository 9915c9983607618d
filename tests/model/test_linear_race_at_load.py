"""A loaded model's products take the kernel exactly where it has won; here it is the kernel's twin.

There is no GPU: what stops the time is a virtual clock, and on a CPU the kernel's function computes
by torch. What the real ones do is left to tests/gpu.
"""

from pathlib import Path

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model import fuse_layer, fuse_linear, self_test
from kvchat.model.batch import SequencePiece
from kvchat.model.fuse_kernels import few_rows_linear
from kvchat.model.linear_race import LinearRace
from kvchat.model.linear_race_at_load import settle_products
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.self_test import ensure_trusted
from kvchat.model.source import ModelSource, find_model
from support.checkpoints import save_checkpoint, tiny_model
from support.graph_recorder import Recorder
from support.linear_races import Cost, TimedProduct, VirtualStopwatch
from support.paged_scene import Scene


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = Path(tmp_path_factory.mktemp("model"))
    return find_model(str(save_checkpoint(directory, tiny_model("llama"))))


def load(source: ModelSource, dtype: str = "float32") -> LoadedModel:
    return load_model(source, ModelConfig(device="cpu", dtype=dtype), None, lambda _: None)


def race_of(cost: Cost) -> tuple[LinearRace, VirtualStopwatch]:
    """A race against torch's product at 10 us."""
    watch = VirtualStopwatch()
    kernel = TimedProduct(watch, cost, few_rows_linear)
    return LinearRace(watch, kernel, TimedProduct(watch, lambda *_: 1e-5), budget_s=100), watch


def few_rows_win(num_rows: int, weight: torch.Tensor) -> float:
    return 5e-6 if num_rows <= 4 else 2e-5


@pytest.fixture
def kernel_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows the kernel was run on by the model's products, Python running them as on
    a GPU."""
    runs: list[int] = []
    monkeypatch.setattr(fuse_layer, "script_of", lambda _: None)

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        runs.append(x.numel() // x.shape[-1])
        return few_rows_linear(x, weight, bias)

    monkeypatch.setattr(fuse_linear, "few_rows_linear", counted)
    return runs


def test_few_rows_take_the_kernel_and_more_take_torchs(
    source: ModelSource, kernel_runs: list[int]
) -> None:
    loaded = load(source)
    scene = Scene(loaded, Recorder(), num_blocks=400)
    steps = {n: [scene.read(5, list(range(2, 2 + n)))] for n in (1, 3, 4, 5, 16, 17, 40)}
    before = {n: scene.eager(pieces).clone() for n, pieces in steps.items()}
    assert not kernel_runs

    won = settle_products(loaded, None, race_of(few_rows_win)[0])

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
    settle_products(loaded, None, race_of(few_rows_win)[0])
    scene = Scene(loaded, Recorder())
    piece = scene.read(0, list(range(2, 40)))

    scene.eager([SequencePiece(piece.token_ids, 0, piece.blocks, 1)])

    assert kernel_runs == [1]


def test_the_choice_is_the_same_at_capture_and_at_every_replay(
    source: ModelSource, kernel_runs: list[int]
) -> None:
    loaded = load(source)
    settle_products(loaded, None, race_of(few_rows_win)[0])
    scene = Scene(loaded, Recorder())
    piece = scene.read(20, [1])

    scene.capture_for([piece])
    assert not scene.graphs.status().trouble
    scene.check([piece])
    scene.check([scene.read(33, [7])])
    assert set(kernel_runs) == {1}


def test_the_next_load_knows_and_does_not_race(source: ModelSource, tmp_path: Path) -> None:
    race, watch = race_of(few_rows_win)
    won = settle_products(load(source), tmp_path, race)
    assert won
    assert watch.num_timed

    again, watch = race_of(lambda *_: 1.0)
    assert settle_products(load(source), tmp_path, again) == won
    assert watch.num_timed == 0
    assert settle_products(load(source), None, again) == ()


def test_a_kernel_that_fails_leaves_every_product_torchs_own(
    source: ModelSource, tmp_path: Path, kernel_runs: list[int]
) -> None:
    def fails(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    watch = VirtualStopwatch()
    loaded = load(source)

    assert settle_products(loaded, tmp_path, LinearRace(watch, fails)) == ()

    scene = Scene(loaded, Recorder())
    scene.eager([scene.read(3, [1])])
    assert not kernel_runs
    assert watch.num_timed == 0


def test_nothing_is_raced_or_kept_on_a_cpu(source: ModelSource, tmp_path: Path) -> None:
    ensure_trusted(load(source), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["self_test.json"]


def test_products_that_are_not_on_the_models_own_weights_are_left_alone(
    source: ModelSource,
) -> None:
    loaded = load(source, "bfloat16")
    if loaded.weights != "float16":
        pytest.skip("torch has no packed float16 product for this processor")
    race, watch = race_of(few_rows_win)

    assert settle_products(loaded, None, race) == ()
    assert watch.num_timed == 0


def test_an_abandoned_fusion_has_no_products(source: ModelSource) -> None:
    loaded = load(source)
    assert loaded.fusing is not None
    loaded.fusing.abandon()
    race, watch = race_of(few_rows_win)

    assert settle_products(loaded, None, race) == ()
    assert watch.num_timed == 0


def test_the_self_test_is_taken_with_the_products_that_will_run(
    source: ModelSource,
    tmp_path: Path,
    kernel_runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A verdict on torch's products says nothing about others."""
    ensure_trusted(load(source), tmp_path)
    race = race_of(few_rows_win)[0]
    monkeypatch.setattr(
        self_test, "settle_products", lambda loaded, _: settle_products(loaded, None, race)
    )

    ensure_trusted(load(source), tmp_path)
    assert kernel_runs, "a verdict was believed that others had"

    kernel_runs.clear()
    ensure_trusted(load(source), tmp_path)
    assert not kernel_runs
