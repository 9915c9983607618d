"""An engine built from settings: sizes follow the budget, and every mixture of dtypes runs."""

import gc
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KvSettings
from kvchat.cache.disk.model_dirs import find_model_dirs
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, EngineConfig
from kvchat.core.errors import ModelError
from kvchat.core.events import LoadProgress
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, Memory, MissReason
from kvchat.engine import kv_storage
from kvchat.engine.assembly import (
    AssembledEngine,
    engine_around,
    most_step_tokens,
    prefill_tokens,
    step_tokens,
)
from kvchat.engine.engine import Engine
from kvchat.engine.kv_storage import device_budget, host_budget
from kvchat.engine.tiers import rate_memory
from kvchat.model import loader
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import StatefulModel
from kvchat.model.state import state_bytes
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.kv_code import CODES
from support.assembled import MEBIBYTE, assemble
from support.checkpoints import save_checkpoint, tiny_model
from support.every_type import every_config, every_model
from support.fact_memory import FactMemory
from support.greedy_answer import greedy_answer
from support.matrix import spread
from support.pack_chains import used_bytes
from support.stateful_models import STATEFUL, load_stateful, open_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("m"), tiny_model("gemma2", sliding_window=8))


def generate(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    return greedy_answer(engine, list(prompt), count)[0]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    spread(
        product(("float32", "bfloat16", "float16"), ("auto", "float32", "bfloat16", "float16")),
        [("float32", "bfloat16"), ("bfloat16", "auto"), ("float16", "float32")],
    ),
)
def test_every_mixture_of_dtypes_runs_and_agrees_roughly(checkpoint, dtype, kv_dtype):
    cache = CacheConfig(device_bytes=Size(num_bytes=MEBIBYTE), kv_dtype=kv_dtype)
    built = assemble(checkpoint, dtype, cache)
    prompt = tuple(range(5, 45))

    first = generate(built.engine, prompt, 4)
    again = generate(built.engine, prompt, 4)

    pool = built.engine.cache.kv_pool
    expected = dtype if kv_dtype == "auto" else kv_dtype
    assert str(pool.layers[0][0].dtype) == f"torch.{expected}"
    assert built.ready.dtype == dtype
    assert len(first) == len(again) == 4
    assert first[0] == generate(assemble(checkpoint).engine, prompt, 1)[0]
    assert all(torch.isfinite(tensor).all() for pair in pool.layers for tensor in pair)


@pytest.mark.parametrize(
    ("dtype", "code"),
    spread(
        [
            *((dtype, "int8") for dtype in ("float32", "bfloat16", "float16")),
            *(("bfloat16", code) for code in ("k8v4", "int4")),
        ],
        [("float32", "int8"), ("bfloat16", "k8v4")],
    ),
)
def test_coded_kv_runs_with_every_dtype_and_agrees_roughly(checkpoint, dtype, code):
    cache = CacheConfig(device_bytes=Size(num_bytes=MEBIBYTE), kv_dtype=code)
    built, prompt = assemble(checkpoint, dtype, cache), tuple(range(5, 45))

    first = generate(built.engine, prompt, 4)

    assert isinstance(built.engine.cache.kv_pool.layers[0], CodedKv)
    assert len(first) == len(generate(built.engine, prompt, 4)) == 4
    if code == "int8":  # with fewer bits a model of random weights has another likeliest token
        assert first[0] == generate(assemble(checkpoint).engine, prompt, 1)[0]


def test_coded_kv_has_more_tokens_in_the_same_memory(checkpoint: Path) -> None:
    """The heads of this model are of 16: 18 bytes for 16 numbers of 8 bits, 10 for those of 4."""

    def num_blocks(kv_dtype: str) -> int:
        cache = CacheConfig(device_bytes=Size(num_bytes=MEBIBYTE), kv_dtype=kv_dtype)
        return assemble(checkpoint, "bfloat16", cache).engine.cache.kv_pool.num_blocks

    plain = num_blocks("bfloat16")
    assert num_blocks("int8") == pytest.approx(plain * 32 / 18, abs=2)
    assert num_blocks("k8v4") == pytest.approx(plain * 64 / 28, abs=2)
    assert num_blocks("int4") == pytest.approx(plain * 32 / 10, abs=2)


@pytest.fixture
def unread_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read: a large model's take minutes, and its configuration is enough."""

    def read(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loader, "_read_weights", read)


