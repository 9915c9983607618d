"""Experts of a GGUF file stay in its blocks, in memory and in products."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.cpu.compiled_step import compiled_model
from kvchat.model.gguf import tensors as gguf_tensors
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.experts import ExpertPacks, expert_packs_of
from kvchat.model.paged_model import PagedModel
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear.blocks import dequantised
from support.checkpoints import tiny_model
from support.gguf_families import FAMILIES as MORE_FAMILIES
from support.gguf_files import write_gguf
from support.matrix import spread
from support.specimens import random_ids

BLOCK = 16
_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
# Families with compiled steps, then others whose experts are plain: (settings, metadata).
_COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"expert_count": 4}),
    "qwen2_moe": ({**_MOE, "shared_expert_intermediate_size": 512}, {}),
    "qwen3_moe": ({**_MOE, "norm_topk_prob": True}, {}),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 3}, {}),
    "granitemoe": MORE_FAMILIES["granitemoe"][1:],
}
_OTHERS = {
    name: MORE_FAMILIES[name][1:]
    for name in ("granitemoeshared", "glm4_moe", "ernie4_5_moe", "deepseek_v3, yarn")
}
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ3_S"]
# What bfloat16 holds exactly, so that models differ in products alone.
_EXACT = ("token_embd.weight", "ffn_gate_inp.weight")


def all_in(kind: str) -> Callable[[str], str]:
    return lambda stored: "BF16" if stored.endswith(_EXACT) else kind


def mixed(stored: str) -> str:
    """Return the formats of Q4_K_M: some layers have a finer `down`."""
    if stored.endswith(_EXACT):
        return "BF16"
    return "Q6_K" if "blk.0.ffn_down" in stored or stored == "output.weight" else "Q4_K"


def load(path: Path, **config: Any) -> LoadedModel:
    source = find_model(str(path))
    return load_model(source, ModelConfig(device="cpu", **config), None, lambda _: None)


def in_float32(loaded: LoadedModel) -> LoadedModel:
    """Return the model with everything but its blocks in float32, KV and angles too."""
    module = loaded.module.float()
    compiled = compiled_model(module, loaded.spec)
    return replace(loaded, module=module, dtype=torch.float32, compiled=compiled)


def logits_of(loaded: LoadedModel, ids: list[int], is_compiled: bool) -> torch.Tensor:
    """Return the logits of a sequence, by steps of 7 rows or by one step over pages."""
    pools = [
        (
            torch.zeros(8, BLOCK, layer.num_kv_heads, layer.key_dim, dtype=loaded.dtype),
            torch.zeros(8, BLOCK, layer.num_kv_heads, layer.value_dim, dtype=loaded.dtype),
        )
        for layer in loaded.spec.storing_layers
    ]
    model, step = PagedModel(loaded, pools), 7 if is_compiled else len(ids)
    if is_compiled:
        assert model.compiled is not None
    else:
        model.compiled = None
    logits = []
    for start in range(0, len(ids), step):
        piece = ids[start : start + step]
        batch = [SequencePiece(piece, start, range(1, 8), len(piece))]
        logits.append(model.forward(build_batch(batch, BLOCK, loaded.device)))
    return torch.cat(logits)


def assert_experts_are_those_of(loaded: LoadedModel, twin: PreTrainedModel) -> None:
    """Hold packed experts to the weights that their file's blocks stand for."""
    twins, num_packed = dict(twin.named_modules()), 0
    for name, module in loaded.module.named_modules():
        if (packs := expert_packs_of(module)) is None:
            continue
        num_packed += 1
        assert isinstance(packs, ExpertPacks)
        own = twins[name]
        assert sum(part.numel() for part in module.parameters()) == 0
        down = dequantised(packs.down.weights).view(own.down_proj.shape)
        gate_up = torch.cat(
            [
                dequantised(part.weights).view(len(own.down_proj), -1, own.gate_up_proj.shape[2])
                for part in packs.gate_up
            ],
            dim=1,
        )
        assert torch.allclose(down, own.down_proj, rtol=1e-5, atol=1e-7)
        assert torch.allclose(gate_up, own.gate_up_proj, rtol=1e-5, atol=1e-7)
    assert num_packed == sum(hasattr(module, "down_proj") for module in experts_in(twin))


def experts_in(model: PreTrainedModel) -> list[Any]:
    found = [part for name, part in model.named_modules() if name.endswith(".experts")]
    assert found
    return found


