"""Autotuning on a CUDA device: times are the device's, outcomes are kept, the choice is right."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.nn.functional import linear

from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat.model.gpu.fused_parts import Operands, few_rows_linear
from kvchat.model.gpu.gemm_autotune import (
    ROW_BUCKETS,
    AutotuneCache,
    CudaStopwatch,
    GemmAutotuner,
    Outcome,
    autotune_products,
    machine_name,
)
from kvchat.model.self_test import compare_with_own
from support.autotuning import layers_of
from support.paged_scene import Scene, load_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on_device(layers: list[Operands]) -> list[Operands]:
    return [
        Operands(layer.weight.cuda(), layer.bias.cuda() if layer.bias is not None else None)
        for layer in layers
    ]


def test_twice_the_work_takes_about_twice_the_time() -> None:
    watch = CudaStopwatch(device())
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(1, 8192, device="cuda", dtype=torch.bfloat16)

    def run(num_products: int) -> torch.Tensor:
        out = rows
        for _ in range(num_products):
            out = linear(rows, weight)
        return out

    one, other = watch.times_s([lambda: run(8), lambda: run(16)], 15)

    assert len(one) == len(other) == 15
    assert 1.6 < median(other) / median(one) < 2.4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
def test_every_bucket_has_times_and_no_refusal(dtype: torch.dtype, has_bias: bool) -> None:
    sizes = ((4096, 1024), (1152, 896), (1001, 300))
    found = layers_of(*sizes, num_layers=4, dtype=dtype, has_bias=has_bias)
    layers = {shape: on_device(those) for shape, those in found.items()}
    tuner = GemmAutotuner(CudaStopwatch(device()), few_rows_linear, budget_s=120)

    outcomes = tuner.run(layers, {})

    assert len(outcomes) == len(sizes) * len(ROW_BUCKETS)
    for (shape, num_rows), outcome in outcomes.items():
        assert not outcome.refusal, f"{shape}, {num_rows} rows: {outcome.refusal}"
        assert 1e-7 < outcome.torch_s < 1e-2
        assert 1e-7 < outcome.kernel_s < 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3, mixed windows"])
def test_a_model_with_the_kernel_everywhere_computes_the_same_eagerly_and_captured(
    name: str, tmp_path: Path
) -> None:
    loaded = load_tiny(name, tmp_path, "cuda")
    assert loaded.fusing is not None
    products = loaded.fusing.merged_products()
    assert products
    scene = Scene(loaded, CudaGraphs(loaded.device), 16, 200)
    steps = [[scene.read(50, list(range(2, 2 + n)))] for n in (1, 2, 5, 16, 17)]
    before = [scene.eager(pieces).clone() for pieces in steps]

    for product in products:
        product.take_kernel(frozenset(range(1, 17)))

    for pieces, expected in zip(steps, before, strict=True):
        scale = expected.abs().max()
        assert torch.allclose(scene.eager(pieces), expected, rtol=0.0, atol=2e-4 * scale)
    scene.capture_for(steps[0])
    assert not scene.graphs.status().trouble
    scene.check([scene.read(301, [9])])
    assert compare_with_own(loaded) > 0.9999  # binds the model to other pools: the scene is over


def test_a_loaded_models_outcomes_are_kept_and_not_timed_again(tmp_path: Path) -> None:
    loaded = load_tiny("llama", tmp_path / "model", "cuda")
    state = tmp_path / "state"
    # As many loads as it takes: each has two seconds to measure in, and ten with compiling.
    for _ in range(20):
        won = autotune_products(loaded, state)
    kept = AutotuneCache(state, machine_name(loaded.device)).read()
    shapes = {shape for shape, _ in kept}
    assert set(kept) == {(shape, rows) for shape in shapes for rows in ROW_BUCKETS}

    assert autotune_products(loaded, state) == won
    assert AutotuneCache(state, machine_name(loaded.device)).read() == kept


def test_a_kernel_that_lost_is_not_used_and_one_that_won_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_tiny("llama", tmp_path / "model", "cuda")
    assert loaded.fusing is not None
    memory = AutotuneCache(tmp_path, machine_name(loaded.device))
    shapes = {product.operands.shape for product in loaded.fusing.merged_products()}
    won = Outcome(2.0, 1.0)
    lost = replace(won, kernel_s=1.99)
    memory.write({(s, rows): won if rows == 1 else lost for s in shapes for rows in ROW_BUCKETS})
    runs: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        runs.append(len(x))
        return few_rows_linear(x, weight, bias)

    monkeypatch.setattr("kvchat.model.gpu.fused_parts.few_rows_linear", counted)
    autotune_products(loaded, tmp_path)
    scene = Scene(loaded, CudaGraphs(loaded.device), 16, 200)

    three, one = scene.read(5, [1, 2, 3]), scene.read(5, [1])
    runs.clear()  # reading a context asks for one row of logits

    scene.eager([three])
    assert not runs
    scene.eager([one])
    assert set(runs) == {1}
