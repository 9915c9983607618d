"""The hub's cache as other programs leave it: a whole snapshot is used and listed.

A ref with a line feed was "not on this machine"; a model without refs was listed and refused.
"""

from pathlib import Path

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.local_models import local_models
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.used_models import UsedModel

WHOLE, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without a connection, with one whole snapshot and no ref."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--m"
    snapshot = repository / "snapshots" / WHOLE
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x" * 100)
    return repository


def write_ref(repository: Path, name: str, content: str) -> None:
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / name).write_text(content)


def check_is_found_and_listed(repository: Path) -> None:
    assert find_model("org/m").directory == repository / "snapshots" / WHOLE
    [model] = [model for model in local_models() if model.name == "org/m"]
    assert (model.trouble, model.num_bytes >= 100) == ("", True)


@pytest.mark.parametrize(
    "refs",
    [
        {"main": WHOLE},
        {"main": f"{WHOLE}\n"},
        {"main": f"{WHOLE}\r\n"},
        {"main": ""},
        {"main": OTHER},  # its snapshot is gone
        {"main": "\0"},
        {"v1": WHOLE},
        {},
    ],
    ids=repr,
)
def test_a_whole_snapshot_is_used_whatever_the_refs_are(repository, refs):
    for name, content in refs.items():
        write_ref(repository, name, content)

    check_is_found_and_listed(repository)


def test_an_older_snapshot_stands_in_for_one_that_is_not_whole_offline(repository: Path) -> None:
    begun = repository / "snapshots" / OTHER
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    write_ref(repository, "main", OTHER)

    check_is_found_and_listed(repository)


def test_the_ref_chooses_between_two_whole_snapshots(repository: Path) -> None:
    other = repository / "snapshots" / OTHER
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(b"y")
    for name in (OTHER, WHOLE):
        write_ref(repository, "main", f"{name}\n")

        assert find_model("org/m").directory.name == name


def test_a_repository_without_a_whole_snapshot_is_not_here(repository: Path) -> None:
    (repository / "snapshots" / WHOLE / "model.safetensors").unlink()

    with pytest.raises(ModelError, match="is not on this machine and the hub cannot be reached"):
        find_model("org/m")


def test_a_link_into_the_cache_is_no_second_model(repository: Path, tmp_path: Path) -> None:
    """A file behind two links, its own name's and the cache's, was listed with both names."""
    snapshot, blob, own = repository / "snapshots" / WHOLE, tmp_path / "blob", tmp_path / "models"
    blob.write_bytes(b"GGUF")
    (snapshot / "m-Q8_0.gguf").symlink_to(blob)
    own.mkdir()
    (own / "link.gguf").symlink_to(snapshot / "m-Q8_0.gguf")
    (own / "other.gguf").hardlink_to(blob)
    used = {str(own / "link.gguf"): UsedModel("digest", 4, 7.0)}

    listed = [(model.name, model.used_s) for model in local_models(used, [own])]

    assert [each for each in listed if each[0] != "demo"] == [("org/m:Q8_0", 7.0)]
