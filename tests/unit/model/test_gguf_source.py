"""Where GGUF files are found: directories, the hub's cache, ollama's store."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from kvchat.cli.model_lists import list_models
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.text_files import read_text_files
from kvchat.model.gguf.source import label, ollama_gguf
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_files import write_gguf


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, tiny_model("llama", num_hidden_layers=1)).read_bytes()


@pytest.fixture
def directory(tmp_path: Path, content: bytes) -> Path:
    """Two models in a directory, one of them below it, and a projector."""
    directory = tmp_path / "models"
    (directory / "Q8_0").mkdir(parents=True)
    for name in ("m-Q4_K_M.gguf", "Q8_0/m-Q8_0.gguf", "mmproj-m-F16.gguf", "mtp-m-Q8_0.gguf"):
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "q8_0"),
        ("m.IQ2_XXS.gguf", "IQ2_XXS"),
        ("UD/m-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("m-BF16.gguf", "BF16"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_files_name_states_its_block_format(name: str, expected: str) -> None:
    assert label(name) == expected


def test_a_directory_with_one_model_needs_no_choice(directory: Path) -> None:
    (directory / "Q8_0" / "m-Q8_0.gguf").unlink()
    source = find_model(str(directory))
    assert [path.name for path in source.weight_files] == ["m-Q4_K_M.gguf"]


def test_of_several_models_one_has_to_be_chosen(directory: Path) -> None:
    with pytest.raises(ModelError, match="several GGUF files") as caught:
        find_model(str(directory))
    assert f"{directory}:QUANT, QUANT one of Q4_K_M, Q8_0" in caught.value.hint

    assert find_model(f"{directory}:q8_0").weight_files[0].name == "m-Q8_0.gguf"

    with pytest.raises(ModelError, match="has no GGUF file of Q2_K") as caught:
        find_model(f"{directory}:Q2_K")
    assert "Q4_K_M, Q8_0" in caught.value.hint


def test_safetensors_win_where_both_are(directory: Path) -> None:
    save_checkpoint(directory, tiny_model("llama", num_hidden_layers=1))
    assert [path.suffix for path in find_model(str(directory)).weight_files] == [".safetensors"]


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(ModelError, match="is a file, and not a GGUF file"):
        find_model(str(tmp_path / "m.bin"))


@pytest.fixture
def hub(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache without a connection, with one repository of GGUF files."""
    repository = tmp_path / "hub" / "models--org--m-GGUF"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs").mkdir()
    blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_repository_in_the_hubs_cache_is_used_offline(hub: Path) -> None:
    source = find_model("org/m-GGUF:Q8_0")
    assert [path.name for path in source.weight_files] == ["m-Q8_0.gguf"]
    with pytest.raises(ModelError, match="has no GGUF file of Q6_K") as caught:
        find_model("org/m-GGUF:Q6_K")
    assert "It has Q4_K_M, Q8_0" in caught.value.hint
    with pytest.raises(ModelError, match="org/m-GGUF has several GGUF files"):
        find_model("org/m-GGUF")
    with pytest.raises(ModelError, match=r"org/other:Q8_0 is not on this machine\."):
        find_model("org/other:Q8_0")


@pytest.fixture
def ollama(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ollama's store with one model that has parameters."""
    store = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    params = json.dumps({"temperature": 0.25, "stop": ["x"], "top_k": 7}).encode()
    write_manifest(store, "registry.ollama.ai/library/tiny/1b", model=content, params=params)
    return store


def write_manifest(store: Path, place: str, **layers: bytes) -> None:
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    entries = []
    for kind, content in layers.items():
        digest = hashlib.sha256(content).hexdigest()
        (store / "blobs" / f"sha256-{digest}").write_bytes(content)
        media = f"application/vnd.ollama.image.{kind}"
        entries.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)})
    path = store / "manifests" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))


def test_a_model_of_ollamas_is_read_where_it_lies(ollama: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ollama.rglob("*")}
    source = find_model("ollama:tiny:1b")
    files = read_text_files(source)
    assert files.sampling_defaults == {"temperature": 0.25, "top_k": 7}
    assert files.chat_template is not None
    assert source.weight_files[0].parent == ollama / "blobs"
    assert {path: path.stat().st_mtime_ns for path in ollama.rglob("*")} == before


def test_what_ollamas_store_lacks_is_said(ollama: Path) -> None:
    for name, message in {
        "ollama:tiny": "has no model tiny",  # the tag is `latest` where none is given
        "ollama:../../x": "names no model of ollama",
        "ollama:": "names no model of ollama",
    }.items():
        with pytest.raises(ModelError, match=message):
            find_model(name)


def test_a_manifest_is_not_trusted(ollama: Path, content: bytes) -> None:
    write_manifest(ollama, "registry.ollama.ai/user/tuned/latest", model=content, adapter=b"x")
    with pytest.raises(ModelUnsupported, match="has an adapter"):
        find_model("ollama:user/tuned")
    place = ollama / "manifests/registry.ollama.ai/library/tiny/1b"
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../x"}
    for bad in ({"layers": [layer]}, {"layers": [1]}, {"layers": 3}, {}):
        place.write_text(json.dumps(bad))
        with pytest.raises(ModelError, match="cannot be read: it"):
            ollama_gguf("ollama:tiny:1b")


def test_models_list_has_gguf_files_with_their_sizes(hub, ollama, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no model was used there
    list_models({})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "demo",
        "ollama:tiny:1b",
        "org/m-GGUF:Q4_K_M",
        "org/m-GGUF:Q8_0",
    ]
    assert all(" KiB  " in line for line in lines[1:])
