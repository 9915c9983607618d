"""Experts of packed checkpoints that have a tensor each: they stay at the size of their file."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model import loader
from kvchat.model.checkpoint import tensors as checkpoint_tensors
from kvchat.model.checkpoint.source import find_model
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.experts import DeviceExpertPacks, ExpertPacks, expert_packs_of
from kvchat.model.packed.quantise import DevicePack, pack_of
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear.blocks import BlockWeights, dequantised
from support import packers
from support.checkpoints import save_checkpoint, tiny_model
from support.matrix import spread

# How weights are packed, the settings that say so, and the most bits of a weight in memory.
FORMATS: dict[str, tuple[packers.Packer, dict[str, Any], float]] = {
    "nvfp4": (
        partial(packers.nvfp4, is_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        4.75,
    ),
    "fp8": (
        partial(packers.fp8_blocks, block=(128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        8.25,
    ),
    "gptq": (packers.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, 6.0),
}


def load(directory: Path, dtype: str) -> LoadedModel:
    config = ModelConfig(dtype=dtype)
    return load_model(find_model(str(directory)), config, None, lambda _: None)


def experts_of(loaded: LoadedModel) -> Any:
    layer = loaded.module.model.layers[-1]
    return (layer.mlp if hasattr(layer, "mlp") else layer.feed_forward).experts


# Types whose experts have different names in files, and how they say their number and width.
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 256},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 256},
    "phimoe": {"num_local_experts": 4, "intermediate_size": 256},
    "lfm2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "num_dense_layers": 0,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    },
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    spread(
        [*(("qwen3_moe", name) for name in FORMATS), *((kind, "gptq") for kind in [*TYPES][1:])],
        always=[("qwen3_moe", "nvfp4"), ("qwen3_moe", "fp8"), ("mixtral", "gptq")],
    ),
)
def test_experts_with_a_tensor_each_stay_in_blocks(model_type, name, tmp_path, monkeypatch):
    """They became 16 bits, for transformers merges those of a layer."""
    monkeypatch.setattr(checkpoint_tensors, "is_fast_by_torch", lambda dtype: False)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"hidden_size": 128, **heads, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    model = tiny_model(model_type, **{**sizes, **TYPES[model_type]})
    plain = save_checkpoint(tmp_path / "plain", model)
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    packer, settings, bits = FORMATS[name]
    packers.pack_checkpoint(plain, packed, packer, {"quantization_config": settings})

    ours, theirs = load(packed, "auto"), load(plain, "float32")

    packs, twin = expert_packs_of(experts_of(ours)), experts_of(theirs)
    assert isinstance(packs, ExpertPacks)
    gate, up = (dequantised(product.weights).view(4, 256, 128) for product in packs.gate_up)
    assert torch.allclose(torch.cat((gate, up), dim=1), twin.gate_up_proj.float(), rtol=1e-6)
    down = dequantised(packs.down.weights).view(twin.down_proj.shape)
    assert torch.allclose(down, twin.down_proj.float(), rtol=1e-6)
    assert 8 * packs.num_bytes <= bits * (twin.gate_up_proj.numel() + twin.down_proj.numel())
    assert ours.compiled is not None
    assert compare_with_own(ours) > 0.99
    source = find_model(str(packed))
    assert checkpoint_tensors.stays_packed(source, torch.bfloat16, for_cpu=True)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_a_packed_checkpoint_go_to_a_gpu_as_they_are(name, tmp_path, monkeypatch):
    """FP8 and NVFP4 became 16 bits there, and experts with a tensor each in any format."""
    device, sent = torch.device("cuda", 0), []
    monkeypatch.setattr(BlockWeights, "to", lambda weights, where: sent.append(where) or weights)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sizes = {"hidden_size": 128, **heads, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    model = tiny_model("qwen3_moe", **{**sizes, **TYPES["qwen3_moe"]})
    plain = save_checkpoint(tmp_path / "plain", model)
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    packer, settings, bits = FORMATS[name]
    packers.pack_checkpoint(plain, packed, packer, {"quantization_config": settings})
    source, twin = find_model(str(packed)), load(plain, "float32")
    config, spec = loader.inspect_model(source)

    module, _ = loader._read_weights(source, MetaModel(config), None, spec, lambda _: None, device)

    twins = dict(twin.module.named_modules())
    layers = [(n, x) for n, x in module.named_modules() if isinstance(pack_of(x), DevicePack)]
    assert sent == [device] * (len(layers) + 3)
    assert len(layers) >= 4
    for path, layer in layers:
        x = torch.randn(3, layer.in_features)
        assert torch.allclose(layer(x), twins[path](x), rtol=1e-4, atol=1e-5), path
    experts, own = module.model.layers[0].mlp.experts, experts_of(twin)
    packs = expert_packs_of(experts)
    assert isinstance(packs, DeviceExpertPacks)
    assert 8 * packs.num_bytes <= bits * (own.gate_up_proj.numel() + own.down_proj.numel())
    x, chosen = torch.randn(3, 128), torch.tensor([[0, 3], [1, 3], [2, 0]])
    factors = torch.rand(3, 2)
    expected = twin.module.model.layers[0].mlp.experts(x, chosen, factors)
    assert torch.allclose(experts(x, chosen, factors), expected, rtol=1e-4, atol=1e-5)
    assert checkpoint_tensors.stays_packed(source, torch.bfloat16, for_cpu=False)
