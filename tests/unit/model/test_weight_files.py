"""Which weights are loaded: those that are hashed and checked, and never a pickle."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ExitCode, ModelError
from kvchat.core.types import NO_MEMORY
from kvchat.model import loader
from kvchat.model.checkpoint.identity import content_digest, sample_digest
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.loader import LoadedModel, load_model
from support.checkpoints import save_checkpoint, tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("single"), tiny_model("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    model = tiny_model("llama")
    save_checkpoint(directory, model)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


@pytest.fixture
def checkpoint(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "m"))


def load(directory: Path) -> LoadedModel:
    source = find_model(str(directory))
    return load_model(source, ModelConfig(dtype="float32"), None, lambda _: None)


def write_index(directory: Path, weight_map: dict[str, object]) -> None:
    content = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content))


def move_weights(directory: Path, name: str) -> Path:
    """Put the single file elsewhere and write an index that names it; return its new place."""
    path = directory / name
    names = list(load_file(directory / "model.safetensors"))
    path.parent.mkdir(exist_ok=True, parents=True)
    (directory / "model.safetensors").rename(path)
    write_index(directory, dict.fromkeys(names, name))
    return path


def assert_refused(directory: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(directory)
    assert caught.value.exit_code is ExitCode.MODEL
    assert "\n" not in str(caught.value)


def digests(directory: Path) -> tuple[str, str]:
    source = find_model(str(directory))
    return sample_digest(source), content_digest(source, NO_MEMORY)


def assert_same_weights(loaded: LoadedModel, single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, tensors[name]), name


def add_to_first_value(path: Path) -> None:
    tensors = load_file(path)
    name = min(tensors)
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, path, metadata={"format": "pt"})


# Checkpoints as they are


def test_shards_load_as_the_single_file_does(sharded: Path, single: Path) -> None:
    assert_same_weights(load(sharded), single)


def test_a_link_to_a_directory_is_a_checkpoint(single: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(single)

    assert_same_weights(load(tmp_path / "link"), single)


def test_files_may_be_links_to_anywhere(single: Path, tmp_path: Path) -> None:
    """The user's own, to weights on another disk."""
    directory = tmp_path / "links"
    directory.mkdir()
    for path in single.iterdir():
        (directory / path.name).symlink_to(path)

    assert_same_weights(load(directory), single)
    assert digests(directory) == digests(single)


@pytest.mark.parametrize("below", ["", "weights/"], ids=["top", "below"])
def test_a_snapshot_of_the_hubs_cache_loads(below, sharded, single, tmp_path):
    """Its files are links into a directory of blobs, beside that of the snapshots."""
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sharded.iterdir()):
        shutil.copy(path, blobs / f"{number:064x}")
        place = snapshot / (below if path.suffix == ".safetensors" else "") / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(blobs / f"{number:064x}", place.parent))
    weight_map = json.loads((snapshot / INDEX).read_text())["weight_map"]
    (snapshot / INDEX).unlink()
    write_index(snapshot, {name: below + file for name, file in weight_map.items()})

    assert_same_weights(load(snapshot), single)


def test_the_file_that_config_json_names_is_loaded_and_hashed(checkpoint: Path) -> None:
    """transformers goes by this setting before it looks for model.safetensors."""
    other = checkpoint / "other.safetensors"
    shutil.copy(checkpoint / "model.safetensors", other)
    add_to_first_value(other)
    before = digests(checkpoint)
    config = checkpoint / "config.json"
    settings = json.loads(config.read_text()) | {"transformers_weights": "other.safetensors"}
    config.write_text(json.dumps(settings))

    assert_same_weights_as_file(load(checkpoint), other)
    assert digests(checkpoint) != before
    settings["transformers_weights"] = "../other.safetensors"
    config.write_text(json.dumps(settings))
    assert_refused(checkpoint, "no path inside")


def assert_same_weights_as_file(loaded: LoadedModel, path: Path) -> None:
    tensors = load_file(path)
    assert all(torch.equal(p, tensors[name]) for name, p in loaded.module.named_parameters())


# What the digests cover


def test_weights_below_the_top_directory_are_in_both_digests(checkpoint: Path) -> None:
    """They were loaded and not hashed: KV of the weights that were there before was used again."""
    path = move_weights(checkpoint, "sub/x.safetensors")
    before = digests(checkpoint)

    add_to_first_value(path)

    assert all(a != b for a, b in zip(digests(checkpoint), before, strict=True))
    assert_same_weights_as_file(load(checkpoint), path)


