"""Packed weights from the disk are those of a fresh rounding, bit by bit, or are rounded anew."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvchat.cache.disk.weight_files import NewFile, WeightFiles
from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model import loader
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed import matrices as packed_matrices
from kvchat.model.packed.experts import ExpertPacks, expert_packs_of
from kvchat.model.packed.quantise import pack_of
from kvchat.model.self_test import compare_with_own
from kvchat_kernels.linear import cpu
from support.checkpoints import save_checkpoint, tiny_model
from support.stateful_models import _DELTA

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "odd rows": ("llama", {"hidden_size": 72, "intermediate_size": 100}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "turned": ("gpt2", {}),
    "mixture": ("qwen3_moe", EXPERTS),
    "recurrent": ("qwen3_5_text", _DELTA),
}


@pytest.fixture(autouse=True)
def _keeps_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrices, "_LEAST_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path / "weights", 1 << 30)


def checkpoint(directory: Path, name: str, seed: int = 0) -> ModelSource:
    model_type, settings = MODELS[name]
    return find_model(str(save_checkpoint(directory, tiny_model(model_type, seed, **settings))))


def load(
    source: ModelSource, store: WeightFiles | None, weights: str = "int4", dtype: str = "bfloat16"
) -> LoadedModel:
    config = ModelConfig(weights=weights, dtype=dtype, device="cpu")
    return load_model(source, config, 128, lambda _: None, store=store)


def packed(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Return all tensors of packed weights by name."""
    found = {}
    for name, module in loaded.module.named_modules():
        pack, packs = pack_of(module), expert_packs_of(module)
        products = [pack] if pack is not None else []
        if isinstance(packs, ExpertPacks):
            products += [*packs.gate_up, packs.down]
        for number, product in enumerate(products):
            for part, tensor in product.weights.parts().items():
                found[f"{name} {number} {part}"] = tensor
    assert found
    return found


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def count_roundings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted = []

    def noted(weight: torch.Tensor, bits: int, *room: Any) -> Any:
        counted.append(bits)
        return cpu.rounded(weight, bits, *room)

    monkeypatch.setattr(packed_matrices, "rounded", noted)
    return counted


def only_file(store: WeightFiles) -> Path:
    (path,) = store.directory.iterdir()
    return path


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_start_has_the_same_weights_and_rounds_none(
    name: str, weights: str, store: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path / "model", name)
    fresh, first = load(source, None, weights), load(source, store, weights)
    counted = count_roundings(monkeypatch)

    second = load(source, store, weights)

    assert counted == []
    assert are_equal(packed(second), packed(fresh))
    assert are_equal(packed(first), packed(fresh))
    assert [len(each.notes) for each in (fresh, first, second)] == [0, 1, 0]
    assert "on the disk" in first.notes[0]
    assert compare_with_own(second) > 0.98


def test_the_file_is_a_safetensors_file_and_holds_each_matrix_once(store, tmp_path):
    loaded = load(checkpoint(tmp_path / "model", "llama"), store)
    num_bytes = sum(tensor.nbytes for tensor in packed(loaded).values())

    with safe_open(only_file(store), framework="pt") as file:
        names = set(file.keys())

    assert "model.layers.0.mlp.down_proj" in names
    assert num_bytes < only_file(store).stat().st_size < num_bytes + 64 * 3 * len(names) + 8192


def test_another_checkpoint_or_format_is_rounded(store, tmp_path, monkeypatch):
    one, other = (checkpoint(tmp_path / name, "llama", seed) for seed, name in enumerate("ab"))
    load(one, store)
    counted = count_roundings(monkeypatch)

    found = packed(load(other, store))
    load(one, store, "int8")
    load(one, store, dtype="float16")
    num_rounded = len(counted)
    monkeypatch.setattr(packed_matrices, "_VERSION", packed_matrices._VERSION + 1)
    load(one, store)

    assert len(list(store.directory.iterdir())) == 5
    assert len(counted) == num_rounded // 3 * 4
    assert are_equal(found, packed(load(other, None)))