def test_a_model_without_kv_is_refused_a_code_before_its_weights_are_read(tmp_path, unread_weights):
    directory = tmp_path / "model"
    every_model(every_config("mamba")).save_pretrained(directory)

    with pytest.raises(ModelError, match="it has no attention, and so no KV") as caught:
        assemble(directory, cache=CacheConfig(kv_dtype="int8"))

    assert caught.value.hint == "Use --kv-dtype auto."


def test_an_engine_around_a_loaded_model_refuses_heads_that_a_code_does_not_take(tmp_path):
    loaded = assemble(save_checkpoint(tmp_path, tiny_model("llama", head_dim=24))).loaded

    with pytest.raises(ModelError, match="its heads of 24 numbers are no multiple of 16") as caught:
        engine_around(loaded, CacheConfig(kv_dtype="int4"), EngineConfig(), NO_MEMORY)

    assert caught.value.hint == "Use --kv-dtype int8."


STORED = tuple(range(5, 45))


def ended(
    checkpoint: Path, store: Path, kv_dtype: str = "auto", memory: Memory = NO_MEMORY
) -> AssembledEngine:
    """Return an engine that has ended, after it stored a context's KV."""
    some, room = Size(num_bytes=MEBIBYTE), Size(num_bytes=16 * MEBIBYTE)
    cache = CacheConfig(device_bytes=some, kv_dtype=kv_dtype, disk_bytes=room, directory=store)
    built = assemble(checkpoint, cache=cache, memory=memory)
    generate(built.engine, STORED, 4)
    built.engine.close()
    return built


@pytest.mark.parametrize(
    ("kv_dtype", "named"), [("auto", ""), ("float32", ""), ("float16", "float16"), ("int8", "int8")]
)
def test_the_dtype_of_kv_is_told_where_it_is_not_the_models(
    kv_dtype: str, named: str, checkpoint: Path, tmp_path: Path, memory: FactMemory
) -> None:
    store = tmp_path / "kv"
    built = ended(checkpoint, store, kv_dtype, memory)

    assert built.ready.kv_dtype == built.engine.status().kv_dtype == named
    [found] = StoreAdmin(store, memory=memory).status().model_dirs
    assert (found.model, found.kv_dtype) == (str(checkpoint), named)


def test_kv_of_another_dtype_is_not_promised_before_the_model_is_loaded(
    checkpoint: Path, tmp_path: Path, memory: FactMemory
) -> None:
    """A list of conversations said that one is ready, and the chat read all of it again."""
    store = tmp_path / "kv"
    ended(checkpoint, store, "int8", memory)

    def kept(kv_dtype: str) -> int:
        admin = StoreAdmin(store, memory=memory, settings=KvSettings(kv_dtype=kv_dtype))
        [places] = admin.locate([(str(checkpoint), STORED)])
        return places.cached.disk

    assert kept("int8") == 32
    assert kept("auto") == kept("float16") == 0
    why = StoreAdmin(store, memory=memory).why(str(checkpoint), STORED)
    assert why is MissReason.OTHER_KV


@pytest.mark.parametrize("block_size", spread([1, 8, 64], [8]))
def test_the_budget_is_never_exceeded_and_nearly_used(checkpoint: Path, block_size: int) -> None:
    for num_bytes in (100_000, 123_456, MEBIBYTE):
        cache = CacheConfig(block_size, Size(num_bytes=num_bytes), kv_dtype="float32")
        pool = assemble(checkpoint, cache=cache).engine.cache.kv_pool

        held = sum(tensor.nbytes for pair in pool.layers for tensor in pair)
        assert held <= num_bytes
        assert num_bytes - held < pool.geometry.block_bytes


@pytest.mark.parametrize("whole_windows", [True, False])
@pytest.mark.parametrize("kv_dtype", ["float32", *CODES])
def test_kv_holds_the_memory_that_it_promised(checkpoint, kv_dtype, whole_windows, monkeypatch):
    """Within 2 %: whole, in windows, and in fewer bits."""
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")
    room = Size(num_bytes=MEBIBYTE)
    cache = CacheConfig(8, room, kv_dtype=kv_dtype, whole_windows=whole_windows)
    pool = assemble(checkpoint, cache=cache).engine.cache.kv_pool

    held = sum(tensor.nbytes for layer in pool.layers for tensor in layer.tensors)

    assert 0.98 * MEBIBYTE < held <= MEBIBYTE
    assert isinstance(pool, WindowedKvPool) is not whole_windows


HYBRIDS = [
    (name, kv_dtype)
    for name, codes in {
        "qwen3_5, compiled": ["float32", "int8", "int4"],
        "lfm3, windows": ["float32", "int8", "int4"],
        "mamba2, no attention": ["float32"],
    }.items()
    if name in STATEFUL
    for kv_dtype in codes
]


