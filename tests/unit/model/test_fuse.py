"""Fused forwards: what of a family is fused, and that it changes nothing but the speed.

Greedy ids of fused models in float32 are held to transformers' own in `test_parity`, for every
architecture; here they are held to the unfused pass row by row.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import ModelConfig
from kvchat.core.types import NO_MEMORY
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.fuse import Fusing, Fusion
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.self_test import compare_with_own, ensure_trusted
from support.compiled_steps import batch_of, pools_of
from support.fused_models import fused, load_fused, load_plain, without_cpu_code
from support.type_matrix import save_type

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
    "phi3, longrope": (2, 2),
    "nemotron, a part rotated": (0, 2),
    "glm4": (0, 2),
    "gemma3n, shared KV": (0, 4),
}


def run_step(
    loaded: LoadedModel, step: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return all logits of a step over random KV, and the pools after it."""
    pools = pools_of(loaded)
    return PagedModel(loaded, pools).forward(batch_of(step)), pools


def unfused(loaded: LoadedModel) -> LoadedModel:
    """Return the same model running transformers' own forwards, on the very same weights."""
    for module in loaded.module.modules():
        module.__dict__.pop("forward", None)
    return replace(loaded, fusing=None)


def fusion_of(loaded: LoadedModel) -> Fusion:
    assert loaded.fusing is not None
    return loaded.fusing.fusion


def test_attention_with_sinks_is_fused_although_experts_are_not(tmp_path: Path) -> None:
    """gpt-oss also hands its layers each angle once, where others have it twice."""
    fusion = fusion_of(load_fused(tmp_path, "gpt_oss, sinks", "float32"))

    # Two layers of attention and two norms, the last norm and the head.
    assert fusion.num_parts == 2 * 3 + 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WHOLE)
def test_layers_of_known_forms_are_fused_and_others_part_by_part(name, dtype, tmp_path):
    loaded = load_fused(tmp_path, name, dtype)

    fusion = fusion_of(loaded)

    assert (fusion.num_layers, len(loaded.spec.layers)) == WHOLE[name]
    assert fusion.num_parts >= 2


@pytest.mark.parametrize("name", WHOLE)
def test_in_float32_logits_and_kv_are_those_of_the_unfused_pass(name: str, tmp_path: Path) -> None:
    loaded = load_fused(tmp_path, name, "float32")
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
    loaded = load_fused(tmp_path, name, dtype)
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


def test_outside_a_step_modules_run_their_own_code(tmp_path: Path) -> None:
    loaded = load_fused(tmp_path, "llama", "float32")
    layer = loaded.module.model.layers[0]
    x = torch.randn(1, 3, 64)

    assert "forward" in layer.__dict__
    norm = loaded.module.model.norm
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_merged_parameters_are_views_and_hold_no_memory_twice(tmp_path: Path) -> None:
    loaded = load_fused(tmp_path, "llama", "float32")
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


# What of the layers of a tiny model of each type is fused, by the names of its modules.
PARTS = json.loads((Path(__file__).parents[2] / "support" / "fused_parts.json").read_text())
# One of each kind of row: whole layers, attention, MLPs, norms; and those that turn neighbours.
SPREAD = ["qwen3_vl", "exaone_moe", "cohere2_moe", "deepseek_v2", "gemma3n_text", "glm_ocr", "phi"]


@pytest.mark.parametrize(
    "name", [*SPREAD, *(pytest.param(name, marks=pytest.mark.soak) for name in PARTS)]
)
def test_a_type_is_fused_in_the_parts_that_are_known(name: str, tmp_path: Path) -> None:
    save_type(name, tmp_path)
    source = find_model(str(tmp_path))
    plain = load_model(source, ModelConfig(dtype="float32"), 128, lambda _: None)
    loaded = fused(without_cpu_code(plain))

    parts = {
        re.sub(r".*layers\.\d+\.?", "", path) or "layer"
        for path, module in loaded.module.named_modules()
        if "forward" in module.__dict__ and re.search(r"layers\.\d+", path)
    }
    assert " ".join(sorted(parts)) == PARTS[name]
    assert compare_with_own(loaded) > 0.999999


class _OtherNorm(nn.Module):
    """Has the weights of an RMS norm and another epsilon than it says."""

    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 2e-3)
        return self.weight * rows.to(x.dtype)


def test_a_layer_with_a_norm_of_another_class_is_fused_in_parts(tmp_path: Path) -> None:
    loaded = load_plain(tmp_path, "llama", "float32")
    loaded.module.model.layers[1].input_layernorm.__class__ = _OtherNorm

    fusing = Fusing(loaded.module, loaded.spec, loaded.step, is_packed=False)

    assert fusing.fusion.num_layers == 1
    assert compare_with_own(replace(loaded, fusing=fusing)) > 0.999999


@pytest.mark.parametrize("part", ["", ".self_attn"])
def test_a_model_that_computes_something_else_is_run_by_its_own_code(part, tmp_path):
    """A family is known by its type: the self-test of the whole finds code that has changed."""
    loaded = load_plain(tmp_path, "llama", "float32")
    module = loaded.module.get_submodule(f"model.layers.1{part}")
    own = module.forward

    def forward(hidden_states: torch.Tensor, **kwargs: object) -> object:
        return own(hidden_states * 1.02, **kwargs)

    module.forward = forward
    fusing = Fusing(loaded.module, loaded.spec, loaded.step, is_packed=False)

    ensure_trusted(replace(loaded, fusing=fusing), NO_MEMORY)

    assert fusing.is_off