def test_a_checkpoint_that_is_written_again_is_rounded_again(store, tmp_path, monkeypatch):
    """Between the samples of the digest too: the file's times and number count."""
    source = checkpoint(tmp_path / "model", "llama")
    load(source, store)
    path = source.weight_files[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    counted = count_roundings(monkeypatch)

    load(source, store)

    assert counted


def test_another_version_of_transformers_rounds_again(store, tmp_path, monkeypatch):
    """It converts a checkpoint's tensors as it loads them, and may do it otherwise."""
    source = checkpoint(tmp_path / "model", "llama")
    load(source, store)
    monkeypatch.setattr(loader.transformers, "__version__", "5.99.0")
    counted = count_roundings(monkeypatch)

    load(source, store)

    assert counted


@pytest.mark.parametrize("place", ["page", "last byte", "header", "size", "sums"])
def test_a_damaged_file_is_made_anew(place, store, tmp_path, monkeypatch):
    """As after a power cut, which leaves zeros where a page was not written."""
    source = checkpoint(tmp_path / "model", "llama")
    load(source, store)
    path = only_file(store)
    content = bytearray(path.read_bytes())
    if place == "size":
        del content[-8:]
    elif place == "page":
        content[16384:20480] = bytes(4096)
    else:
        at = {"header": 100, "last byte": -200, "sums": -1}[place]
        content[at] ^= 1
    path.write_bytes(content)
    counted = count_roundings(monkeypatch)

    again = load(source, store)
    num_rounded = len(counted)
    third = load(source, store)

    assert num_rounded
    assert len(counted) == num_rounded
    fresh = packed(load(source, None))
    assert are_equal(packed(again), fresh)
    assert are_equal(packed(third), fresh)


@pytest.mark.parametrize("ends_by", ["change", "deletion", MemoryError, KeyboardInterrupt])
def test_a_load_that_ends_while_it_rounds_leaves_no_file(ends_by, store, tmp_path, monkeypatch):
    """As where the checkpoint is deleted meanwhile: a part of the whole size stayed, locked."""
    source = checkpoint(tmp_path / "model", "llama")

    def ended(*arguments: Any) -> Any:
        if not isinstance(ends_by, str):
            raise ends_by
        if ends_by == "deletion":
            source.config_file.unlink(missing_ok=True)
        else:
            os.utime(source.weight_files[0], (1, 1))
        return cpu.rounded(*arguments)

    monkeypatch.setattr(packed_matrices, "rounded", ended)

    with pytest.raises(ModelError if isinstance(ends_by, str) else ends_by) as caught:
        load(source, store)
    assert ends_by != "change" or "changed while they were loaded" in str(caught.value)
    assert list(store.directory.iterdir()) == []


def test_without_compiled_code_the_same_is_kept(store, tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "model", "odd rows")
    fresh = packed(load(source, None))
    monkeypatch.setattr(cpu, "compiled_calls", lambda: None)

    load(source, store)

    assert are_equal(packed(load(source, store)), fresh)


@pytest.mark.parametrize("num_written", [0, 1, 7, 60])
def test_a_disk_that_fails_leaves_no_file_and_the_same_weights(
    num_written: int, store: WeightFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path / "model", "llama")
    write, calls = NewFile.write, []

    def fail_later(self: NewFile, at: int, data: memoryview) -> None:
        calls.append(at)
        if len(calls) > num_written:
            raise OSError(errno.EIO, "Input/output error")
        write(self, at, data)

    monkeypatch.setattr(NewFile, "write", fail_later)
    monkeypatch.setattr(packed_matrices, "_TILE_ELEMENTS", 1500)

    loaded = load(source, store)

    assert len(calls) == num_written + 1
    assert loaded.notes == ()
    assert list(store.directory.iterdir()) == []
    assert are_equal(packed(loaded), packed(load(source, None)))


@pytest.mark.parametrize("name", ["odd rows", "turned", "mixture"])
def test_tiles_make_the_same_matrix(name, store, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_matrices, "_TILE_ELEMENTS", 1500)
    source = checkpoint(tmp_path / "model", name)

    first, second = load(source, store), load(source, store)

    fresh = packed(load(source, None))
    assert are_equal(packed(first), fresh)
    assert are_equal(packed(second), fresh)


def test_a_store_without_room_changes_nothing(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", "llama")
    full = WeightFiles(tmp_path / "weights", 100)

    loaded = load(source, full)

    assert loaded.notes == ()
    assert are_equal(packed(loaded), packed(load(source, None)))
