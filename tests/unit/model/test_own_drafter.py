"""Finding the drafter of a Gemma 4 that `--spec` uses by itself."""

import json
from pathlib import Path

import pytest

from kvchat.cli.settings import resolve
from kvchat.model.checkpoint.drafters import own_drafter
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.gguf.file import GgufModel

NAME = "google/gemma-4-E2B-it"


def write(directory: Path, model_type: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def in_cache(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("place", ["target/assistant", "target/drafter", "target-assistant"])
def test_it_is_below_a_model_or_beside_it(place: str, tmp_path: Path, cache: Path) -> None:
    target = ModelSource("target", write(tmp_path / "target", "gemma4"))
    assert own_drafter(target) is None
    directory = write(tmp_path / place, "gemma4_assistant")
    found = own_drafter(target)
    assert found is not None
    assert found.directory == directory
    assert found.notes == (f"{directory} drafts: --spec found it.",)


def test_it_is_in_the_cache_under_the_published_name(tmp_path: Path, cache: Path) -> None:
    target = ModelSource(NAME, write(in_cache(cache, NAME), "gemma4"))
    directory = write(in_cache(cache, f"{NAME}-assistant"), "gemma4_assistant")
    found = own_drafter(target)
    assert found is not None
    assert (found.name, found.directory) == (f"{NAME}-assistant", directory)


def test_one_of_a_gguf_file_is_in_its_directory(tmp_path: Path, cache: Path) -> None:
    directory = write(tmp_path / "assistant", "gemma4_assistant")
    for architecture, wanted in (("gemma4", directory), ("llama", None)):
        gguf = GgufModel((), {"general.architecture": architecture}, {}, {})
        found = own_drafter(ModelSource("m.gguf", tmp_path, gguf=gguf))
        assert (found and found.directory) == wanted


def test_others_are_left_alone(tmp_path: Path, cache: Path) -> None:
    """A model of another family, a directory of another kind, and one that cannot be read."""
    llama = ModelSource("llama", write(tmp_path / "llama", "llama"))
    write(tmp_path / "llama" / "assistant", "gemma4_assistant")
    gemma = ModelSource("gemma", write(tmp_path / "gemma", "gemma4"))
    write(tmp_path / "gemma" / "assistant", "gemma4_text")
    (write(tmp_path / "gemma" / "drafter", "") / "config.json").write_text("{")
    (tmp_path / "gemma-assistant").write_text("a file")
    assert [own_drafter(llama), own_drafter(gemma)] == [None, None]


@pytest.mark.parametrize(
    ("flags", "is_used"),
    [
        ({"spec": True}, True),
        ({}, False),
        ({"spec": False}, False),
        ({"spec": True, "draft": "none"}, False),
        ({"spec": True, "draft": "ngram"}, False),
    ],
)
def test_it_is_used_with_spec_alone(flags, is_used, tmp_path):
    """An engine of this mode without a draft model looks for the model's own."""
    settings = resolve(flags, {}, tmp_path / "config.toml")
    assert settings.draft_name("target") is None
    assert (settings.speculation_config("target").mode == "auto") == is_used
