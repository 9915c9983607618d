"""Finding models: every wrong name, directory or hub answer gives one sentence and exit code 3."""

import errno
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import errors as hub_errors

from kvchat.core.errors import ExitCode, ModelError
from kvchat.model.checkpoint import source as source_module
from kvchat.model.checkpoint.source import demo_directory, find_model
from support.other_process import run_python


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_refused(name: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        find_model(str(name))
    assert caught.value.exit_code is ExitCode.MODEL
    assert caught.value.hint


def test_a_directory_with_safetensors_is_a_model(directory: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (2, 1)]
    for name in names:
        (directory / name).touch()
    write_index(directory, {"b": names[0], "a": names[1]})

    source = find_model(str(directory))

    assert source.directory == directory
    assert [path.name[:11] for path in source.weight_files] == ["model-00001", "model-00002"]


def test_a_directory_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    for name in (tmp_path / "no", "./no", "../no", "~/no-such-kvchat-model", "/no"):
        assert_refused(name, "There is no model directory")
    assert_refused("three/part/name", "There is no model directory")
    assert_refused("with space", "There is no model directory")


def test_a_file_is_no_directory(directory: Path) -> None:
    assert_refused(directory / "config.json", "is a file")


def test_a_directory_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    assert_refused(tmp_path, "has no config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.ckpt"])
def test_pickles_are_never_opened(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"\x80\x04.")
    assert_refused(directory, "pickle files only, which kvchat never opens")


def test_an_empty_gguf_file_is_no_model(directory: Path) -> None:
    (directory / "model.gguf").touch()
    assert_refused(directory, "model.gguf cannot be read: it is not a complete GGUF file")


def test_a_directory_without_weights_is_incomplete(directory: Path) -> None:
    assert_refused(directory, "has neither model.safetensors nor model.safetensors.index.json")


def test_a_hub_id_that_is_not_here_cannot_be_fetched_offline() -> None:
    assert_refused("kvchat-tests/not-here", "is not on this machine and the hub cannot be reached")
    assert_refused("not-here", "is not on this machine and the hub cannot be reached")


@pytest.mark.parametrize("name", ["a..b", "org/a--b", "x" * 200, "org/-x", "a.git"])
def test_an_id_the_hub_would_not_take_is_told_too(name: str) -> None:
    """The hub client refuses such ids before it looks for anything, where no caller expected it."""
    assert_refused(name, "could not be downloaded|There is no model|cannot be reached")


def test_an_unreachable_hub_is_told_at_once(tmp_path: Path) -> None:
    output = run_python(
        """
        import os, sys
        os.environ.update(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=sys.argv[1])
        from kvchat.core.errors import ModelError
        from kvchat.model.checkpoint.source import find_model
        try:
            find_model("org/model")
        except ModelError as error:
            print(error)
        print("torch" in sys.modules, "transformers" in sys.modules)
        """,
        tmp_path,
    )

    assert "org/model is not on this machine and the hub cannot be reached." in output
    assert "False False" in output


def hub_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)  # made without the response its constructor wants


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(hub_errors.GatedRepoError), "is gated.*hf auth login"),
        (hub_error(hub_errors.RepositoryNotFoundError), "The hub has no model org/m"),
        (hub_errors.LocalEntryNotFoundError("gone"), "the hub cannot be reached"),
        (ConnectionResetError(), "the hub cannot be reached"),
        (OSError(errno.ENOSPC, "No space left on device"), "The disk is full"),
        (RuntimeError("Data processing error: No space left on device"), "The disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "could not be downloaded: .*denied"),
        (RuntimeError("peer closed connection\nmore"), "could not be downloaded: peer closed"),
        (ValueError(), "could not be downloaded: ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_goes_wrong_with_a_download_is_one_sentence(error, message, monkeypatch):
    """Errors of a transport in the middle of a file, and of the store of chunks on a full disk,
    were none of those expected and ended in a traceback."""

    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    with pytest.raises(ModelError, match=f"(?s){message}"):
        find_model("org/m")


@pytest.mark.parametrize(
    ("index", "is_complete"),
    [
        (None, False),
        ({"weight_map": {"a": "one.safetensors"}}, True),
        ({"weight_map": {"a": "one.safetensors", "b": "other.safetensors"}}, False),
        ({}, False),
        ([], False),
        ("nonsense", False),
    ],
    ids=["no index", "complete", "a shard is missing", "no map", "a list", "a string"],
)
def test_a_snapshot_is_used_offline_only_where_it_is_complete(
    index: object, is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "hub" / "models--org--m" / "snapshots" / "0123"
    directory.mkdir(parents=True)
    (directory.parents[1] / "refs").mkdir()
    (directory.parents[1] / "refs" / "main").write_text("0123")
    (directory / "config.json").write_text("{}")
    (directory / "one.safetensors").touch()
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "config.json").write_text("{}")
    (remote / "model.safetensors").touch()
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(remote)
    )

    found = find_model("org/m")

    assert found.directory == (directory if is_complete else remote)
    assert asked == ([] if is_complete else ["org/m"])
    assert found.name == "org/m"


def test_the_demo_lies_in_the_package() -> None:
    assert demo_directory().parts[-3:] == ("kvchat", "demo", "target")
    assert demo_directory("draft").name == "draft"


def test_a_home_directory_is_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "model.safetensors").touch()
    monkeypatch.setenv("HOME", str(directory.parent))

    assert find_model("~/m").directory == directory
    assert os.path.isabs(find_model("~/m").directory)


def test_looking_for_a_model_imports_neither_torch_nor_transformers() -> None:
    assert source_module.__file__
    output = run_python(
        """
        import sys, kvchat.model.checkpoint.source
        print("torch" in sys.modules, "transformers" in sys.modules)
        """
    )
    assert output.split() == ["False", "False"]
