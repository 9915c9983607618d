"""gpt-oss's experts, whose gate and up are by turns, in compiled steps: as its modules compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvchat.model import loader
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.tensors import stays_packed
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.packed.experts import (
    DeviceExpertPacksByTurns,
    ExpertPacksByTurns,
    expert_packs_of,
)
from kvchat.model.packed.product_test import product_fault
from kvchat_kernels.experts import MAX_ROWS
from kvchat_kernels.linear.blocks import BlockWeights
from matrix.test_gguf_experts import assert_same, in_float32, load, logits_of
from support.checkpoints import save_checkpoint, tiny_model
from support.compiled_steps import stir
from support.gguf_files import write_gguf
from support.specimens import random_ids

_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "attention_bias": True}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8}


def model() -> PreTrainedModel:
    """Return a model of numbers of 16 bits: modules have no finer ones, as compiled steps may."""
    found = tiny_model("gpt_oss", **_SIZES, **_EXPERTS)
    stir(found)
    found.bfloat16().float()
    return found


def in_mxfp4(directory: Path) -> Path:
    """Save a checkpoint whose experts are random floats of 4 bits, with exponents apart."""
    plain = save_checkpoint(directory / "plain", model())
    packed = Path(shutil.copytree(plain, directory / "packed"))
    generator, parts = torch.Generator().manual_seed(3), {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() < 3:
            parts[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        for ending, shape, least, end in (
            ("blocks", (experts, rows, columns // 32, 16), 0, 256),
            ("scales", (experts, rows, columns // 32), 120, 124),
        ):
            numbers = torch.randint(least, end, shape, generator=generator, dtype=torch.uint8)
            parts[f"{name}_{ending}"] = numbers
    save_file(parts, packed / "model.safetensors", metadata={"format": "pt"})
    path = packed / "config.json"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    return packed


@pytest.mark.parametrize("form", ["of safetensors files", "MXFP4", "Q8_0"])
def test_steps_are_those_of_the_modules(form: str, tmp_path: Path) -> None:
    """A GGUF file has gate and up in matrices apart, others in one."""
    is_gguf = form != "of safetensors files"
    metadata = {"expert_feed_forward_length": _SIZES["intermediate_size"]}
    path = (
        write_gguf(tmp_path / "m.gguf", model(), form, metadata) if is_gguf else in_mxfp4(tmp_path)
    )
    loaded = in_float32(load(path))
    packs = expert_packs_of(loaded.module.model.layers[0].mlp.experts)
    assert isinstance(packs, ExpertPacksByTurns)
    assert len(packs.gate_up) == (2 if is_gguf else 1)
    ids = random_ids(40, seed=1)

    assert_same(logits_of(loaded, ids, True), logits_of(loaded, ids, False), 1e-3)


def test_experts_of_floats_are_held_once(tmp_path: Path) -> None:
    """They lie as products read them, and their parameters are views."""
    loaded = load(save_checkpoint(tmp_path, model()), dtype="bfloat16")
    experts = loaded.module.model.layers[0].mlp.experts
    assert loaded.compiled is not None

    (gate_up,), down = (
        loaded.compiled._decoder.layers[0].mlp.experts.gate_up,
        loaded.compiled._decoder.layers[0].mlp.experts.down,
    )

    assert gate_up.weights.data_ptr() == experts.gate_up_proj.data_ptr()
    assert down.weights.data_ptr() == experts.down_proj.data_ptr()
    assert experts.gate_up_proj.shape == (6, 256, 512)


def test_a_checkpoint_tells_whether_it_stays_packed(tmp_path: Path) -> None:
    """`models info` said of gpt-oss that it is unpacked, and it stays as it is on a CPU."""
    packed, plain = in_mxfp4(tmp_path), tmp_path / "plain"

    found = [
        stays_packed(find_model(str(path)), torch.bfloat16, for_cpu)
        for path, for_cpu in ((packed, True), (packed, False), (plain, True))
    ]

    assert found == [True, True, False]


@pytest.mark.parametrize("form", ["of safetensors files", "MXFP4", "Q8_0"])
def test_on_a_gpu_they_are_those_of_their_module(form, tmp_path, monkeypatch):
    """They became 16 bits there, and a model of 13 GB needed 40."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(BlockWeights, "to", lambda weights, where: weights)
    metadata = {"expert_feed_forward_length": _SIZES["intermediate_size"]}
    is_gguf = form != "of safetensors files"
    path = (
        write_gguf(tmp_path / "m.gguf", model(), form, metadata) if is_gguf else in_mxfp4(tmp_path)
    )
    source = find_model(str(path))
    config, spec = loader.inspect_model(source)

    module, _ = loader._read_weights(source, MetaModel(config), None, spec, lambda _: None, device)

    experts = module.model.layers[0].mlp.experts
    own = load(path, dtype="float32").module.model.layers[0].mlp.experts
    packs = expert_packs_of(experts)
    assert isinstance(packs, DeviceExpertPacksByTurns)
    assert 8 * packs.num_bytes == (8.5 if form == "Q8_0" else 4.25) * 3 * 6 * 256**2
    for num_rows in (1, 5, MAX_ROWS + 1):
        x, chosen = torch.randn(num_rows, 256), torch.rand(num_rows, 6).topk(3)
        expected = own(x, chosen.indices, chosen.values)
        found = experts(x, chosen.indices, chosen.values)
        assert (found - expected).norm() <= 0.01 * expected.norm()  # biases have 16 bits
    assert product_fault(module, torch.float32) is None
