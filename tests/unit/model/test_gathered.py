"""What the matrix of types cannot see of the gathered path and of towers beside the text."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvchat.cache.kv_pool import CodedFormat
from kvchat.cli.models import info
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY
from kvchat.engine.kv_storage import kv_geometry, kv_identity, small_kv
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.hf.gathered import cache_over, spans_of
from kvchat.model.hf.model_class import loads_towers, without_towers
from kvchat.model.loader import LoadedModel, _own_weights_only, inspect_model, load_model
from kvchat.model.packed.quantise import is_packed
from kvchat.model.paged_model import KvLayers, PagedModel
from kvchat.model.self_test import compare_with_own, ensure_trusted
from kvchat.model.spec import CacheCall
from kvchat_kernels.kv_code import INT8
from kvchat_kernels.kv_layer import PlainKv
from kvchat_kernels.kv_write import kv_write
from kvchat_kernels.slot_positions import SlotPositions
from support.architectures import GATHERED
from support.assembled import assemble
from support.chains import be_patient
from support.checkpoints import save_checkpoint, tiny_model
from support.every_type import every_config, every_model
from support.greedy_answer import greedy_answer
from support.stateful_models import STATEFUL


class KeptTokens:
    """A sequence of the cache that keeps what it is given, in memory."""

    def __init__(self, start: int = 3) -> None:
        self.start = start
        self.calls: list[tuple[CacheCall, torch.Tensor, torch.Tensor]] = []
        self.firsts: list[int] = []

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((call, key, value))
        self.firsts.append(first)
        return key, value


def checkpoint(name: str, directory: Path) -> Path:
    model_type, settings, _ = GATHERED[name]
    return save_checkpoint(directory, tiny_model(model_type, **settings))


def load(directory: Path, weights: str = "auto") -> LoadedModel:
    config = ModelConfig(dtype="float32", weights=weights)
    return load_model(find_model(str(directory)), config, None, lambda event: None)


def test_a_cache_counts_a_sequence_s_tokens_and_then_the_new_ones_too() -> None:
    cache = cache_over(KeptTokens(), num_layers=2, num_visible={})
    new = torch.zeros(1, 2, 4, 8)
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(4, 1) == (7, 0)

    cache.update(new, new, 0)

    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (7, 3)


@pytest.mark.parametrize("start", [0, 3, 7, 8, 9, 30])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_a_layer_with_a_window_has_what_transformers_own_cache_has(start: int, count: int) -> None:
    own, sequence = DynamicSlidingWindowLayer(sliding_window=8), KeptTokens(start)
    before, new = torch.zeros(1, 2, start, 8), torch.zeros(1, 2, count, 8)
    if start:
        own.update(before, before)
    cache = cache_over(sequence, num_layers=2, num_visible={1: 8})
    assert cache.is_sliding == [False, True]
    num_keys, first = own.get_mask_sizes(count)
    assert cache.get_mask_sizes(count, 1) == (num_keys, first)
    assert cache.get_mask_sizes(count, 0) == (start + count, 0)

    cache.update(new, new, 0)
    cache.update(new, new, 1)

    assert sequence.firsts == [0, first]
    assert own.update(new, new)[0].shape[-2] == num_keys == start + count - first
    assert cache.get_seq_length(1) == start + count


def test_a_window_that_no_mask_has_is_not_read() -> None:
    """The configuration of Qwen3-Omni has one, and its code makes masks of all tokens."""
    config = every_config("qwen3_omni_moe_thinker")

    assert config.get_text_config().sliding_window == 8
    assert spans_of(config) == {}


def test_a_table_with_positions_of_its_own_is_refused(tmp_path: Path) -> None:
    """The models of this path count positions by how many tokens their cache has."""
    loaded = load(checkpoint("bloom", tmp_path))
    layers = loaded.spec.storing_layers
    pools = [
        (
            torch.zeros(3, 8, of.num_kv_heads, of.key_dim),
            torch.zeros(3, 8, of.num_kv_heads, of.value_dim),
        )
        for of in layers
    ]
    piece = SequencePiece([1], 5, [1], 1, table_positions=SlotPositions((), 5))

    with pytest.raises(AssertionError, match="take a slot's number for its position"):
        PagedModel(loaded, pools).forward(build_batch([piece], 8, torch.device("cpu")))


def test_an_index_is_stored_in_halves_and_comes_back_whole() -> None:
    kept = KeptTokens()
    cache = cache_over(kept, num_layers=1, num_visible={})
    if not hasattr(cache, "update_indexer"):
        pytest.skip("this version of transformers has no index in its cache")
    index = torch.arange(24.0).view(1, 4, 6)

    assert torch.equal(cache.update_indexer(index, 0), index)

    [(call, key, value)] = kept.calls
    assert call == CacheCall(0, is_index=True)
    assert key.shape == value.shape == (1, 1, 4, 3)


def write_rounded(
    kv: PlainKv, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write plain KV of numbers that are rounded as a code rounds them: the twin."""
    keys, values = (
        code.plain(*code.quantised(x)) for code, x in ((INT8.keys, key), (INT8.values, value))
    )
    kv_write(keys, values, kv.keys, kv.values, slot_mapping)


