"""KV of 8 bits beside plain KV: attention, every copy of its blocks, disk, host and identity."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.kv_pool import (
    CodedFormat,
    KvFormat,
    KvGeometry,
    KvPool,
    LayerGeometry,
    PlainFormat,
)
from kvchat.cache.tier import Layout, Tier
from kvchat.core.config import CacheConfig
from kvchat.core.parameters import KV_CODES
from kvchat.engine.engine import Engine
from kvchat.engine.kv_storage import kv_geometry, kv_identity
from kvchat.engine.runner import Runner
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.kv_code import CODES, INT8
from kvchat_kernels.paged_attention import Scoring
from support.cached_contexts import images_of
from support.chains import new_chain
from support.greedy_answer import greedy_answer
from support.paged_scene import load_tiny
from support.specimens import random_ids

CPU = torch.device("cpu")
BLOCK = 8
MIXED = (LayerGeometry(2, 16, 16), LayerGeometry(1, 48, 16))
FORMATS = [PlainFormat(), *map(CodedFormat, CODES.values())]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("m"))


def geometry_of(loaded: LoadedModel, kv_format: KvFormat) -> KvGeometry:
    plain = kv_geometry(loaded.spec, CacheConfig(block_size=BLOCK), loaded.dtype)
    return replace(plain, format=kv_format)


def engine_over(
    loaded: LoadedModel, kv_format: KvFormat, open_tier: Callable[[], Tier] | None = None
) -> Engine:
    cache = CacheManager(KvPool(geometry_of(loaded, kv_format), 60, CPU))
    return Engine(
        runner=Runner(PagedModel(loaded, cache.kv_pool.layers), BLOCK),
        cache=cache,
        max_context=loaded.max_context,
        max_step_tokens=64,
        max_running=4,
        vocab_size=loaded.spec.vocab_size,
        chain=new_chain(cache, open_tier),
    )


def filled_manager(kv_format: KvFormat, num_tokens: int) -> tuple[CacheManager, list[int]]:
    """Return a manager that holds a context whose KV is random."""
    manager = CacheManager(KvPool(KvGeometry(MIXED, torch.float32, BLOCK, kv_format), 12, CPU))
    ids = random_ids(num_tokens, seed=0)
    table = manager.match(ids)
    assert manager.reserve(table, 0, num_tokens)
    slots = torch.tensor(table.slots(0, num_tokens))
    for layer, shape in zip(manager.kv_pool.layers, MIXED, strict=True):
        key = torch.randn(num_tokens, shape.num_kv_heads, shape.key_dim)
        layer.write(key, torch.randn(num_tokens, shape.num_kv_heads, shape.value_dim), slots)
    manager.release(table, ids)
    return manager, ids


def test_attention_over_eight_bits_is_that_over_plain_kv_but_for_rounding() -> None:
    torch.manual_seed(0)
    layer, blocks, num_tokens = LayerGeometry(2, 16, 24), (3, 1, 4), 3 * BLOCK - 2
    piece = SequencePiece([0, 0], num_tokens - 2, blocks, 1)
    sequences = build_batch([piece], BLOCK, CPU).sequences
    slots = torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_tokens)])
    key, value = torch.randn(num_tokens, 2, 16), torch.randn(num_tokens, 2, 24)
    query, results = torch.randn(2, 4, 16), []
    for kv_format in FORMATS[:2]:
        geometry = KvGeometry((layer,), torch.float32, BLOCK, kv_format)
        [kv] = KvPool(geometry, 6, CPU).layers
        kv.write(key, value, slots)
        results.append(kv.attend(query, sequences, Scoring(0.25)))

    off = (results[0] - results[1]).abs().max()
    # Half a step of the largest value, and scores that are off by as much of the largest key.
    score_error = 0.25 * float(query.abs().sum(dim=2).max() * key.abs().max()) / 254
    assert 0 < off < float(value.abs().max()) * (1 / 254 + math.expm1(2 * score_error))
    assert off < 0.05


@pytest.mark.parametrize("kv_format", FORMATS, ids=["plain", *CODES])
def test_what_a_format_says_of_its_bytes_and_numbers_holds(kv_format: KvFormat) -> None:
    torch.manual_seed(0)
    manager, ids = filled_manager(kv_format, 2 * BLOCK)
    pool, [first, second] = manager.kv_pool, manager._tree.blocks_of(encode_ids(ids))

    assert len(pool.gather([first])) == pool.geometry.block_bytes
    assert pool.num_finite([first, second]) == 2
    assert not pool.kv_error(first, first, 3)[:, :2].any()
    pool.copy_block(second, first)
    assert bytes(pool.gather([first])) == bytes(pool.gather([second]))
    pool.zero(second, 3)
    assert pool.kv_error(first, second, 2)[:, 0].max() == 0
    assert pool.kv_error(first, second, 3)[:, 0].min() > 0
    pool.layers[-1].tensors[-1][second, 1] = float("nan")
    assert pool.num_finite([first, second]) == 1
    assert pool.is_finite(second, 1)
    assert not pool.is_finite(second, 2)


@pytest.mark.parametrize("kv_format", FORMATS, ids=["plain", *CODES])
def test_blocks_go_down_to_host_memory_and_come_up_the_same(kv_format: KvFormat) -> None:
    torch.manual_seed(0)
    manager, ids = filled_manager(kv_format, 4 * BLOCK)
    chain = new_chain(manager, num_host_blocks=8)
    before = images_of(manager, ids, 0, 4)

    manager.evict_cold(4)
    assert manager.export(ids, 0, 4) is None
    arrival = chain.arrivals.begin([*ids, 0])
    assert arrival is not None
    while chain.arrivals.settle_one(arrival):
        chain.arrivals.wait_for_news()

    assert before
    assert images_of(manager, ids, 0, 4) == before
    manager.check([])
    chain.check()
    chain.close()


@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
def test_a_conversation_over_a_code_is_restored_from_the_disk(code, loaded, tmp_path):
    kv_format, prompt = CodedFormat(code), random_ids(5 * BLOCK + 3, seed=0)
    geometry = geometry_of(loaded, kv_format)
    layout = Layout(kv_identity(loaded, geometry, "content"), BLOCK, geometry.block_bytes)

    def open_tier() -> Tier:
        return DiskTier(tmp_path, layout, 64 << 20, 0)

    first = engine_over(loaded, kv_format, open_tier)
    answer, cached = greedy_answer(first, prompt, 12)
    images = images_of(first.cache, prompt, 0, 5)
    first.close()
    assert cached.disk == 0
    second = engine_over(loaded, kv_format, open_tier)
    again, cached = greedy_answer(second, prompt, 12)

    assert again == answer
    assert cached.disk == 5 * BLOCK
    assert images_of(second.cache, prompt, 0, 5) == images != b""
    second.cache.check([])
    second.close()
    if code == INT8:  # with fewer bits a model of random weights has another likeliest token
        assert answer[0] == greedy_answer(engine_over(loaded, PlainFormat()), prompt, 1)[0][0]


def test_the_codes_are_those_of_the_setting() -> None:
    assert tuple(CODES) == KV_CODES


def test_kv_of_another_format_is_not_found(loaded: LoadedModel) -> None:
    """Of the same size it would be read as what it is not."""
    plain = geometry_of(loaded, PlainFormat())
    other = replace(plain, format=CodedFormat(replace(INT8, stored_name="int8, another scale")))

    own = [replace(plain, format=CodedFormat(code)) for code in CODES.values()]
    every = (plain, other, *own)
    identities = {kv_identity(loaded, geometry, "content") for geometry in every}

    assert len(identities) == len(every)
