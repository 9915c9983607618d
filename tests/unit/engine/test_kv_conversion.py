"""KV of more bits serves a chat of fewer: it is read once, converted and verified."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.lookup import KvSettings
from kvchat.cache.disk.model_dirs import find_model_dirs
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids
from kvchat.cache.kv_conversion import ConvertingTier, convert
from kvchat.cache.kv_pool import CodedFormat, KvGeometry, KvPool, LayerGeometry, PlainFormat
from kvchat.cache.state_manager import state_blocks
from kvchat.cache.tier import PackHead
from kvchat.chat.why import Change, Reuse, explain
from kvchat.core.config import CacheConfig
from kvchat.core.stats import TierStatus
from kvchat.core.text import Size
from kvchat.core.types import CachedTokens
from kvchat.engine import kv_verifier
from kvchat.engine.kv_storage import finer_geometries
from kvchat.terminal.cache_lines import tier_lines
from kvchat_kernels.kv_code import CODES, INT4, INT8, K8V4, KvCode
from support.assembled import assemble
from support.checkpoints import save_checkpoint, tiny_model
from support.fact_memory import FactMemory
from support.greedy_answer import greedy_answer
from support.memory_tier import MemoryTier

CPU = torch.device("cpu")
LAYERS = (LayerGeometry(2, 16, 16), LayerGeometry(1, 48, 16))
PROMPT = tuple(range(5, 55))
NUM_STORED = 48


def geometry(code: KvCode | None, dtype: torch.dtype = torch.bfloat16) -> KvGeometry:
    return KvGeometry(LAYERS, dtype, 8, CodedFormat(code) if code else PlainFormat())


def images(code: KvCode | None) -> torch.Tensor:
    """Two blocks of the same random KV, [2, block_bytes], as a pool with this code has them."""
    random = torch.Generator().manual_seed(0)
    pool = KvPool(geometry(code), 2, CPU)
    for layer, shape in zip(pool.layers, LAYERS, strict=True):
        sides = (
            torch.randn(16, shape.num_kv_heads, dim, generator=random).bfloat16()
            for dim in (shape.key_dim, shape.value_dim)
        )
        layer.write(*sides, torch.arange(16))
    return pool.stage([0, 1])


@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
def test_converted_kv_has_the_bytes_that_a_pool_writes(code: KvCode) -> None:
    assert torch.equal(convert(images(None), geometry(None), geometry(code)), images(code))


def test_what_has_the_same_code_keeps_its_bytes() -> None:
    """Rounded twice it would be off twice."""
    own, kept = images(INT8), images(K8V4)
    assert torch.equal(convert(own, geometry(INT8), geometry(INT8)), own)

    found = convert(own, geometry(INT8), geometry(K8V4))

    keys = 8 * 2 * (16 + 2)
    assert torch.equal(found[:, :keys], kept[:, :keys])
    fewer = convert(kept, geometry(K8V4), geometry(INT4))
    values = 8 * 2 * (16 // 2 + 2)
    assert torch.equal(fewer[:, values : 2 * values], kept[:, keys : keys + values])
    target = geometry(INT4)
    both = zip(
        target.format.read(convert(own, geometry(INT8), target), target),
        target.format.read(images(INT4), target),
        strict=True,
    )
    # A step of 4 bits, where 8 bits have rounded to the other side of a middle.
    assert all((one - other).abs().max() < 0.2 * other.abs().max() for one, other in both)


def test_layers_that_a_block_lacks_are_lacking_after_it() -> None:
    own = images(None)
    start = geometry(None).format.block_bytes(LAYERS[0], geometry(None))
    own[1, start:] = 0xFF

    found = convert(own, geometry(None), geometry(INT8))

    start = geometry(INT8).format.block_bytes(LAYERS[0], geometry(INT8))
    assert (found[1, start:] == 0xFF).all()
    assert not (found[1, :start] == 0xFF).all()
    assert torch.equal(found[0], images(INT8)[0])


STATE_BYTES = 5000


@pytest.mark.parametrize("max_found", [1, 2, 9], ids=["by block", "beside KV", "in one pack"])
def test_a_snapshot_is_brought_into_blocks_of_the_other_size(max_found: int) -> None:
    """However the packs of more bits are cut; all KV before it is converted as ever."""
    source, target = geometry(None), geometry(INT4)
    num_stored, num_own = (state_blocks(each, STATE_BYTES) for each in (source, target))
    assert (num_stored, num_own) == (3, 8)
    stored = MemoryTier(8, source.block_bytes)
    context = images(None)[[0, 1, 0]]
    state = torch.randint(0, 256, (STATE_BYTES,), dtype=torch.uint8)
    padded = torch.zeros(num_stored * source.block_bytes, dtype=torch.uint8)
    padded[:STATE_BYTES] = state
    encoded = context_with_snapshot(num_stored)
    image = torch.cat([context.view(-1), padded]).numpy().tobytes()
    stored.write(PackHead(stored.root, encoded), memoryview(image))
    stored.max_found = max_found
    tier = ConvertingTier(stored, source, target, STATE_BYTES)
    ids = context_with_snapshot(num_own)
    keys = chain_keys(tier.root, ids, 8 * TOKEN_BYTES)

    runs = tier.find(keys, ids)

    assert [run.start_block for run in runs] == [0, *(run.end_block for run in runs[:-1])]
    assert runs[-1].end_block == len(keys) == 3 + num_own
    found = b"".join(bytes(tier.read(run)) for run in runs)  # type: ignore[arg-type]
    own = 3 * target.block_bytes
    assert found[:own] == convert(context, source, target).numpy().tobytes()
    assert found[own:] == state.numpy().tobytes() + bytes(len(found) - own - STATE_BYTES)
    assert tier.peek(keys[:4], ids) == 4, "whether there is a snapshot is asked by its first block"

    del stored.blocks[chain_keys(tier.root, encoded, 8 * TOKEN_BYTES)[-1]]

    assert all(run.end_block <= 3 for run in tier.find(keys, ids)), "a part of it is none"


def context_with_snapshot(num_blocks: int) -> bytes:
    """Return the ids of three blocks of tokens and a snapshot of so many."""
    state = [-2 - number for number in range(num_blocks) for _ in range(8)]
    return encode_ids([*range(24), *state])


def test_fewer_bits_never_serve_more() -> None:
    assert finer_geometries(geometry(None)) == {}
    assert list(finer_geometries(geometry(INT8))) == ["bfloat16"]
    assert list(finer_geometries(geometry(INT4))) == ["bfloat16", "int8", "fp8", "k8v4"]


class Program:
    """Lives of the program, one after another, over one store; a model with a window."""

    def __init__(self, directory: Path) -> None:
        model = tiny_model("gemma2", sliding_window=8)
        self._model = save_checkpoint(directory / "m", model)
        self.store = directory / "kv"
        self.memory = FactMemory()

    def answer(self, kv_dtype: str) -> tuple[CachedTokens, list[int]]:
        """Ask with KV of a dtype; return what was cached of the prompt, and the answer."""
        cache = CacheConfig(
            device_bytes=Size(num_bytes=1 << 20),
            kv_dtype=kv_dtype,
            disk_bytes=Size(num_bytes=16 << 20),
            directory=self.store,
        )
        engine = assemble(self._model, cache=cache, memory=self.memory).engine
        assert engine.chain.flush(60.0)
        answer, cached = greedy_answer(engine, list(PROMPT), 4)
        assert engine.chain.flush(60.0)
        engine.close()
        return cached, answer


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")  # random weights change their minds
    return Program(tmp_path)


def test_a_chat_of_fewer_bits_goes_on_with_what_more_bits_have_kept(program: Program) -> None:
    _, own = program.answer("auto")

    assert program.answer("int8") == (CachedTokens(others=(("disk as float32", NUM_STORED),)), own)
    assert program.answer("int8")[0] == CachedTokens(disk=NUM_STORED), "converted once"
    assert program.answer("k8v4")[0].total == NUM_STORED
    assert program.answer("k8v4")[0] == CachedTokens(disk=NUM_STORED)


def test_what_was_converted_is_told() -> None:
    tier = TierStatus("disk as float32")
    assert tier_lines(tier) == []
    assert tier_lines(replace(tier, bytes_read=1 << 20)) == [
        "disk as float32: 1 MiB read, and converted to this chat's KV"
    ]
    reuse = Reuse((1,) * 50, (), Change.NEW, CachedTokens(others=(("disk as float32", 48),)))
    assert explain(reuse, str)[:2] == [
        "48 of 50 tokens were there (48 disk as float32).",
        "48 were kept in float32; converted, they are kept in fewer bits too.",
    ]


def test_a_chat_of_more_bits_reads_its_context_itself(program: Program) -> None:
    program.answer("int8")

    assert program.answer("auto")[0].total == 0


def test_what_is_forgotten_is_forgotten_in_more_bits_too(program: Program) -> None:
    program.answer("auto")
    StoreAdmin(program.store).forget([(*PROMPT, 1)], [])

    assert program.answer("int8")[0].total == 0


def test_a_damaged_record_is_read_by_no_chat(program: Program) -> None:
    program.answer("auto")
    [own] = find_model_dirs(program.store)
    for path in own.glob("*.db*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
        path.write_bytes(data)

    cached, answer = program.answer("int8")

    assert cached.total == 0
    assert len(answer) == 4


def test_kv_that_is_not_this_models_is_found_and_stays_for_its_own_chat(program, monkeypatch):
    """It may be right in its own format: another version may convert otherwise."""
    program.answer("auto")
    monkeypatch.setattr(
        kv_verifier, "tolerance", lambda *_: kv_verifier.Tolerance(0.0, kv_verifier.Deviation())
    )
    cached, _ = program.answer("int8")
    monkeypatch.undo()

    assert cached.total == 0
    assert program.answer("auto")[0].disk == NUM_STORED


def test_a_list_of_conversations_promises_what_can_be_converted(program: Program) -> None:
    program.answer("auto")

    def kept(kv_dtype: str) -> int:
        settings = KvSettings(kv_dtype=kv_dtype, dtype="float32")
        admin = StoreAdmin(program.store, memory=program.memory, settings=settings)
        [places] = admin.locate([("", PROMPT)])
        return places.cached.disk

    assert (kept("auto"), kept("int8"), kept("int4"), kept("bfloat16")) == (48, 48, 48, 0)