def assert_same(found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    """Hold most rows to what is expected: in a few, two experts have nearly equal scores."""
    assert found.shape == expected.shape
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() <= most


def calm_model(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Return a model whose routing is seldom at a tie: rounded activations choose as exact ones."""
    model = tiny_model(family, **{**settings, **_SIZES})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0 if name.endswith(("gate.weight", "router.weight")) else 0.4)
    return model


@pytest.mark.parametrize(
    ("family", "kind"),
    spread(
        [(family, kind) for family in _COMPILED for kind in (*KINDS, "mixed")],
        always=[
            *(("mixtral", kind) for kind in ("Q8_0", "Q4_0", "Q4_K")),
            ("olmoe", "Q4_1"),
            ("qwen2_moe", "mixed"),
            ("granitemoe", "Q5_K"),
        ],
    ),
)
def test_steps_and_prefill_are_those_of_the_unpacked_weights(family, kind, tmp_path):
    settings, metadata = _COMPILED[family]
    twin = calm_model(family, settings)
    path = write_gguf(
        tmp_path / "m.gguf", twin, mixed if kind == "mixed" else all_in(kind), metadata
    )
    ids = random_ids(40, seed=1)

    loaded = in_float32(load(path))

    assert loaded.weights == "blocks"
    assert_experts_are_those_of(loaded, twin)
    with torch.no_grad():
        expected = twin(torch.tensor([ids])).logits[0]
    # Beside 4 bits activations have 8.
    most = 3e-3 if kind in ("Q8_0", "Q5_K", "Q6_K") else 0.08
    for is_compiled in (True, False):
        assert_same(logits_of(loaded, ids, is_compiled), expected, most)


@pytest.mark.parametrize("family", _OTHERS)
def test_plain_experts_of_other_families_stay_in_blocks_too(family: str, tmp_path: Path) -> None:
    """Their modules multiply with blocks."""
    model_type, *_ = MORE_FAMILIES[family]
    settings, metadata = _OTHERS[family]
    twin = tiny_model(model_type, **settings)
    path = write_gguf(
        tmp_path / "m.gguf", twin, lambda stored: "Q8_0" if "_exps" in stored else "BF16", metadata
    )
    ids = random_ids(40, seed=1)

    loaded = load(path)

    assert_experts_are_those_of(loaded, twin)
    assert compare_with_own(loaded) > 0.99
    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        expected = twin(torch.tensor([ids])).logits[0]
        found = loaded.module.float()(torch.tensor([ids]), use_cache=False).logits[0]
    assert_same(found, expected, 1e-3)


def test_experts_of_which_a_part_has_no_blocks_are_unpacked(tmp_path: Path) -> None:
    """Both tensors of a layer's experts stay, or none."""
    settings, metadata = _COMPILED["qwen3_moe"]
    twin = tiny_model("qwen3_moe", **{**settings, **_SIZES})

    def kinds(stored: str) -> str:
        return "F16" if stored == "blk.1.ffn_down_exps.weight" else all_in("Q8_0")(stored)

    loaded = load(write_gguf(tmp_path / "m.gguf", twin, kinds, metadata))

    first, second = (layer.mlp.experts for layer in loaded.module.model.layers)
    assert expert_packs_of(first) is not None
    assert expert_packs_of(second) is None
    own = twin.model.layers[1].mlp.experts
    assert torch.equal(second.down_proj, own.down_proj.to(torch.bfloat16))
    assert torch.equal(second.gate_up_proj, own.gate_up_proj.to(torch.bfloat16))


def test_a_dtype_that_is_asked_for_unpacks_experts(tmp_path: Path) -> None:
    settings, metadata = _COMPILED["qwen3_moe"]
    twin = tiny_model("qwen3_moe", **{**settings, **_SIZES})
    loaded = load(write_gguf(tmp_path / "m.gguf", twin, "Q8_0", metadata), dtype="float32")

    for ours, own in zip(loaded.module.model.layers, twin.model.layers, strict=True):
        assert torch.equal(ours.mlp.experts.down_proj, own.mlp.experts.down_proj)


def test_what_loading_needs_is_what_blocks_take(tmp_path, monkeypatch):
    """It once asked for twice the file: a file of 18 GB was refused where 32 GB were free."""
    settings, metadata = _COMPILED["qwen3_moe"]
    twin = tiny_model("qwen3_moe", **{**settings, **_SIZES})
    path = write_gguf(tmp_path / "m.gguf", twin, all_in("Q4_K"), metadata)
    most = int(1.1 * path.stat().st_size)

    monkeypatch.setattr(gguf_tensors, "free_bytes", lambda device: most)
    load(path)
    monkeypatch.setattr(gguf_tensors, "free_bytes", lambda device: most // 2)
    with pytest.raises(ModelError, match="of memory"):
        load(path)
