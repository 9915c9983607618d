"""What KV in a code changes is measured once, said in one sentence, and refused if it is much."""

from collections.abc import Iterator

import pytest
import torch

from kvchat.cache.kv_pool import KvGeometry
from kvchat.cache.state_manager import state_blocks
from kvchat.core.config import CacheConfig
from kvchat.core.errors import ModelError
from kvchat.core.text import Size
from kvchat.engine import kv_choice
from kvchat.engine.kv_choice import KvChoice, chosen_kv, kv_notes
from kvchat.engine.kv_storage import kv_geometry
from kvchat.model.loader import LoadedModel
from kvchat.model.rounding import Effect, effect_of
from kvchat.model.state import state_bytes
from support.fact_memory import FactMemory
from support.paged_scene import load_tiny
from support.stateful_models import load_stateful

IDS = [7, 5, 9, 11] * 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny("llama", tmp_path_factory.mktemp("m"))


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has no tokenizer."""
    monkeypatch.setattr(kv_choice, "sample_ids", lambda source, count: IDS[:count])


def notes(loaded: LoadedModel, code: str, memory: FactMemory) -> tuple[str, ...]:
    geometry = kv_geometry(loaded.spec, CacheConfig(16, kv_dtype=code), loaded.dtype)
    return kv_notes(loaded, geometry, memory)


def test_what_a_code_changes_is_measured_once(loaded, memory, monkeypatch):
    [first] = notes(loaded, "int4", memory)
    monkeypatch.setattr(kv_choice, "_predictions", None)

    assert first.startswith("KV in int4 changes ")
    assert "of 80 likeliest tokens (KL " in first
    assert notes(loaded, "int4", memory) == (first,)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_stateful("lfm2", tmp_path_factory.mktemp("h"))[1]


def test_a_model_with_recurrent_state_is_measured_over_both(hybrid, memory):
    [note] = notes(hybrid, "int8", memory)
    [effect] = map(effect_of, memory.facts("kv_effect"))

    assert note.startswith("KV in int8 changes ")
    assert effect is not None
    assert 0 < effect.divergence < 0.001, "the state is that of the text, in both"


def test_auto_leaves_room_for_states(hybrid: LoadedModel, memory: FactMemory) -> None:
    plain = kv_geometry(hybrid.spec, CacheConfig(16), hybrid.dtype)
    size = state_bytes(hybrid.spec.state, hybrid.dtype)
    needed = 100 * plain.token_bytes + (2 + state_blocks(plain, size)) * plain.block_bytes
    needed += 3 * size  # of the running sequence

    def chosen(num_bytes: int) -> str:
        config = CacheConfig(16, Size(num_bytes=num_bytes))
        return chosen_kv(hybrid, config, 100, memory).config.kv_dtype

    assert chosen(needed) == "auto"
    assert chosen(needed - plain.token_bytes) == "int8"


def test_nothing_is_measured_of_plain_kv(loaded, memory, monkeypatch):
    monkeypatch.setattr(kv_choice, "_predictions", None)

    assert notes(loaded, "auto", memory) == ()


def choose(
    loaded: LoadedModel, memory: FactMemory, num_tokens: int, wanted: int | None = 100, **of: str
) -> KvChoice:
    """Choose with memory for so many tokens of plain KV."""
    plain = kv_geometry(loaded.spec, CacheConfig(16), loaded.dtype)
    room = Size(num_bytes=num_tokens * plain.token_bytes)
    return chosen_kv(loaded, CacheConfig(16, room, **of), wanted, memory)


def test_auto_takes_fewer_bits_only_where_the_context_does_not_fit(loaded, memory):
    assert choose(loaded, memory, 140) == KvChoice(CacheConfig(16, Size(num_bytes=140 * 512)))
    assert choose(loaded, memory, 90, wanted=50).config.kv_dtype == "auto"
    assert choose(loaded, memory, 90, kv_dtype="float32").config.kv_dtype == "float32"

    choice = choose(loaded, memory, 90)

    assert choice.config.kv_dtype == "int8"
    assert choice.reason == "KV is kept in int8, as 100 tokens in float32 take more than 45 KiB."
    geometry = kv_geometry(loaded.spec, choice.config, loaded.dtype)
    [note] = kv_notes(loaded, geometry, memory, choice.reason)
    assert note.startswith(f"{choice.reason} KV in int8 changes ")


def test_auto_takes_no_code_that_changes_the_model_and_none_that_was_not_measured(
    loaded: LoadedModel, memory: FactMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"int8": 0.001, "k8v4": 0.05, "int4": 0.02}

    def effect(_: object, geometry: KvGeometry, __: object) -> Effect | None:
        change = changes.get(geometry.format.setting)
        return Effect(change, 0.9, 80) if change is not None else None

    monkeypatch.setattr(kv_choice, "effect_on_model", effect)
    assert choose(loaded, memory, 30).config.kv_dtype == "int4"
    changes["int4"] = 0.2
    assert choose(loaded, memory, 30).config.kv_dtype == "int8", "the best there is"
    changes.clear()
    assert choose(loaded, memory, 30).config.kv_dtype == "auto"


def test_a_model_that_would_answer_otherwise_is_refused_unless_the_user_insists(
    loaded: LoadedModel, memory: FactMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small dense model has channels of keys that 4 bits cannot hold."""
    seeds = iter(range(9))

    def predictions(*_: object) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(next(seeds))
        yield torch.randn(len(IDS), 50, generator=generator)

    monkeypatch.setattr(kv_choice, "_predictions", predictions)
    with pytest.raises(ModelError, match=r"would answer otherwise\. KV in k8v4 changes") as caught:
        notes(loaded, "k8v4", memory)
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")

    assert "--kv-dtype int8" in caught.value.hint
    assert len(notes(loaded, "k8v4", memory)) == 1


def test_a_model_without_a_text_to_read_is_not_measured(loaded, memory, monkeypatch, tmp_path):
    def sample_ids(*_: object) -> list[int]:
        raise OSError(tmp_path)

    monkeypatch.setattr(kv_choice, "sample_ids", sample_ids)

    assert notes(loaded, "int4", memory) == ()
