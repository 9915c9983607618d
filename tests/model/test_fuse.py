"""Fused forwards: what is recognised, that it is checked, and that it changes nothing but the
speed.

Greedy ids of fused models in float32 are held to transformers' own in `test_parity`, for every
architecture; here they are held to the unfused pass row by row, and the checks are shown to refuse.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import ModelConfig
from kvchat.model import fuse
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.fuse_search import Comparison, LayerSearch
from kvchat.model.fused_parts import HalfProduct, MergedProduct
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.source import find_model
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import Specimen, random_ids

GetSpecimen = Callable[[str], Specimen]
CPU = torch.device("cpu")
# (new tokens, context) of each sequence of a step.
STEPS = {
    "one row": [(1, 30)],
    "a verify of five": [(5, 30)],
    "three sequences": [(1, 9), (4, 33), (2, 2)],
    "a chunk": [(33, 40)],
}
# How many decoder layers are fused as a whole, of how many.
WHOLE = {
    "llama": (2, 2),
    "mistral, window": (2, 2),
    "qwen2": (2, 2),
    "qwen3": (2, 2),
    "gemma3, mixed windows": (4, 4),
    "smollm3, some layers without positions": (2, 2),
    "llama, yarn": (2, 2),
    "qwen3_moe": (0, 2),
    "gemma2, softcap": (2, 2),
    "olmo2": (0, 2),
    "gpt_oss, sinks": (0, 2),
    "deepseek_v3, wide keys": (0, 2),
}


def pools_of(loaded: LoadedModel, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(40, 8, heads, dim, generator=generator).to(loaded.dtype)

    return [
        (random(layer.num_kv_heads, layer.key_dim), random(layer.num_kv_heads, layer.value_dim))
        for layer in loaded.spec.storing_layers
    ]


def run_step(
    loaded: LoadedModel, step: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return all logits of a step over random KV, and the pools after it."""
    pools = pools_of(loaded)
    model = PagedModel(loaded, pools)
    pieces = [
        SequencePiece(
            random_ids(new, seed=new), end - new, range(1 + 10 * i, 1 + 10 * i + -(-end // 8)), new
        )
        for i, (new, end) in enumerate(step)
    ]
    return model.forward(build_batch(pieces, 8, CPU)), pools


def unfused(loaded: LoadedModel) -> LoadedModel:
    """Return the same model running transformers' own forwards, on the very same weights."""
    for module in loaded.module.modules():
        module.__dict__.pop("forward", None)
    return replace(loaded, fusing=None)


def load(directory: Path, name: str, dtype: str) -> LoadedModel:
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    return load_model(source, ModelConfig(dtype=dtype), 128, lambda _: None)


def fusion_of(loaded: LoadedModel) -> fuse.Fusion:
    assert loaded.fusing is not None
    return loaded.fusing.wait()


def test_attention_with_sinks_is_fused_although_experts_are_not(tmp_path: Path) -> None:
    """gpt-oss also hands its layers each angle once, where others have it twice."""
    fusion = fusion_of(load(tmp_path, "gpt_oss, sinks", "float32"))

    # Two layers of attention and two norms, the last norm and the head.
    assert fusion.num_parts == 2 * 3 + 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WHOLE)
def test_layers_of_known_forms_are_fused_and_others_part_by_part(
    name: str, dtype: str, tmp_path: Path
) -> None:
    loaded = load(tmp_path, name, dtype)

    fusion = fusion_of(loaded)

    assert (fusion.num_layers, len(loaded.spec.layers)) == WHOLE[name]
    assert fusion.num_parts >= 2
    assert fusion.weights == ("own" if dtype == "float32" else "float16")


@pytest.mark.parametrize("name", WHOLE)
def test_in_float32_logits_and_kv_are_those_of_the_unfused_pass(name: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, name, "float32")
    fused = {step: run_step(loaded, STEPS[step]) for step in STEPS}
    plain_model = unfused(loaded)
    for step, (logits, pools) in fused.items():
        plain, plain_pools = run_step(plain_model, STEPS[step])

        assert (logits - plain).abs().max() <= 2e-5 * plain.abs().max()
        for ours, theirs in zip(pools, plain_pools, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float16"), *((name, "bfloat16") for name in WHOLE if WHOLE[name][0])],
)
def test_in_low_precision_few_rows_are_as_near_to_float32_as_the_unfused_pass(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """The oracle is the same rounded weights computed with in float32."""
    loaded = load(tmp_path, name, dtype)
    step = STEPS["three sequences"]
    fused, _ = run_step(loaded, step)
    plain_model = unfused(loaded)
    plain, _ = run_step(plain_model, step)
    exact_module = plain_model.module.float()
    exact, _ = run_step(replace(plain_model, module=exact_module, dtype=torch.float32), step)

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    assert error(fused) <= 1.05 * error(plain)  # it rounds where the model's own code does
    assert error(fused) > 0


def test_steps_of_many_rows_run_the_models_own_code_where_processors_multiply_in_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvchat.model.fused_parts.multiplies_in", lambda dtype: True)
    loaded = load(tmp_path, "llama", "bfloat16")
    fusion_of(loaded)
    many, _ = run_step(loaded, STEPS["a chunk"])
    plain, _ = run_step(unfused(loaded), STEPS["a chunk"])

    assert torch.equal(many, plain)


def test_outside_a_step_modules_run_their_own_code(specimen: GetSpecimen) -> None:
    made = specimen("llama")
    layer = made.loaded.module.model.layers[0]
    x = torch.randn(1, 3, 64)

    assert "forward" in layer.__dict__
    norm = made.loaded.module.model.norm
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_merged_parameters_are_views_and_hold_no_memory_twice(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", "float32")
    attention = loaded.module.model.layers[0].self_attn
    owners = {
        p.untyped_storage().data_ptr() for p in (attention.q_proj.weight, attention.v_proj.weight)
    }

    assert len(owners) == 1
    held = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for p in loaded.module.parameters()
    }
    wanted = sum(p.nbytes for p in loaded.module.parameters())
    assert sum(held.values()) == wanted


# What a check must refuse. Each change is one that a wrong guess from names alone would overlook.


def break_epsilon(layer: nn.Module) -> None:
    layer.input_layernorm.__class__ = _OtherEpsilonNorm


class _OtherEpsilonNorm(nn.Module):
    """Looks like an RMS norm and uses another epsilon than it says."""

    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 2e-3)
        return self.weight * rows.to(x.dtype)


def break_residual(layer: nn.Module) -> None:
    own = type(layer).forward

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = own(layer, hidden_states, **kwargs)
        return hidden_states + 0.98 * (out - hidden_states)

    layer.forward = forward  # type: ignore[method-assign]


def break_scaling(layer: nn.Module) -> None:
    attention = layer.self_attn
    own = attention.forward

    def forward(*args: object, **kwargs: object) -> object:
        attention.scaling *= 1.1
        try:
            return own(*args, **kwargs)
        finally:
            attention.scaling /= 1.1

    attention.forward = forward


@pytest.mark.parametrize("breakage", [break_epsilon, break_residual, break_scaling])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_that_computes_something_else_is_not_fused(
    breakage: Callable[[nn.Module], None],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_fusing = fuse.Fusing
    monkeypatch.setattr("kvchat.model.loader.Fusing", lambda *args: None)
    loaded = load(tmp_path, "llama", dtype)
    breakage(loaded.module.model.layers[1])

    scheme = fuse.choose_scheme(loaded.module)
    fusion = own_fusing(loaded.module, loaded.spec, loaded.step, scheme).wait()

    assert fusion.num_layers <= 1


@pytest.mark.parametrize("breakage", [None, break_residual, break_scaling])
def test_a_layer_that_rounds_beyond_the_tolerance_is_fused_if_it_is_as_exact(
    breakage: Callable[[nn.Module], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trained layer of eight, whose attention was all or nothing, rounded so differently in
    bfloat16 that it stayed unfused, and the model a third slower.
    """
    own_fusing = fuse.Fusing
    monkeypatch.setattr("kvchat.model.loader.Fusing", lambda *args: None)
    loaded = load(tmp_path, "llama", "bfloat16")
    if breakage is not None:
        breakage(loaded.module.model.layers[1])

    same = Comparison.same_attention
    monkeypatch.setattr(
        Comparison,
        "same_attention",
        lambda comparison, *args: comparison._dtype == torch.float32 and same(comparison, *args),
    )
    scheme = fuse.choose_scheme(loaded.module)
    fusion = own_fusing(loaded.module, loaded.spec, loaded.step, scheme).wait()

    assert fusion.num_layers == (2 if breakage is None else 1)


def test_weights_that_float16_cannot_hold_stay_what_they_are() -> None:
    layer = nn.Linear(8, 4, bias=False).bfloat16()
    for value in (1e5, 1e-7):
        with torch.no_grad():
            layer.weight.fill_(1.0)
            layer.weight[2] = value
        with pytest.raises(ValueError, match="beyond float16"):
            HalfProduct([layer])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_half_products_are_exact_to_float16(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(200, n, bias=bias and n != 7).bfloat16() for n in (40, 7, 65)]
    x = torch.randn(rows, 200)

    out = HalfProduct(layers)(x)

    exact = [
        x.double() @ layer.weight.double().t() + (0 if layer.bias is None else layer.bias.double())
        for layer in layers
    ]
    assert (out - torch.cat(exact, dim=-1)).abs().max() < 1e-5


def test_large_weights_are_packed_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, n).bfloat16() for n in (50, 30)]
    x = torch.randn(3, 16)
    whole = HalfProduct(layers)(x)

    monkeypatch.setattr("kvchat.model.fused_parts._SLICE_ELEMENTS", 16 * 7)

    assert torch.allclose(HalfProduct(layers)(x), whole, atol=1e-6)


def test_a_search_leaves_a_running_layer_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on a thread beside an engine, whose pools it must neither write to nor untie."""
    monkeypatch.setattr("kvchat.model.loader.Fusing", lambda *args: None)
    loaded = load(tmp_path, "llama", "float32")
    pools = pools_of(loaded)
    PagedModel(loaded, pools)
    layer_spec = loaded.spec.layers[0]
    layer = loaded.module.get_submodule(layer_spec.module_name.rpartition(".")[0])

    found = LayerSearch(layer, "self_attn", layer_spec, MergedProduct, torch.float32).run()

    assert found.layer is not None
    assert layer.self_attn.__dict__["_kvchat_binding"].keys is pools[0][0]
    assert torch.equal(pools[0][0], pools_of(loaded)[0][0])


def test_a_process_that_leaves_while_weights_are_prepared_leaves_in_peace(tmp_path: Path) -> None:
    """The threads that pack weights once aborted it: they came back to an interpreter gone."""
    model = tiny_model("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    save_checkpoint(tmp_path, model)
    script = (
        "from kvchat.core.config import ModelConfig\n"
        "from kvchat.model.loader import load_model\n"
        "from kvchat.model.source import find_model\n"
        f"source = find_model({str(tmp_path)!r})\n"
        "loaded = load_model(source, ModelConfig(dtype='bfloat16'), 128, lambda _: None)\n"
        "assert loaded.fusing._threads\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"},
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()


def test_nothing_is_left_for_who_waits_once_the_threads_are_done(tmp_path: Path) -> None:
    """Layers were joined when the first small step waited: its time was the first prompt's."""
    fusing = load(tmp_path, "llama", "bfloat16").fusing
    assert fusing is not None

    for thread in list(fusing._threads):
        thread.join()

    assert fusing.whole is not None


def test_a_model_nobody_holds_is_not_prepared_further(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama", "bfloat16")
    assert loaded.fusing is not None
    threads = list(loaded.fusing._threads)

    del loaded
    gc.collect()

    assert not any(thread.is_alive() for thread in threads)