@pytest.mark.parametrize(
    ("name", "kv_dtype"), spread(HYBRIDS, [x for x in HYBRIDS if x[1] == "float32"])
)
def test_a_running_chat_of_a_hybrid_holds_the_memory_that_was_promised(
    name: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %, with its states: the pool once took all of the budget, and they stood beside."""
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")
    # Those of tests before, which stay while this one counts.
    others = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    are_others = set(map(id, others))
    _, loaded = load_stateful(name, tmp_path)
    engine = open_engine(loaded, None, MEBIBYTE, step_tokens=24, kv_dtype=kv_dtype)
    pool, state_size = engine.cache.kv_pool, state_bytes(loaded.spec.state, loaded.dtype)
    size = -(-state_size // pool.geometry.block_bytes) * pool.geometry.block_bytes
    forward, num_states = StatefulModel.forward_pieces, list[int]()

    def is_state(thing: object) -> bool:
        return (
            isinstance(thing, torch.Tensor)
            and id(thing) not in are_others
            and thing.dtype == torch.uint8
            and thing.shape == (size,)
        )

    def watched(*arguments: Any) -> torch.Tensor:
        num_states.append(sum(map(is_state, gc.get_objects())))
        return forward(*arguments)

    monkeypatch.setattr(StatefulModel, "forward_pieces", watched)
    generate(engine, tuple(range(5, 165)), 30)

    held = sum(tensor.nbytes for layer in pool.layers for tensor in layer.tensors)
    assert max(num_states) == 3
    assert 0.98 * MEBIBYTE < held + 3 * size < 1.02 * MEBIBYTE
    assert isinstance(pool, WindowedKvPool) is ("windows" in name)


def test_the_context_is_what_model_settings_and_cache_allow(checkpoint: Path) -> None:
    assert assemble(checkpoint).ready.context_limit == 512
    limited = assemble(checkpoint, engine=EngineConfig(max_context=100))
    assert limited.ready.context_limit == 100
    assert limited.loaded.max_context == 100
    tight = assemble(checkpoint, cache=CacheConfig(8, Size(num_bytes=40_000)))
    status = tight.engine.status()
    assert tight.ready.context_limit == status.num_blocks * 8 < 512
    assert tight.loaded.max_context == 512


def test_a_share_is_of_the_memory_that_is_free() -> None:
    config = CacheConfig(device_bytes=Size(share=0.5))
    half = device_budget(config, torch.device("cpu"))

    assert half > device_budget(CacheConfig(), torch.device("cpu")) > 0


def test_host_memory_is_a_tier_beside_a_gpu_and_elsewhere_where_it_is_asked_for(checkpoint):
    some = Size(num_bytes=MEBIBYTE)
    assert host_budget(CacheConfig(), torch.device("cpu")) == 0
    assert 0 < host_budget(CacheConfig(), torch.device("cuda")) <= 16 << 30
    assert host_budget(CacheConfig(host_bytes=some), torch.device("cpu")) == MEBIBYTE
    without = assemble(checkpoint).engine
    asked = assemble(checkpoint, cache=CacheConfig(device_bytes=some, host_bytes=some)).engine
    cold = CacheConfig(device_bytes=some, host_bytes=some, reuse=False)

    status = asked.status().tier("host")
    assert status is not None
    assert status.limit_bytes == MEBIBYTE
    assert without.status().tier("host") is None
    assert assemble(checkpoint, cache=cold).engine.status().tier("host") is None
    asked.close()


def test_steps_are_short_for_large_models_and_bounded_for_small_ones(checkpoint: Path) -> None:
    from dataclasses import replace

    spec = assemble(checkpoint).loaded.spec
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    sizes = [replace(spec, num_parameters=count) for count in (1, 10**8, 10**9, 10**11)]

    assert [step_tokens(size, cpu) for size in sizes] == [512, 256, 32, 16]
    # On a GPU what a tenth of a second takes there; every GPU once took 4,096 tokens at once.
    rates = (None, 100.0, 2_900.0, 12_000.0, 30_000.0, 1e6)
    found = [step_tokens(spec, cuda, rate) for rate in rates]
    assert found == [1024, 256, 256, 1024, 2048, 4096]


def test_windows_have_room_for_the_largest_step_that_any_rate_allows(checkpoint, monkeypatch):
    """The rate is known only when the pools are there."""
    loaded = assemble(checkpoint).loaded
    on_gpu = replace(loaded, device=torch.device("cuda", 0))
    monkeypatch.setattr(kv_storage, "free_bytes", lambda device: 1 << 40)

    def most(loaded: LoadedModel, **settings: object) -> int:
        room = CacheConfig(device_bytes=Size(num_bytes=2 * MEBIBYTE), **settings)  # type: ignore[arg-type]
        return most_step_tokens(loaded, short, room)

    short = step_tokens(loaded.spec, loaded.device)
    assert most(on_gpu, whole_windows=True) == 4096
    assert most(on_gpu) == 2048, "all tokens of a step have window blocks, which have a third"
    assert most(loaded) == prefill_tokens(loaded, short)


def test_loading_is_told_stage_by_stage(checkpoint: Path) -> None:
    heard: list[LoadProgress] = []
    assemble(checkpoint, "auto", hear=heard.append)

    stages = list(dict.fromkeys(event.stage for event in heard))
    assert stages == [
        "reading the model's configuration",
        "loading weights",
        "checking the paged forward pass",
    ]


def test_without_reuse_nothing_is_cached(checkpoint: Path) -> None:
    cache = CacheConfig(device_bytes=Size(num_bytes=MEBIBYTE), reuse=False)
    engine = assemble(checkpoint, cache=cache).engine
    prompt = tuple(range(40))

    assert generate(engine, prompt, 5) == generate(engine, prompt, 5)
    assert engine.status().num_cached == 0
    assert engine.status().num_tokens_computed == 2 * (40 + 4)


def test_how_fast_copies_are_is_known_to_the_next_engine(checkpoint, memory):
    some = Size(num_bytes=MEBIBYTE)
    config = CacheConfig(device_bytes=some, host_bytes=some)
    first = assemble(checkpoint, cache=config, memory=memory).engine
    first.chain.planner.note_copy("from host", 1 << 30, 1.0)
    first.close()

    second = assemble(checkpoint, cache=config, memory=memory).engine

    assert second.chain.planner.rates["from host"] == 1 << 30


def test_rates_of_one_gpu_are_not_anothers(checkpoint, monkeypatch, memory):
    """What one GPU had shown was believed of the next one in the same machine."""
    loaded = replace(assemble(checkpoint).loaded, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small GPU")
    rate_memory(loaded, memory).write({"prefill": 500.0})
    assert rate_memory(loaded, memory).read() == {"prefill": 500.0}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Large GPU")

    assert rate_memory(loaded, memory).read() == {}


def test_where_not_even_a_block_may_be_kept_nothing_is_and_that_is_said(checkpoint, tmp_path):
    """The tables of an empty store were more than a limit of a few kilobytes allows."""
    directory, some = tmp_path / "kv", Size(num_bytes=MEBIBYTE)
    prompt = tuple(range(40))
    kept = CacheConfig(device_bytes=some, directory=directory, disk_bytes=Size(num_bytes=1 << 24))
    before = assemble(checkpoint, cache=kept).engine
    expected = generate(before, prompt, 5)
    before.close()
    assert find_model_dirs(directory)

    config = CacheConfig(device_bytes=some, directory=directory, disk_bytes=Size(num_bytes=50_000))
    engine = assemble(checkpoint, cache=config).engine

    assert generate(engine, prompt, 5) == expected
    assert engine.chain.flush(60.0)
    status = engine.status().tier("disk")
    engine.close()
    assert status is not None
    assert "--disk-cache allows only 48.8 KiB, too little for KV" in status.trouble
    assert used_bytes(directory) < 50_000


def test_a_disk_that_is_full_for_the_moment_costs_nothing_that_is_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default limit is a share of what is free: where that fell below a block all KV
    was deleted, pins included, and a limit was blamed that the user had not set.
    """
    directory, some = tmp_path / "kv", Size(num_bytes=MEBIBYTE)
    prompt = tuple(range(40))
    kept = CacheConfig(device_bytes=some, directory=directory, disk_bytes=Size(num_bytes=1 << 24))
    before = assemble(checkpoint, cache=kept).engine
    expected = generate(before, prompt, 5)
    before.close()
    num_tokens = StoreAdmin(directory).status().num_tokens
    assert num_tokens > 0

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    engine = assemble(checkpoint, cache=CacheConfig(device_bytes=some, directory=directory)).engine

    assert generate(engine, prompt, 5) == expected
    assert engine.chain.flush(60.0)
    status = engine.status().tier("disk")
    engine.close()
    assert status is not None
    assert "There is no free space for KV" in status.trouble
    assert StoreAdmin(directory).status().num_tokens == num_tokens
