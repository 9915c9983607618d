"""The host tier of a CUDA device: pinned memory, a stream of its own, equal bits and equal ids."""

from pathlib import Path

import pytest
import torch

from kvchat.bench.engines import complete, random_ids
from kvchat.cache.block_manager import CacheManager
from kvchat.cache.chain import KvChain
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry
from kvchat.core.config import CacheConfig
from kvchat.core.text import Size
from kvchat.engine.engine import Engine
from support.assembled import assemble
from support.cached_contexts import images_of
from support.chains import new_chain
from support.checkpoints import never_stopping, save_checkpoint, tiny_model

DEVICE = torch.device("cuda")
GEOMETRY = KvGeometry((LayerGeometry(2, 64, 32), LayerGeometry(2, 64, 32)), torch.bfloat16, 16)
NUM_BLOCKS = 200
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def manager() -> CacheManager:
    return CacheManager(KvPool(GEOMETRY, NUM_BLOCKS + 1, DEVICE))


@pytest.fixture
def chain(manager: CacheManager) -> KvChain:
    return new_chain(manager, num_host_blocks=4 * NUM_BLOCKS)


def fill(manager: CacheManager, seed: int) -> list[int]:
    """Fill the whole pool with one context's KV, and keep it."""
    ids = random_ids(NUM_BLOCKS * GEOMETRY.block_size, 1000, seed)
    table = manager.match(ids)
    assert manager.reserve(table, 0, len(ids))
    for tensors in manager.kv_pool.layers:
        for tensor in tensors:
            tensor.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
    manager.release(table, ids)
    return ids


def test_what_was_demoted_is_promoted_bit_for_bit_while_the_device_computes(manager, chain):
    """The blocks are overwritten at once: what was staged before must be what is copied."""
    one = fill(manager, seed=1)
    before = images_of(manager, one, 0, NUM_BLOCKS)
    busy = torch.randn(2048, 2048, device=DEVICE)

    for _ in range(3):
        for _ in range(10):
            busy = busy @ busy / 2048
        other = fill(manager, seed=2)  # pushes the first out, and writes over it
        assert chain.flush(10.0)
        manager.evict_cold(NUM_BLOCKS)
        arrival = chain.arrivals.begin([*one, 0])
        assert arrival is not None
        while chain.arrivals.settle_one(arrival):
            chain.arrivals.wait_for_news()
        assert arrival.num_tokens == len(one)
        assert images_of(manager, one, 0, NUM_BLOCKS) == before
        chain.check()
        manager.check(chain.tables())
        assert other != one
    chain.close()


def test_host_memory_is_pinned_and_within_its_limit(manager: CacheManager, chain: KvChain) -> None:
    fill(manager, seed=1)
    manager.evict_cold(NUM_BLOCKS)
    assert chain.flush(10.0)
    [status] = chain.status()
    assert chain.demoter is not None

    assert 0 < status.num_bytes <= status.limit_bytes
    assert chain.demoter.host._memory.row(0).is_pinned()
    chain.close()


def test_conversations_that_push_each_other_out_go_on_as_before(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", never_stopping(tiny_model("llama")))
    prompts = [random_ids(300, 256, seed=seed) for seed in range(4)]

    def build(cache: CacheConfig) -> Engine:
        return assemble(checkpoint, cache=cache, device="cuda").engine

    def answers(engine: Engine) -> tuple[list[tuple[int, ...]], int]:
        found = [complete(engine, prompt, 8) for _ in range(2) for prompt in prompts]
        engine.close()
        return (
            [completion.token_ids for completion in found],
            sum(completion.finished.usage.cached.host for completion in found),
        )

    large, none = Size(num_bytes=64 << 20), Size(num_bytes=0)
    roomy = build(CacheConfig(device_bytes=large, host_bytes=none))
    two_prompts = Size(num_bytes=700 * roomy.cache.kv_pool.geometry.token_bytes)
    expected, _ = answers(roomy)
    swapped, num_host = answers(build(CacheConfig(device_bytes=two_prompts, host_bytes=large)))

    assert swapped == expected
    assert num_host > 0
