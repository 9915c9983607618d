"""The engine on a CUDA device: the ids transformers generates there, and KV that outlives it."""

from pathlib import Path

import pytest
import torch

from kvchat.bench.engines import complete, random_ids
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, Size
from kvchat.engine.assembly import AssembledEngine, build_engine
from kvchat.model.source import find_model
from support.checkpoints import VOCAB_SIZE, never_stopping, save_checkpoint, tiny_model

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = random_ids(90, 256, seed=1)


def build(checkpoint: Path, directory: Path | None = None) -> AssembledEngine:
    cache = CacheConfig(device_bytes=Size(num_bytes=16 << 20), directory=directory)
    model = ModelConfig(str(checkpoint), device=DEVICE, dtype="float32")
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
