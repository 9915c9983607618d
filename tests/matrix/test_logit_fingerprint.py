"""KV under a forged identity: whatever tensor of the model is another, the first forward pass after
a restore finds out, and the answer is what a cold run gives.

The digest of the weights is remembered by file; these tests write the digest of the model that made
the KV beside the file of the one that reads it.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvchat.cache.disk.memory import DiskMemory
from kvchat.core.types import CachedTokens
from kvchat.model.files.checkpoint_files import mark
from support.architectures import SUPPORTED
from support.assembled import begin_life
from support.checkpoints import save_checkpoint, tiny_model
from support.matrix import spread
from support.specimens import random_ids

BLOCK = 16
PROMPT = random_ids(70, 1)
LAYER = "model.layers.1."
TENSORS = [
    "model.embed_tokens.weight",
    f"{LAYER}self_attn.q_proj.weight",
    f"{LAYER}self_attn.k_proj.weight",
    f"{LAYER}self_attn.v_proj.weight",
    f"{LAYER}self_attn.o_proj.weight",
    f"{LAYER}mlp.gate_proj.weight",
    f"{LAYER}mlp.up_proj.weight",
    f"{LAYER}mlp.down_proj.weight",
    f"{LAYER}input_layernorm.weight",
    f"{LAYER}post_attention_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
]
# What rounding moves most: few bits, experts chosen by them.
QUICK = [("llama", "float16"), ("qwen3_moe", "bfloat16"), ("gpt_oss, sinks", "bfloat16")]


def perturbed(checkpoint: Path, tensor: str, copy: Path, amount: float) -> Path:
    """Copy a checkpoint and move every value of one tensor by about `amount` of itself."""
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    noise = torch.randn(tensors[tensor].shape, generator=torch.Generator().manual_seed(0))
    tensors[tensor] = tensors[tensor] * (1.0 + amount * noise)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def forge(home: Path, checkpoint: Path, original: Path) -> None:
    """Have the weights of one checkpoint taken for those of another."""
    memory = DiskMemory(home / "state")
    real = memory.get("weights", mark(original / "model.safetensors"))
    assert real is not None
    memory.set("weights", mark(checkpoint / "model.safetensors"), real)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = SUPPORTED["llama"]
    directory = tmp_path_factory.mktemp("llama") / "model"
    return save_checkpoint(directory, tiny_model(model_type, **settings))


@pytest.fixture(scope="module")
def homes(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Homes in which the KV of a prompt is kept, by the dtype it is kept in."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = tmp_path_factory.mktemp(f"home-{dtype}")
        life = begin_life(llama, found[dtype], dtype)
        life.answer(PROMPT, 8)
        life.engine.close()
    return found


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    spread(
        [*((tensor, "float32") for tensor in TENSORS), *((t, "bfloat16") for t in TENSORS[::5])],
        [*((tensor, "float32") for tensor in TENSORS[::4]), (TENSORS[5], "bfloat16")],
    ),
)
def test_no_tensor_may_be_another(tensor, dtype, llama, homes, tmp_path):
    home = shutil.copytree(homes[dtype], tmp_path / "home")
    other = perturbed(llama, tensor, tmp_path / "other", amount=1.0)
    cold, _ = begin_life(other, None, dtype).answer(PROMPT, 8)
    forge(home, other, llama)

    life = begin_life(other, home, dtype)
    answer, cached = life.answer(PROMPT, 8)

    assert answer == cold
    assert cached == CachedTokens()
    disk = life.disk()
    assert disk.num_quarantined == 64 // BLOCK
    assert "not this model's" in disk.trouble
    life.engine.close()
    again = begin_life(other, home, dtype)
    resumed, cached = again.answer(PROMPT, 8)
    assert cached == CachedTokens(disk=64)  # its own by now
    assert (
        resumed == cold or dtype != "float32"
    )  # where chunks matter, a near tie may fall so or so
    assert again.disk().num_quarantined == 0
    again.engine.close()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) in QUICK else pytest.mark.soak)
        for family in SUPPORTED
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_no_alarm_is_false(family: str, dtype: str, tmp_path: Path) -> None:
    """Whatever the step's other rows: the prompts that follow differ in length."""
    model_type, settings = SUPPORTED[family]
    checkpoint = save_checkpoint(tmp_path / "model", tiny_model(model_type, **settings))
    life = begin_life(checkpoint, tmp_path, dtype)
    life.answer(PROMPT, 8)
    life.engine.close()

    for number in (1, 17):
        again = begin_life(checkpoint, tmp_path, dtype)
        _, cached = again.answer([*PROMPT, *random_ids(number, number)], 2)
        assert cached.disk >= 64
        assert again.disk().num_quarantined == 0
        again.engine.close()
