"""After an error that leaves a GPU useless the engine ends with one sentence; the disk's KV stays.

Every later request failed with the device's error: `kvchat serve` answered with errors until a user
restarted it.
"""

from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from kvchat.cache.tier import Tier
from kvchat.core.errors import DeviceLost, ExitCode, GenerationError
from kvchat.core.events import LoadEvent, LoadFailed, ModelReady, RequestEvent, RequestFailed
from kvchat.core.types import Pooling
from kvchat.engine.embedding import Embedding
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import EngineThread
from support.engine_harness import EngineHarness
from support.memory_tier import MemoryTier
from support.remembering_model import GREEDY

READY = ModelReady("fake", "s1-0", "cuda:0", "float32", 120, 0.0)
WAIT_S = 60.0
PROMPT = tuple(range(1, 33))
ILLEGAL = "CUDA error: an illegal memory access was encountered"
TOLD = f"The GPU failed: {ILLEGAL}. Start kvchat again."


class Gpu:
    """What fails at every call once it `is_lost`; `num_pending` questions fail in any case."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_lost = False
        self.num_pending = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.wait())
        stream = SimpleNamespace(synchronize=self.step)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)

    def engine(self, open_tier: Callable[[], Tier] | None = None) -> EngineHarness:
        engine = EngineHarness(fails=self.step, open_tier=open_tier)
        engine.model.device = torch.device("cuda", 0)  # type: ignore[misc]
        return engine

    def step(self) -> None:
        if self.is_lost:
            raise torch.AcceleratorError(f"{ILLEGAL}\nSearch for it in the manual.")

    def wait(self) -> None:
        self.num_pending -= 1
        if self.num_pending >= 0:
            raise RuntimeError("CUDA error: invalid configuration argument")
        self.step()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def spec(*prompt: int, max_tokens: int = 4) -> RequestSpec:
    return RequestSpec(prompt, GREEDY, max_tokens=max_tokens)


@pytest.mark.parametrize("num_pending", [0, 1])
def test_an_error_of_one_request_ends_no_engine(gpu: Gpu, num_pending: int) -> None:
    """An earlier error may be told at the first question about the device, and at no other."""
    engine = gpu.engine()
    engine.complete(spec(1, 2, 3))
    failing = iter([True])

    def fail_once() -> None:
        if next(failing, False):
            gpu.num_pending = num_pending
            raise RuntimeError("mat1 and mat2")

    engine.model._fails = fail_once
    request_id = engine.submit(spec(5, 6, 7))
    engine.run()

    [failed] = engine.failures(request_id)
    assert type(failed.error) is GenerationError
    assert failed.error.message == "The forward pass failed: mat1 and mat2."
    again = engine.submit(spec(5, 6, 7))
    engine.run()
    engine.assert_complete(again)


def test_what_runs_and_what_comes_is_told_one_sentence_and_the_disk_stays(gpu: Gpu) -> None:
    tier = MemoryTier(4, 32)
    engine = gpu.engine(lambda: tier)
    heard: SimpleQueue[LoadEvent] = SimpleQueue()
    told: SimpleQueue[RequestEvent] = SimpleQueue()
    engine.complete(spec(*PROMPT))
    thread = EngineThread(lambda _: (engine.engine, READY), heard.put)
    assert heard.get(timeout=WAIT_S) is READY

    gpu.is_lost = True
    for _ in range(2):
        thread.submit(spec(*PROMPT, 38, 39), told.put)
        failed = told.get(timeout=WAIT_S)
        assert isinstance(failed, RequestFailed)
        assert str(failed.error) == TOLD

    ended = heard.get(timeout=WAIT_S)
    assert isinstance(ended, LoadFailed)
    assert ended.error.exit_code is ExitCode.GENERATION
    thread.close(WAIT_S)
    assert tier.is_closed
    assert tier.num_quarantined == 0
    assert len(tier.blocks) == len(PROMPT) // 4
    gpu.is_lost = False
    again = gpu.engine(lambda: tier)
    assert again.engine.chain.flush(WAIT_S)
    request_id = again.submit(spec(*PROMPT, 38, 39))
    again.run()
    assert again.ending(request_id).usage.cached.total >= 28


@pytest.mark.parametrize("fails", ["steps", "checks"])
def test_restored_kv_that_awaits_its_check_is_not_deleted(gpu: Gpu, fails: str) -> None:
    """No check can succeed then, and KV that fails its check is deleted from the disk.

    A check copies a block first. As this failed, and not the step, the KV was deleted.
    """
    tier = MemoryTier(4, 32)
    engine = restored(gpu, tier)
    if fails == "checks":
        engine.cache.kv_pool.copy_block = lambda *_: gpu.step()  # type: ignore[method-assign]

    gpu.is_lost = True
    with pytest.raises(DeviceLost):
        engine.engine.step()
    engine.engine.close()

    assert tier.num_quarantined == 0
    assert len(tier.blocks) == len(PROMPT) // 4


def test_a_gpu_that_is_lost_as_the_engine_closes_costs_no_kv(gpu: Gpu) -> None:
    """The close computes the checks that are due: the KV was deleted as they failed."""
    tier = MemoryTier(4, 32)
    engine = restored(gpu, tier)

    def lose() -> None:
        gpu.is_lost = True
        gpu.step()

    engine.model._fails = lose
    with pytest.raises(DeviceLost):
        engine.engine.close()

    assert tier.is_closed
    assert tier.num_quarantined == 0
    assert len(tier.blocks) == len(PROMPT) // 4


def restored(gpu: Gpu, tier: MemoryTier) -> EngineHarness:
    """Return an engine with KV of `tier` that awaits its check, which another engine stored."""
    first = gpu.engine(lambda: tier)
    first.complete(spec(*PROMPT))
    first.engine.close()
    engine = gpu.engine(lambda: tier)
    assert engine.engine.chain.flush(WAIT_S)
    engine.submit(spec(*PROMPT, 38, 39))
    while not engine.engine._kv_verifier.has_due:
        engine.step()
    return engine


def test_an_embedding_finds_it_too(gpu: Gpu) -> None:
    """It is computed in a call, not in a step: a server of embeddings alone went on for ever."""
    engine = gpu.engine()
    heard: SimpleQueue[LoadEvent] = SimpleQueue()
    thread = EngineThread(lambda _: (engine.engine, READY), heard.put)
    heard.get(timeout=WAIT_S)

    gpu.is_lost = True
    runner = engine.engine._runner
    runner.hidden = lambda piece: gpu.step()  # type: ignore[assignment, method-assign]
    embedding = Embedding(engine.cache, runner, PROMPT, Pooling.MEAN)
    computed = thread.call(lambda _: embedding.step())

    with pytest.raises(DeviceLost, match="illegal memory access"):
        computed.result(WAIT_S)
    assert isinstance(heard.get(timeout=WAIT_S), LoadFailed)
    embedding.close()
    thread.close(WAIT_S)
