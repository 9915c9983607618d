"""What an engine does beside answering, on a CUDA device: the same as on a CPU."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.bench.engines import Completion, complete, complete_requests, random_ids
from kvchat.core.config import CacheConfig
from kvchat.core.text import Size
from kvchat.core.types import Pooling, SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec, Thinning
from support import packers
from support.architectures import GATHERED
from support.assembled import assemble
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.engines_with_drafts import answer, build
from support.gguf_files import QUANTISED, RANDOM_BLOCKS, write_gguf
from support.next_heads import write_with_head
from support.remembering_model import RisingTokens
from support.stateful_models import FORMS, STATEFUL

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROMPT = random_ids(90, 256, seed=1)
GREEDY = SamplingParams(temperature=0.0)
# Tokens that a conversation begins with, and how many behind them are left out.
NUM_OWN, NUM_OUT = 14, 37
# Weights that stay as they are in the file, each of another layout of blocks.
_NVFP4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}
PACKED: dict[str, tuple[packers.Packer, dict[str, Any]]] = {
    "awq": (packers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq, 8 bits": (
        partial(packers.gptq, bits=8),
        {"quant_method": "gptq", "bits": 8, "group_size": 32},
    ),
    "fp8": (
        partial(packers.fp8_blocks, block=(128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "nvfp4": (
        packers.nvfp4,
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _NVFP4}},
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), never_stopping(tiny_model("llama")))


def engine_on(
    device: str, path: Path, directory: Path | None = None, kv_dtype: str = "auto", **others: str
) -> Engine:
    room = Size(num_bytes=16 << 20)
    cache = CacheConfig(device_bytes=room, directory=directory, kv_dtype=kv_dtype)
    return assemble(path, cache=cache, device=device, **others).engine


def on_both(path: Path, found: Callable[[Engine], object]) -> list[object]:
    """Return what is found of an engine on the device, and of one on the CPU."""
    results = []
    for device in (DEVICE, "cpu"):
        engine = engine_on(device, path)
        results.append(found(engine))
        engine.close()
    return results


@pytest.mark.parametrize("name", FORMS)
def test_recurrent_layers_answer_and_come_back_from_the_disk(name: str, tmp_path: Path) -> None:
    model_type, settings = STATEFUL[name]
    path = save_checkpoint(tmp_path / "model", tiny_model(model_type, **settings))

    def answered(device: str, directory: Path | None) -> Completion:
        engine = engine_on(device, path, directory)
        completion = complete(engine, PROMPT, 20)
        engine.close()
        return completion

    plain = answered("cpu", None)
    first, again = (answered(DEVICE, tmp_path / "kv") for _ in range(2))

    assert first.token_ids == again.token_ids == plain.token_ids
    assert again.finished.usage.cached.disk > 0


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_a_head_drafts_for_recurrent_layers(weights: str, tmp_path: Path) -> None:
    """Only the head is packed: a recurrent model keeps its own weights on a GPU."""
    write_with_head(tmp_path / "model", "qwen3_next")
    engine = build(tmp_path / "model", None, device=DEVICE, weights=weights).engine
    said = answer(engine, PROMPT, 30)
    plain = engine_on("cpu", tmp_path / "model")

    assert engine.speculation.is_on
    assert not engine.speculation.failures
    assert said == [list(complete(plain, PROMPT, 30).token_ids)]
    engine.close()
    plain.close()


@pytest.mark.parametrize("name", GATHERED)
def test_contexts_that_are_gathered_answer_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    model_type, settings, _ = GATHERED[name]
    path = save_checkpoint(tmp_path / "model", tiny_model(model_type, **settings))

    ours, plain = on_both(path, lambda engine: complete(engine, PROMPT, 12).token_ids)

    assert ours == plain


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "k8v4", "int4"])
def test_kv_in_few_bits_runs_captured_and_comes_back(kv_dtype: str, tmp_path: Path) -> None:
    model = never_stopping(tiny_model("qwen3", head_dim=64))
    path = save_checkpoint(tmp_path / "model", model)

    def opened() -> Engine:
        directory = tmp_path / "kv"
        return engine_on(DEVICE, path, directory, kv_dtype, dtype="bfloat16")

    first = opened()
    answer = complete(first, PROMPT, 40).token_ids
    status = first.status().graphs
    first.close()
    second = opened()
    again = complete(second, [*PROMPT, *answer], 8)
    second.close()

    assert status is not None
    assert not status.trouble
    assert status.num_replayed > 20
    assert again.finished.usage.cached.disk >= 112
    assert len(again.token_ids) == 8


def test_rules_for_tokens_are_those_of_a_cpu(checkpoint: Path) -> None:
    """These logits are changed on the device, outside of graphs."""
    rules = [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.7),
        replace(GREEDY, logit_bias=((3, 60.0), (5, -100.0))),
    ]
    spec = RequestSpec(tuple(PROMPT), GREEDY, max_tokens=12)
    specs = [
        *(replace(spec, sampling=sampling) for sampling in rules),
        replace(spec, new_constraint=RisingTokens),
        replace(spec, num_top_logprobs=3),
        replace(spec, num_top_logprobs=0, sampling=SamplingParams(1.0, top_k=5, seed=3)),
    ]

    def said(engine: Engine) -> list[tuple[int, ...]]:
        return [each.token_ids for each in complete_requests(engine, specs)]

    ours, plain = on_both(checkpoint, said)

    assert ours == plain


def test_kv_that_is_dropped_is_what_a_cpu_drops(checkpoint: Path) -> None:
    thinning = Thinning(budget=Size(share=0.5), num_leading=6, num_last=18)
    spec = RequestSpec(tuple(PROMPT), GREEDY, max_tokens=40, thinning=thinning)

    def said(engine: Engine) -> tuple[tuple[int, ...], object]:
        [found] = complete_requests(engine, [spec])
        return found.token_ids, found.finished.usage.dropped

    ours, plain = on_both(checkpoint, said)

    assert ours == plain


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_moved_kv_is_found(kv_dtype: str, checkpoint: Path) -> None:
    shorter = [*PROMPT[:NUM_OWN], *PROMPT[NUM_OWN + NUM_OUT :]]
    spec = RequestSpec((*shorter, 5, 6), GREEDY, max_tokens=12, moved_under="a chat")
    engine = engine_on(DEVICE, checkpoint, kv_dtype=kv_dtype)
    complete(engine, [*PROMPT, 0], 1)

    assert engine.move_kv(PROMPT, shorter, NUM_OWN, "a chat") == len(shorter)
    [found] = complete_requests(engine, [spec])

    assert found.finished.usage.cached.total == len(shorter)
    engine.close()


@pytest.mark.parametrize("pooling", Pooling)
def test_a_text_has_the_vector_of_a_cpu(pooling: Pooling, checkpoint: Path) -> None:
    def vector(engine: Engine) -> torch.Tensor:
        embedding = engine.embedding(PROMPT, pooling)
        while not embedding.step():
            pass
        embedding.close()
        return torch.tensor(embedding.vector)

    ours, plain = on_both(checkpoint, vector)

    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [*QUANTISED, *RANDOM_BLOCKS])
def test_a_gguf_file_of_every_format_runs(kind: str, tmp_path: Path) -> None:
    """The products of its form are tested as it is loaded: one that is wrong is refused."""
    settings = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = never_stopping(tiny_model("llama", **settings))
    path = write_gguf(tmp_path / "m.gguf", model, kind)

    assembled = assemble(path, "auto", device=DEVICE)
    answer = complete(assembled.engine, PROMPT, 12)
    assembled.engine.close()

    assert assembled.loaded.weights == ("own" if kind in ("F16", "BF16") else "blocks")
    assert assembled.loaded.device.type == DEVICE
    assert len(answer.token_ids) > 0


@pytest.mark.parametrize("name", PACKED)
def test_packed_checkpoints_stay_in_their_blocks(name: str, tmp_path: Path) -> None:
    """Their products are tested as those of GGUF's are."""
    packer, settings = PACKED[name]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
    plain = save_checkpoint(tmp_path / "plain", never_stopping(tiny_model("llama", **sizes)))
    packed = Path(shutil.copytree(plain, tmp_path / "packed"))
    packers.pack_checkpoint(plain, packed, packer, {"quantization_config": settings})

    assembled = assemble(packed, "auto", device=DEVICE)
    answer = complete(assembled.engine, PROMPT, 40)
    assembled.engine.close()

    assert assembled.loaded.weights == "blocks"
    assert assembled.loaded.device.type == DEVICE
    assert len(answer.token_ids) > 0
