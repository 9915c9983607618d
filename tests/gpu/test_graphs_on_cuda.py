"""Steps captured as real CUDA graphs: equal to eager at any length, and beside other threads."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvchat.bench.engines import complete_all, random_ids
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY
from kvchat.engine.assembly import build_engine
from kvchat.engine.engine import Engine
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat_kernels.sampler import RowDraw, sample_tokens
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.paged_scene import Scene, load_tiny
from support.row_draws import sampler_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
# Grouped expert products may need the host: whether they do is torch's and the GPU's affair. Gemma
# 3n's module makes a number on the host in transformers 5.17, and not in 5.23.
MAY_NEED_HOST = {"qwen2_moe, window in its mask only", "qwen3_moe", "gpt_oss, sinks"} | {
    "deepseek_v3, wide keys",
    "gemma3n, shared KV",
}


def scene_of(name: str, directory: Path, max_context: int = 448) -> Scene:
    loaded = load_tiny(name, directory, "cuda", max_context)
    num_blocks = 200 + 4 * max_context // 16
    return Scene(loaded, CudaGraphs(loaded.device), 16, num_blocks, max_context)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_is_captured_and_computes_the_same(name: str, tmp_path: Path) -> None:
    scene = scene_of(name, tmp_path)
    piece = scene.read(70, [3])
    scene.capture_for([piece])
    trouble = scene.graphs.status().trouble
    if trouble and name in MAY_NEED_HOST:
        assert scene.graphs.run([piece]) is None, "what cannot be captured runs eagerly"
        return

    assert not trouble
    scene.check([piece])
    scene.check([scene.read(301, [9])])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16])
def test_decodes_are_padded_to_buckets(num_rows: int, tmp_path: Path) -> None:
    scene = scene_of("llama", tmp_path)
    pieces = [scene.read(7 * row + 1, [row + 3]) for row in range(num_rows)]
    scene.capture_for(pieces)

    scene.check(pieces)


@pytest.mark.parametrize("name", ["llama", "mistral, window"])
def test_what_was_captured_at_length_one_is_right_at_32k(name: str, tmp_path: Path) -> None:
    scene = scene_of(name, tmp_path, max_context=33_000)
    scene.capture_for([scene.read(0, [1])])
    scene.capture_for([scene.read(0, [1, 2, 3, 4, 5])])
    assert scene.graphs.status().num_captured == 2, scene.graphs.status().trouble

    for context in (0, 63, 257, 4097, 32_768):
        scene.check([scene.read(context, [9])])
        scene.check([scene.read(context, [9, 8, 7])])
        scene.check([scene.read(context, [9, 8, 7, 6, 5])])


def test_tokens_are_drawn_in_the_graph_as_from_its_logits(tmp_path: Path) -> None:
    scene = scene_of("llama", tmp_path)
    pieces = [scene.read(40, [1, 2, 3]), scene.read(300, [7])]
    scene.capture_for(pieces)
    for seed in range(20):
        draws = [RowDraw(0.9, 40, 0.9, 0.02, seed), RowDraw(1.3 * (seed % 2), 0, 1.0, 0.0, -seed)]
        how = sampler_rows([*[draws[0]] * 3, draws[1]], [41, 42, 43, 301], scene.device)
        logits = scene.graphs.run(pieces)
        drawn = scene.graphs.draw(pieces, draws)

        assert logits is not None
        assert drawn is not None
        assert torch.equal(drawn, sample_tokens(logits, how))


def test_capture_and_replays_do_not_mind_copies_of_another_thread(tmp_path: Path) -> None:
    scene = scene_of("llama", tmp_path)
    pieces = [scene.read(40, [1]) for _ in range(4)]
    is_over, failures = threading.Event(), []

    def copy_for_ever() -> None:
        try:
            stream = torch.cuda.Stream()
            host = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
            while not is_over.is_set():
                with torch.cuda.stream(stream):
                    there = host.to("cuda", non_blocking=True)
                    host.copy_(there, non_blocking=True)
                stream.synchronize()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=copy_for_ever)
    thread.start()
    try:
        for count in (1, 2, 4):
            scene.capture_for(pieces[:count])
            for _ in range(20):
                scene.check(pieces[:count])
    finally:
        is_over.set()
        thread.join()
    assert not failures
    assert not scene.graphs.status().trouble


def test_a_capture_that_fails_leaves_stream_and_device_as_they_were() -> None:
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(8, device="cuda")
    before = torch.cuda.current_stream()

    with pytest.raises(RuntimeError):
        graphs.capture(lambda: x * float(x.sum()))

    assert torch.cuda.current_stream() == before
    assert float((x * 2).sum()) == 16.0
    torch.cuda.empty_cache()  # refused where torch believes that something is still recorded
    replay = graphs.capture(lambda: x * 3)
    x.fill_(5.0)
    assert replay().tolist() == [15.0] * 8


def test_a_graph_is_captured_after_all_others_are_gone() -> None:
    """torch refuses to record to a pool of memory that all of its graphs have left."""
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(8, device="cuda")
    for factor in (2, 3):
        replays = [graphs.capture(lambda by=factor: x * by) for _ in range(2)]  # type: ignore[misc]
        assert [replay().tolist() for replay in replays] == [[float(factor)] * 8] * 2
        del replays


def engine_for(directory: Path, has_graphs: bool, draft: Path | None = None) -> Engine:
    cache = CacheConfig(device_bytes=Size(num_bytes=32 << 20))
    model = ModelConfig(str(directory), device="cuda", dtype="float32")
    return build_engine(
        find_model(str(directory)),
        model,
        cache,
        replace(EngineConfig(), graphs=has_graphs),
        NO_MEMORY,
        lambda event: None,
        SpeculationConfig("auto" if draft is not None else "off"),
        find_model(str(draft)) if draft is not None else None,
    ).engine


@pytest.mark.parametrize("has_draft", [False, True])
def test_an_engine_says_the_same_with_graphs_and_without(has_draft: bool, tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "model", tiny_model("qwen3"))
    draft = save_checkpoint(tmp_path / "draft", tiny_model("qwen3")) if has_draft else None
    prompts = [random_ids(length, 256, seed=length) for length in (5, 60, 200)]
    plain = engine_for(target, False, draft)
    expected = [done.token_ids for done in complete_all(plain, prompts, 100)]
    plain.close()

    engine = engine_for(target, True, draft)
    answers = [done.token_ids for done in complete_all(engine, prompts, 100)]
    again = [done.token_ids for done in complete_all(engine, prompts, 100)]
    engine.close()

    assert answers == again == expected
    status = engine.status().graphs
    assert status is not None
    assert status.num_replayed > status.num_eager
    assert not status.trouble
