"""A model that was used before is known by its path, and found again where it was moved to."""

import shutil
from pathlib import Path

import pytest

from kvchat.model.checkpoint.local_models import local_models, model_lines, short_names
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.used_models import UsedModels
from support.checkpoints import save_checkpoint, tiny_model
from support.fact_memory import FactMemory


@pytest.fixture
def models(tmp_path: Path) -> UsedModels:
    return UsedModels(FactMemory(), tmp_path / "home")


def _used(models: UsedModels, directory: Path, seed: int = 0) -> str:
    save_checkpoint(directory, tiny_model("llama", seed))
    models.note(find_model(str(directory)))
    return str(directory)


def test_the_model_used_last_is_listed_last(models: UsedModels, tmp_path: Path) -> None:
    first, second = _used(models, tmp_path / "a"), _used(models, tmp_path / "b", seed=1)
    models.note(find_model(first))

    known = models.read()
    assert list(known) == [second, first]
    assert known[first].num_bytes == (tmp_path / "a" / "model.safetensors").stat().st_size
    assert known[first].digest != known[second].digest


def test_a_moved_model_is_found_by_what_it_holds(models: UsedModels, tmp_path: Path) -> None:
    gone = _used(models, tmp_path / "old" / "m")
    _used(models, tmp_path / "others" / "n", seed=1)
    decoy = tmp_path / "home" / "models" / "m"
    save_checkpoint(decoy, tiny_model("llama", seed=2))
    assert models.moved_to(gone) == gone

    shutil.move(gone, tmp_path / "others" / "m")

    assert models.moved_to(gone) == str(tmp_path / "others" / "m")
    shutil.rmtree(tmp_path / "others" / "m")
    assert models.moved_to(gone) is None
    assert models.moved_to(str(tmp_path / "never")) is None


def test_used_files_are_listed_where_they_are_and_the_last_used_first(models, tmp_path):
    """A model that was given as a file was forgotten by `kvchat models`."""
    models.note(find_model("demo"))
    used, gone = _used(models, tmp_path / "a"), _used(models, tmp_path / "b", seed=1)
    shutil.rmtree(gone)
    own = tmp_path / "home" / "models"
    save_checkpoint(own / "c", tiny_model("llama", seed=2))
    (own / "d.gguf").write_bytes(b"GGUF")

    listed = local_models(models.read(), [own])

    names = [model.name for model in listed]
    assert names[:2] == [used, "demo"]
    assert {str(own / "c"), str(own / "d.gguf")} <= set(names)
    assert gone not in names
    lines = model_lines(models.read(), [own], {"coder": used, "other": str(own / "d.gguf")})
    assert lines[0].startswith("a (coder) ")
    assert lines[0].endswith(f"{tmp_path}, used just now")
    assert any(line.startswith("d (other) ") for line in lines)


def test_a_short_name_is_that_of_the_file_used_last(models: UsedModels, tmp_path: Path) -> None:
    first = _used(models, tmp_path / "a" / "m")
    second = _used(models, tmp_path / "b" / "m", seed=1)
    own = tmp_path / "models"
    save_checkpoint(own / "m", tiny_model("llama", seed=2))
    save_checkpoint(own / "n", tiny_model("llama", seed=2))
    assert short_names(models.read(), [own]) == {"m": second, "n": str(own / "n")}
    models.note(find_model(first))
    assert short_names(models.read(), [own])["m"] == first
    shutil.rmtree(first)
    assert short_names(models.read(), [own])["m"] == second


def test_a_file_behind_links_is_listed_once(models: UsedModels, tmp_path: Path) -> None:
    """Two links to one file were two models, and a directory with a link to it a third."""
    own = tmp_path / "home" / "models"
    real = save_checkpoint(own / "real", tiny_model("llama"))
    (tmp_path / "elsewhere").mkdir()
    for link in (own / "link", tmp_path / "elsewhere" / "link"):
        link.symlink_to(real)

    def listed() -> list[str]:
        return [m.name for m in local_models(models.read(), [own]) if m.name != "demo"]

    assert listed() == [str(real)]
    assert {"real", "link"} <= short_names(models.read(), [own]).keys()
    models.note(find_model(str(tmp_path / "elsewhere" / "link")))
    assert listed() == [str(tmp_path / "elsewhere" / "link")]


def test_a_foreign_fact_counts_as_none(tmp_path: Path) -> None:
    memory = FactMemory()
    memory.set("used models", "all", {"/a": {"digest": 3}, "/b": "x"})
    assert UsedModels(memory, tmp_path).read() == {}


def test_directories_are_searched_one_deep_whatever_a_link_in_them_leads_to(tmp_path: Path) -> None:
    """A link to a file that was gone hid all that stood beside it."""
    for folder in ("sub", "sub/deeper", "whole"):
        (tmp_path / folder).mkdir()
    for place in ("a", "sub/b", "sub/deeper/c"):
        (tmp_path / f"{place}.gguf").write_bytes(b"GGUF")
    (tmp_path / "0.gguf").symlink_to(tmp_path / "gone.gguf")
    (tmp_path / "whole" / "config.json").write_text("{}")
    (tmp_path / "whole" / "model.safetensors").write_bytes(bytes(7))

    found = {model.name: model.num_bytes for model in local_models(directories=[tmp_path])}

    names = {name for name in found if name.startswith(str(tmp_path))}
    assert names == {str(tmp_path / each) for each in ("a.gguf", "sub/b.gguf", "whole")}
    assert found[str(tmp_path / "whole")] == 7
