"""The engine on a CUDA device: the ids transformers generates there, and KV that outlives it."""

from pathlib import Path

import pytest
import torch

from kvchat.bench.engines import complete, complete_all, random_ids
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, EngineConfig
from kvchat.core.text import Size
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.packed.experts import has_packed_experts
from kvchat.model.self_test import compare_with_own
from support.assembled import assemble
from support.checkpoints import VOCAB_SIZE, never_stopping, save_checkpoint, tiny_model
from support.gguf_files import write_gguf
from support.gpu_packs import MIXTURES

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = random_ids(90, 256, seed=1)


def build(
    checkpoint: Path, directory: Path | None = None, dtype: str = "float32", weights: str = "auto"
) -> AssembledEngine:
    cache = CacheConfig(device_bytes=Size(num_bytes=16 << 20), directory=directory)
    return assemble(checkpoint, dtype, cache, device=DEVICE, weights=weights)


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


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("model_type", ["gemma2", "mistral", "gpt_oss"])
def test_windows_change_no_answer(model_type: str, kv_dtype: str, tmp_path: Path) -> None:
    """Chats that pass their window many times push each other out to host memory, and restart.

    Steps are short: all tokens of a step are in window blocks, and those of a GPU's usual steps
    would take a small budget for themselves, so that every block had a window block.
    """
    model = never_stopping(tiny_model(model_type, sliding_window=8))
    save_checkpoint(tmp_path / "model", model)
    prompts = [random_ids(300, 256, seed=seed) for seed in range(3)]
    room = Size(num_bytes=(300 if kv_dtype == "auto" else 100) << 10)
    host, short = Size(num_bytes=64 << 20), EngineConfig(max_step_tokens=64)

    def answers(whole: bool) -> list[list[int]]:
        directory = tmp_path / f"kv {whole}"
        cache = CacheConfig(
            device_bytes=Size(num_bytes=16 << 20) if whole else room,
            host_bytes=host,
            directory=directory,
            kv_dtype=kv_dtype,
            whole_windows=whole,
        )
        found: list[list[int]] = []
        contexts = prompts
        for _ in range(2):
            engine = assemble(tmp_path / "model", "float32", cache, short, device=DEVICE).engine
            pool = engine.cache.kv_pool
            assert whole or (
                isinstance(pool, WindowedKvPool) and pool.blocks.num_usable < pool.num_blocks - 1
            )
            for _ in range(2):
                said = complete_all(engine, contexts, 40)
                contexts = [
                    [*ids, *one.token_ids, 5, 6] for ids, one in zip(contexts, said, strict=True)
                ]
                found += contexts
            status = engine.status().graphs
            assert status is not None
            assert not status.trouble
            assert status.num_replayed > 20
            engine.close()
        return found

    assert answers(whole=False) == answers(whole=True)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_packed_weights_run_fused_and_captured(model_type, weights, tmp_path):
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


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_run_captured(name: str, weights: str, tmp_path: Path) -> None:
    """Before they were packed, a mixture of 30 B needed 58 GiB of a card."""
    model_type, settings = MIXTURES[name]
    save_checkpoint(tmp_path / "model", never_stopping(tiny_model(model_type, **settings)))
    assembled = build(tmp_path / "model", dtype="bfloat16", weights=weights)
    loaded = assembled.loaded

    answer = complete(assembled.engine, PROMPT, 60)
    status = assembled.engine.status().graphs
    assembled.engine.close()

    assert len(answer.token_ids) == 60
    assert has_packed_experts(loaded.module)
    assert loaded.notes == ()
    assert compare_with_own(loaded) >= 0.98
    assert status is not None
    assert not status.trouble
    assert status.num_replayed > 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_the_experts_of_a_gguf_file_run_in_their_blocks(kind: str, tmp_path: Path) -> None:
    settings = MIXTURES["qwen3_moe"][1] | {"moe_intermediate_size": 256, "hidden_size": 256}
    model = tiny_model("qwen3_moe", **settings, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, kind, {"expert_feed_forward_length": 256})

    assembled = build(path, dtype="auto")
    answer = complete(assembled.engine, PROMPT, 12)
    assembled.engine.close()

    assert len(answer.token_ids) > 0
    assert has_packed_experts(assembled.loaded.module)
    assert assembled.loaded.device.type == DEVICE
    assert compare_with_own(assembled.loaded) >= 0.98


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