def test_every_shard_is_in_both_digests(sharded: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sharded, tmp_path / "m"))
    before = digests(directory)
    for path in sorted(directory.glob("*.safetensors")):
        original = path.read_bytes()
        add_to_first_value(path)
        assert all(a != b for a, b in zip(digests(directory), before, strict=True)), path
        path.write_bytes(original)


def test_of_two_files_with_one_tensor_the_later_counts_in_order_of_names(checkpoint, tmp_path):
    """As for transformers; which one that is, is in the digests."""
    first, second = checkpoint / "a.safetensors", checkpoint / "b.safetensors"
    (checkpoint / "model.safetensors").rename(first)
    shutil.copy(first, second)
    add_to_first_value(second)
    write_index(checkpoint, {"x": "a.safetensors", "y": "b.safetensors"})

    assert_same_weights_as_file(load(checkpoint), second)

    before = digests(checkpoint)
    first.rename(checkpoint / "c.safetensors")
    write_index(checkpoint, {"x": "c.safetensors", "y": "b.safetensors"})
    assert_same_weights_as_file(load(checkpoint), checkpoint / "c.safetensors")
    assert all(a != b for a, b in zip(digests(checkpoint), before, strict=True))


def test_files_that_change_while_they_are_loaded_are_told(checkpoint, monkeypatch):
    digest = loader.sample_digest

    def replaced(source: ModelSource) -> str:
        found = digest(source)
        add_to_first_value(checkpoint / "model.safetensors")
        return found

    monkeypatch.setattr(loader, "sample_digest", replaced)

    assert_refused(checkpoint, "changed while they were loaded")


# What is never opened


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return open, (str(self._path), "w")


@pytest.mark.parametrize("name", ["evil.bin", "evil.pt", "evil", "evil.safetensors.bin"])
def test_a_pickle_that_an_index_names_is_never_opened(name: str, checkpoint: Path) -> None:
    """transformers took its loader of pickles for the files of an index, by the first one's name;
    the decoy beside it satisfied the check for safetensors."""
    (checkpoint / "model.safetensors").rename(checkpoint / "decoy.safetensors")
    (checkpoint / name).write_bytes(pickle.dumps(Trap(checkpoint / "ran")))
    write_index(checkpoint, {"a": name, "b": "decoy.safetensors"})

    assert_refused(checkpoint, f"names {name}, which is no .*safetensors file")
    assert not (checkpoint / "ran").exists()


@pytest.mark.parametrize("form", ["pickle", "zip"])
def test_a_pickle_with_the_name_of_a_safetensors_file_is_never_opened(form, checkpoint):
    path = checkpoint / "model.safetensors"
    if form == "zip":
        torch.save({"a": Trap(checkpoint / "ran")}, path)
    else:
        path.write_bytes(pickle.dumps(Trap(checkpoint / "ran")))

    assert_refused(checkpoint, "it is not a complete safetensors file")
    assert not (checkpoint / "ran").exists()


def test_pickles_beside_the_weights_are_left_alone(checkpoint: Path) -> None:
    """A distributed checkpoint's .metadata is one, and transformers looks for that first."""
    for name in (
        ".metadata",
        "__0_0.distcp",
        "training_args.bin",
        "pytorch_model.bin",
        "vocab.pkl",
    ):
        (checkpoint / name).write_bytes(pickle.dumps(Trap(checkpoint / "ran")))
    (checkpoint / "adapter_config.json").write_text("{}")
    (checkpoint / "adapter_model.bin").write_bytes(pickle.dumps(Trap(checkpoint / "ran")))

    assert load(checkpoint).spec.model_type == "llama"
    assert not (checkpoint / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/../../x.safetensors",
        "a\0.safetensors",
        "\ud800.safetensors",
    ],
    ids=ascii,
)
def test_an_index_that_leaves_the_directory_is_refused(name: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "x.safetensors")
    write_index(checkpoint, {"a": name})

    assert_refused(checkpoint, "no path inside|not a possible one")


def test_a_linked_directory_that_leads_out_is_refused(checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside"
    outside.mkdir()
    (checkpoint / "model.safetensors").rename(outside / "x.safetensors")
    (checkpoint / "sub").symlink_to(outside)
    write_index(checkpoint, {"a": "sub/x.safetensors"})

    assert_refused(checkpoint, "no path inside")


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"[" * 10**5, b"\xff", b""],
    ids=lambda content: str(content[:20]),
)
def test_an_index_that_is_none_is_told(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / INDEX).write_bytes(content)

    assert_refused(checkpoint, "index.json cannot be read: it ")


def test_a_huge_index_is_refused_without_being_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with (checkpoint / INDEX).open("wb") as file:
        file.truncate(1 << 40)

    assert_refused(checkpoint, "has more than 67,108,864 bytes")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "dangling link"])
