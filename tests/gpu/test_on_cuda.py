"""The engine on a CUDA device: the ids transformers generates there, and KV that outlives it."""

from pathlib import Path

import pytest
import torch

from kvchat.bench.engines import complete, random_ids
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, Size
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.model.self_test import compare_with_own
from kvchat.model.source import find_model
from support.checkpoints import VOCAB_SIZE, never_stopping, save_checkpoint, tiny_model

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = random_ids(90, 256, seed=1)


def build(
    checkpoint: Path,
    directory: Path | None = None,
    dtype: str = "float32",
    weights: str = "auto",
) -> AssembledEngine:
    cache = CacheConfig(device_bytes=Size(num_bytes=16 << 20), directory=directory)
    model = ModelConfig(str(checkpoint), device=DEVICE, dtype=dtype, weights=weights)
    source = find_model(str(checkpoint))
    return build_engine(source, model, cache, EngineConfig(), None, lambda event: None)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text", "gpt_oss"])
def test_greedy_ids_are_those_of_generate(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type).to(DEVICE)
    save_checkpoint(tmp_path / "model", model)
    expected = model.generate(
        torch.tensor([PROMPT], device=DEVICE), max_new_tokens=12, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :]

    engine = build(tmp_path / "model").engine

    assert list(complete(engine, PROMPT, 12).token_ids) == expected.tolist()
    assert list(complete(engine, PROMPT, 12).token_ids) == expected.tolist()  # from the cache


def test_a_conversation_is_restored_to_the_device(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", never_stopping(tiny_model("llama")))
    first = build(tmp_path / "model", tmp_path / "kv").engine
    answer = complete(first, PROMPT, 12).token_ids
    context = [*PROMPT, *answer, *random_ids(5, VOCAB_SIZE - 16, seed=2)]
    uninterrupted = complete(first, context, 12).token_ids
    first.close()

    second = build(tmp_path / "model", tmp_path / "kv").engine
    resumed = complete(second, context, 12)
    second.close()

    assert resumed.token_ids == uninterrupted
    assert resumed.finished.usage.cached.disk == (len(context) - 1) // 16 * 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_16_bits_run_fused_and_captured(model_type: str, dtype: str, tmp_path: Path) -> None:
    """What people run. Fusion that a tolerance refuses in low precision would only be slow."""
    model = tiny_model(model_type)
    save_checkpoint(tmp_path / "model", never_stopping(model))
    assembled = build(tmp_path / "model", tmp_path / "kv", dtype)
    loaded, engine = assembled.loaded, assembled.engine

    first = complete(engine, PROMPT, 40)
    again = complete(engine, [*PROMPT, *first.token_ids[:20]], 20)
    engine.close()

    assert len(first.token_ids) == 40
    assert again.finished.usage.cached.device > 80
    assert loaded.fusing is not None
    assert loaded.fusing.fusion.num_layers == len(loaded.spec.layers)
    assert loaded.notes == ()
    assert compare_with_own(loaded) >= 0.98


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_packed_weights_run_fused_and_captured(
    model_type: str, weights: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", never_stopping(tiny_model(model_type)))
    assembled = build(tmp_path / "model", dtype="bfloat16", weights=weights)
    loaded = assembled.loaded

    answer = complete(assembled.engine, PROMPT, 40)
    assembled.engine.close()

    assert len(answer.token_ids) == 40
    assert loaded.weights == weights
    assert loaded.device.type == DEVICE
    assert loaded.fusing is not None
    assert loaded.fusing.fusion.num_layers == len(loaded.spec.layers)
    assert compare_with_own(loaded) >= 0.98


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_of_16_bits_is_restored_to_the_device(dtype: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", never_stopping(tiny_model("llama")))
    first = build(tmp_path / "model", tmp_path / "kv", dtype).engine
    context = [*PROMPT, *complete(first, PROMPT, 12).token_ids]
    first.close()

    second = build(tmp_path / "model", tmp_path / "kv", dtype).engine
    resumed = complete(second, context, 12)
    second.close()

    assert len(resumed.token_ids) == 12
    assert resumed.finished.usage.cached.disk == (len(context) - 1) // 16 * 16