@pytest.mark.parametrize("name", GATHERED)
def test_kv_in_few_bits_is_gathered_as_it_was_rounded(name, tmp_path, monkeypatch):
    loaded = load(checkpoint(name, tmp_path))
    plain = kv_geometry(loaded.spec, CacheConfig(8), loaded.dtype)
    ids = list(range(5, 25))

    def logits(pools: KvLayers) -> torch.Tensor:
        model = PagedModel(loaded, pools)
        steps = (SequencePiece(ids[a:b], a, [2, 1, 3], b - a) for a, b in ((0, 13), (13, 20)))
        return torch.cat([model.forward_pieces([piece], 8) for piece in steps])

    coded = replace(plain, format=CodedFormat(INT8))
    found, own = (logits(small_kv(of, loaded.device, 4, 8)) for of in (coded, plain))
    monkeypatch.setattr(PlainKv, "write", write_rounded)
    rounded = logits(small_kv(plain, loaded.device, 4, 8))

    torch.testing.assert_close(found, rounded, rtol=1e-4, atol=1e-4)
    assert 1e-4 < (found - own).abs().max() < found.std()


def test_a_chat_over_few_bits_goes_on_after_a_restart(tmp_path, monkeypatch):
    """With its own KV, and with KV of more bits."""
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")  # random weights change their minds
    model, answers, found = checkpoint("bloom", tmp_path / "m"), [], []
    for kv_dtype in ("auto", "int8", "int8"):
        some, directory = Size(num_bytes=1 << 20), tmp_path / "kv"
        cache = CacheConfig(device_bytes=some, kv_dtype=kv_dtype, directory=directory)
        engine = assemble(model, cache=cache).engine
        be_patient(engine.chain)
        assert engine.chain.flush(60.0)
        answer, cached = greedy_answer(engine, list(range(5, 55)), 4)
        assert engine.chain.flush(60.0)
        engine.close()
        answers.append(answer)
        found.append(cached.places)

    assert answers[0] == answers[1] == answers[2]
    assert found[1]["disk as float32"] == found[2]["disk"] == 48


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("model_type", ["gemma4_unified", "llama4_text"])
def test_a_chat_of_several_windows_goes_on_after_a_restart(
    model_type: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where layers with a window keep everything, beside chats that need the room."""
    monkeypatch.setenv("KVCHAT_ROUNDING", "any")
    model = save_checkpoint(tmp_path / "m", every_model(every_config(model_type)))
    first, beside = list(range(5, 85)), [list(range(start, start + 90)) for start in (90, 30)]

    def chat(whole_windows: bool) -> tuple[list[list[int]], int]:
        cache = CacheConfig(
            block_size=8,
            device_bytes=Size(num_bytes=100_000),
            directory=tmp_path / f"kv-{whole_windows}",
            kv_dtype=kv_dtype,
            whole_windows=whole_windows,
        )
        answers, context = [], first
        for _ in range(2):
            engine = assemble(model, cache=cache, engine=EngineConfig(max_step_tokens=7)).engine
            be_patient(engine.chain)
            status = engine.status()
            has_windows = 0 < status.num_window_blocks < status.num_blocks
            assert has_windows is not whole_windows
            answer, cached = greedy_answer(engine, context, 12)
            for other in beside:
                answers.append(greedy_answer(engine, other, 4)[0])
            answers.append(answer)
            context = [*context, *answer, 7]
            again, _ = greedy_answer(engine, context, 4)
            answers.append(again)
            engine.close()
        return answers, cached.places["disk"]

    windowed, num_from_disk = chat(whole_windows=False)
    whole, num_of_whole = chat(whole_windows=True)

    assert windowed == whole
    assert num_from_disk >= num_of_whole - 8 >= 72


def test_kv_of_the_gathered_path_has_an_identity_of_its_own(tmp_path: Path) -> None:
    loaded = load(checkpoint("roberta", tmp_path))
    geometry = kv_geometry(loaded.spec, CacheConfig(), loaded.dtype)
    gathered = kv_identity(loaded, geometry, "weights")

    object.__setattr__(loaded.spec, "gathered", None)

    assert kv_identity(loaded, geometry, "weights") != gathered


@pytest.mark.parametrize("name", GATHERED)
def test_linear_layers_are_packed_on_a_cpu_and_compute_the_same(name: str, tmp_path: Path) -> None:
    loaded = load(checkpoint(name, tmp_path), weights="int8")

    assert loaded.weights == "int8"
    assert is_packed(loaded.module)
    assert compare_with_own(loaded) > 0.9999


def test_on_a_gpu_weights_stay_and_a_note_says_so(tmp_path: Path) -> None:
    loaded = load(checkpoint("bloom", tmp_path))

    assert not replace(loaded, device=torch.device("cuda")).has_choice_of_weights
    [note] = _own_weights_only(ModelConfig(weights="int8"))
    assert "--weights int8 is not used" in note


def test_a_model_that_fails_over_a_cache_is_refused_in_a_sentence(tmp_path, monkeypatch):
    from kvchat.core.errors import ModelUnsupported
    from kvchat.model.hf.gathered import GatheredSteps

    def fail(*args: object) -> torch.Tensor:
        raise ValueError("position_ids are incorrect")

    directory = checkpoint("bart", tmp_path)
    monkeypatch.setattr(GatheredSteps, "logits", fail)
    loaded = load_model(find_model(str(directory)), ModelConfig(dtype="float32"), None, print)

    with pytest.raises(ModelUnsupported, match="over a paged cache failed"):
        ensure_trusted(loaded, NO_MEMORY)


def test_info_names_the_path_and_its_reason(tmp_path, capsys):
    info(str(checkpoint("bloom", tmp_path)), "cpu", as_json=False)

    out = capsys.readouterr().out
    assert "path                   gathered, one sequence at a time\n" in out
    assert "it computes with the attention mask itself\n" in out
    assert "windows                as in the model's own code\n" in out


def test_info_names_windows_that_are_kept_as_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info(str(checkpoint("llama4, temperature tuning", tmp_path)), "cpu", as_json=False)

    assert "windows                16, full\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rwkv", "mamba2, no attention"])
def test_info_counts_each_layer_that_has_a_state(name, tmp_path, capsys):
    """RWKV has one object for the states of all, and was said to have one recurrent layer."""
    model_type, settings = STATEFUL[name]
    save_checkpoint(tmp_path, tiny_model(model_type, **settings))
    info(str(tmp_path), "cpu", as_json=False)

    assert " a snapshot in 2 recurrent layers\n" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["mistral3", "qwen2_5_vl", "smolvlm"])
def test_towers_that_read_images_are_left_out_of_memory(model_type: str, tmp_path: Path) -> None:
    config = every_config(model_type)
    whole = every_model(deepcopy(config))
    source = find_model(str(save_checkpoint(tmp_path, whole)))

    light, spec = inspect_model(source)
    loaded = load(tmp_path)

    assert loads_towers(config)
    assert not loads_towers(light)
    assert spec is not None
    assert sum(p.numel() for p in loaded.module.parameters()) == spec.num_parameters
    assert spec.num_parameters < sum(p.numel() for p in whole.parameters())
    assert loaded.notes == ()  # their tensors are not reported as strangers


def test_a_text_model_has_no_towers_to_leave_out() -> None:
    config = every_config("llama")

    assert without_towers(config) is config