def test_what_is_no_file_is_told_and_not_waited_for(kind: str, name: str, checkpoint: Path) -> None:
    path = checkpoint / name
    (checkpoint / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")

    assert_refused(checkpoint, f"{name} cannot be read: ")


def test_a_directory_on_the_way_that_may_not_be_searched_is_told(tmp_path, monkeypatch):
    """Made up: tests may run as root, whom no mode keeps out."""

    def refused(path: str, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        find_model(str(tmp_path / "closed" / "m"))


def test_a_directory_that_may_not_be_listed_is_told(checkpoint, monkeypatch):
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        find_model(str(checkpoint))


def test_a_name_too_long_for_a_path_is_told() -> None:
    with pytest.raises(ModelError, match="File name too long"):
        find_model("./" + "x" * 5000)


# Headers that lie


def with_header(header: object, rest: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def entry(shape: list[object], start: object, end: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little"),
        with_header(b"[" * 10**5),
        with_header(b"\xff"),
        with_header(entry([16], 0, 65)),
        with_header(entry([16], 64, 0)),
        with_header(entry([16], -64, 0)),
        with_header(entry([16], 0, 1 << 70)),
        with_header(entry([-16], 0, 64)),
        with_header(entry([16.5], 0, 64)),
        with_header(entry([True], 0, 64)),
        with_header(entry([1 << 62, 1 << 62], 0, 64)),
        with_header(entry([1] * 1000, 0, 64)),
        with_header(entry(["16"], 0, 64)),
        with_header({"a": {"dtype": "F32", "data_offsets": [0, 64]}}),
    ],
    ids=lambda content: ascii(content[:60]),
)
def test_a_header_that_cannot_be_true_is_told(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)

    assert_refused(checkpoint, "it is not a complete safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        entry([15], 0, 60),
        entry([16], 0, 64) | {"b": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}},
        {"a": {"dtype": "X9", "shape": [16], "data_offsets": [0, 64]}},
        {"a": {"dtype": 5, "shape": [16], "data_offsets": [0, 64]}},
    ],
    ids=["a rest", "overlap", "dtype", "dtype is a number"],
)
def test_what_the_library_refuses_is_told_as_well(header: object, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(with_header(header))

    assert_refused(checkpoint, "cannot be read")


# What config.json promises


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1_000_000},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": 1e400},
        {"num_hidden_layers": 4000},
        {"hidden_size": 10**9},
        {"hidden_size": 10**18, "num_attention_heads": 10**9},
        {"intermediate_size": 10**12},
        {"vocab_size": 10**10},
        {"vocab_size": -1},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"head_dim": 10**15},
        {"hidden_size": -64},
        {"hidden_size": "64"},
        {"hidden_size": float("nan")},
        {"num_hidden_layers": None},
        {"num_hidden_layers": -5},
        {"model_type": ["llama"]},
        {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "evil.Evil"}},
        {"configuration_files": ["config.4.0.0.json"]},
        {"dtype": "load"},
        {"layer_types": "x"},
        {"rope_parameters": {"rope_type": "zzz", "rope_theta": 1.0}},
        {"rope_parameters": [1]},
        {"hidden_act": "no such"},
        {"quantization_config": 5},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_true_is_told_at_once(changes, checkpoint):
    """A million layers were built one by one, a huge layer was filled with random numbers."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    assert_refused(checkpoint, ".")


def test_a_scale_that_is_no_real_number_is_refused(tmp_path: Path) -> None:
    """The root of a negative setting was a complex number, which ended in a traceback."""
    directory = save_checkpoint(tmp_path, tiny_model("gemma3_text"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"query_pre_attn_scalar": -1}))

    assert_refused(directory, "a number that is not real")


@pytest.mark.parametrize("name", [5, [5], "x", {}, [], [""]], ids=str)
def test_an_odd_name_of_an_architecture_is_no_obstacle(name: object, checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": name}))

    assert load(checkpoint).spec.architecture


def test_nobody_is_asked_whether_code_may_run(checkpoint, monkeypatch):
    """transformers asked on the terminal, and yes would have run the checkpoint's code."""
    path = checkpoint / "config.json"
    code = {"AutoModelForCausalLM": "evil.Evil"}
    path.write_text(json.dumps({"model_type": "t5", "auto_map": code}))
    (checkpoint / "evil.py").write_text(f"open({str(checkpoint / 'ran')!r}, 'w')")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")

    assert_refused(checkpoint, "not supported|not a causal")
    assert asked == []
    assert not (checkpoint / "ran").exists()
