"""A decode step never waits for the device on the host before it reads its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.core.types import SamplingParams
from kvchat.engine.runner import QueuedTokens, Runner
from kvchat.engine.sampler import SamplingRow, parameters_of
from kvchat.model.batch import build_batch
from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat_kernels.block_copy import PoolTensors, copy_blocks
from kvchat_kernels.sampler import RowDraw, sample_tokens
from support.paged_scene import Scene, load_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Let torch raise RuntimeError where the host is made to wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_that_waiting_is_noticed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(RuntimeError), waiting_refused():
        torch.tensor([1, 2], device=device)


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_a_step_is_queued_as_a_whole(num_rows: int, is_captured: bool, tmp_path: Path) -> None:
    loaded = load_tiny("llama", tmp_path, "cuda")
    scene = Scene(loaded, CudaGraphs(loaded.device), 16, 200)
    pieces = [scene.read(20 + row, [row + 3]) for row in range(num_rows)]
    if is_captured:
        scene.capture_for(pieces)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
    rows = [SamplingRow(params, seed=5, position=row) for row in range(num_rows)]

    def step() -> torch.Tensor:
        if is_captured:
            logits = scene.graphs.run(pieces)
            assert logits is not None
        else:
            logits = scene.model.forward(build_batch(pieces, 16, loaded.device))
        return sample_tokens(logits, parameters_of(rows, logits.shape[1], logits.device))

    expected = step().tolist()  # compiles what was not yet
    with waiting_refused():
        tokens = step()

    assert tokens.tolist() == expected


def test_a_step_of_which_nobody_reads_anything_is_over_when_it_returns(tmp_path: Path) -> None:
    loaded = load_tiny("llama", tmp_path, "cuda")
    scene = Scene(loaded, CudaGraphs(loaded.device), 16, 200)
    piece = replace(scene.read(100, range(50)), num_logit_rows=0)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096

    logits = Runner(scene.model, 16).run_pieces([piece])

    assert torch.cuda.current_stream().query()
    assert logits.shape[0] == 0


def test_blocks_are_copied_behind_the_host() -> None:
    pools = PoolTensors([torch.randn(8, 4, 2, 16, device="cuda")])
    copy_blocks(pools, [1], [2])

    with waiting_refused():
        copy_blocks(pools, [3, 4], [5, 6])

    [(rows, _, _)] = pools.columns()
    assert torch.equal(rows[5:7], rows[3:5])


def test_blocks_leave_and_come_back_behind_the_host_and_before_they_are_overwritten() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool = KvPool(KvGeometry((LayerGeometry(2, 64, 32),), torch.bfloat16, 16), 12, device)
    for tensor in pool.layers[0].tensors:
        tensor.normal_()
    expected = bytes(pool.gather([1, 2]))
    for _ in range(2):  # allocates the memory that copies pass through
        pool.scatter([3, 4], bytearray(expected))
        first = pool.export([3, 4])
        assert first is not None
        assert bytes(first.read()) == expected
        first.release()
    busy = torch.randn(4096, 4096, device=device)

    with waiting_refused():
        for _ in range(20):
            busy = busy @ busy / 4096
        pool.scatter([5, 6], bytearray(expected))
        images = pool.export([5, 6])
        pool.zero(5, 0)
        pool.zero(6, 0)
        is_computing = not torch.cuda.current_stream().query()

    assert is_computing, "the host has waited, or the device was too quick for this test"
    assert images is not None
    assert bytes(images.read()) == expected
    images.release()


def test_a_step_that_takes_tokens_of_the_step_before_is_queued_without_reading_them(tmp_path):
    loaded = load_tiny("llama", tmp_path, "cuda")
    scene = Scene(loaded, CudaGraphs(loaded.device), 16, 200)
    pieces = [scene.read(20 + row, [row + 3]) for row in range(3)]
    scene.capture_for(pieces)
    runner = Runner(scene.model, 16, scene.graphs)
    draws = [RowDraw(0.7, 20, 0.9, 0.0, seed) for seed in range(3)]

    def both() -> tuple[QueuedTokens, QueuedTokens]:
        first = runner.queue(pieces, draws)
        assert first is not None
        after = [replace(piece, token_ids=[0], start=piece.start + 1) for piece in pieces]
        second = runner.queue(after, draws, first, (2, 0, 1))
        assert second is not None
        return first, second

    both()  # allocates
    with waiting_refused():
        first, second = both()
    tokens = first.read()
    known = [
        replace(piece, token_ids=[tokens[row]], start=piece.start + 1)
        for piece, row in zip(pieces, (2, 0, 1), strict=True)
    ]
    expected = scene.graphs.draw(known, draws)

    assert expected is not None
    assert second.read() == expected.tolist()
