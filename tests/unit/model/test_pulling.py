"""`kvchat pull` and `models rm` against a hub of this machine: every failure is one sentence."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants as hub_constants
import pytest

from kvchat.cli import pull as pulling_command
from kvchat.cli.pull import pull
from kvchat.core.errors import KvchatError, ModelError, StoreError, UsageError
from kvchat.model.checkpoint.local_models import local_models, model_lines
from kvchat.model.checkpoint.pulling import fetch, remote_model, require_room
from kvchat.model.checkpoint.removal import removable, remove
from support.fake_hub import FakeHub

GGUF = {f"m-{quant}.gguf": os.urandom(3000 + 500 * n) for n, quant in enumerate(("Q4_K_M", "Q8_0"))}
PLAIN = {"config.json": b"{}", "model.safetensors": os.urandom(999), "pytorch_model.bin": b"no"}
NAME = "org/m"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub(NAME, {**GGUF, "README.md": b"read me"})
    with hub.instead_of(monkeypatch, tmp_path / "cache"):
        monkeypatch.setattr(hub_constants, "DOWNLOAD_CHUNK_SIZE", 500)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield hub


def pulled(quant: str | None = "Q8_0") -> list[Path]:
    model = remote_model(NAME)
    files = model.files_of(quant)
    require_room(model, files)
    return fetch(model, files, lambda sentence: None)


def test_a_format_comes_whole_and_alone(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    pull(f"{NAME}:q8_0")

    assert hub.downloaded == ["m-Q8_0.gguf"]
    assert capsys.readouterr().out == "org/m:q8_0 is here. Chat with it: kvchat -m org/m:q8_0\n"
    [path] = pulled()
    assert path.read_bytes() == GGUF["m-Q8_0.gguf"]
    assert hub.downloaded == ["m-Q8_0.gguf"]  # not again
    model = next(model for model in local_models() if model.name == "org/m:Q8_0")
    assert (model.weights, model.num_bytes) == ("Q8_0", 3500)


def test_a_cut_download_goes_on_where_it_broke(hub: FakeHub) -> None:
    hub.cuts = [1000, *([0] * 10)]  # the first connection brings a thousand bytes, later ones none
    with pytest.raises(ModelError, match="The download of org/m broke off"):
        pulled()

    hub.cuts = []
    num_before = len(hub.downloaded)
    model = remote_model(NAME)
    assert require_room(model, model.files_of("Q8_0")) == 2500  # a thousand bytes are here
    [path] = pulled()
    assert path.read_bytes() == GGUF["m-Q8_0.gguf"]
    assert len(hub.downloaded) == num_before + 1


def test_a_file_with_a_wrong_hash_is_deleted_and_told(hub: FakeHub, tmp_path: Path) -> None:
    hub.sent["m-Q8_0.gguf"] = bytes(3500)

    with pytest.raises(ModelError, match="its hash is wrong"):
        pulled()

    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name.endswith(".gguf")]
    hub.sent.clear()
    assert pulled()[0].read_bytes() == GGUF["m-Q8_0.gguf"]


def test_a_small_file_is_compared_by_gits_hash(hub: FakeHub) -> None:
    hub.files = dict(PLAIN)
    assert {path.name for path in pulled(None)} == {"config.json", "model.safetensors"}
    shutil.rmtree(hub_constants.HF_HUB_CACHE)
    hub.sent["config.json"] = b"[]"
    with pytest.raises(ModelError, match=r"config\.json came with other bytes"):
        pulled(None)


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        ((401, "GatedRepo"), "org/m is gated. Accept its terms"),
        ((403, "GatedRepo"), "org/m is gated. Accept its terms"),
        ((403, ""), "The hub does not let this account have org/m."),
        ((401, ""), "The hub asks for a login before it gives org/m."),
        ((401, "RepoNotFound"), "The hub has no model org/m. Check the spelling; a private"),
        ((404, "RepoNotFound"), "The hub has no model org/m."),
        ((500, ""), "org/m could not be downloaded: "),
    ],
)
def test_a_repository_that_is_not_given_is_one_sentence(hub, refusal, sentence):
    hub.refusal = refusal

    with pytest.raises(ModelError) as caught:
        pulled()

    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_no_connection_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        pulled()
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="Unset HF_HUB_OFFLINE"):
        pulled()


def test_a_disk_without_room_is_told_before_anything_comes(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3499))

    with pytest.raises(StoreError, match=r"org/m needs 3\.42 KiB more, and .* has 3\.42 KiB free"):
        pulled()

    assert not hub.downloaded


def test_a_disk_that_fills_meanwhile_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(ModelError, match="The disk is full"):
        pulled()


@pytest.mark.parametrize(
    ("answer", "verdict", "quant"),
    [
        ("\n", "well", "Q8_0"),
        ("\n", "no room", "Q4_K_M"),
        ("2\n", "fits", "Q8_0"),
        ("q8_0\n", "no room", "Q8_0"),
    ],
)
def test_of_several_formats_the_user_chooses(hub, monkeypatch, answer, verdict, quant):
    verdicts = {"Q4_K_M": "well" if verdict == "no room" else verdict, "Q8_0": verdict}
    monkeypatch.setattr(pulling_command, "_verdicts", lambda place, formats: verdicts)
    stdin = SimpleNamespace(closed=False, isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr("sys.stdin", stdin)

    pull(NAME)

    assert hub.downloaded == [f"m-{quant}.gguf"]


def test_without_a_terminal_the_formats_are_named(hub, monkeypatch):
    monkeypatch.setattr(pulling_command, "_verdicts", lambda place, formats: dict(formats))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match=r"has several formats: Q4_K_M, Q8_0\. Choose one: kvchat"):
        pull(NAME)


@pytest.mark.parametrize("name", ["m", "./org/m", "ollama:m", "https://hub/org/m", "a/b/c", ""])
def test_what_is_no_name_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="names no model of the hub"):
        pull(name)


# models rm


def test_one_format_is_deleted_and_the_other_stays(hub: FakeHub, tmp_path: Path) -> None:
    for quant in ("Q4_K_M", "Q8_0"):
        pulled(quant)
    models = {model.name: model for model in local_models()}

    found = removable("org/m:Q8_0", models["org/m:Q8_0"])
    assert found.num_bytes == 3500
    remove(found)

    left = [path.stat().st_size for path in (tmp_path / "cache").rglob("blobs/*")]
    assert left == [3000]
    last = removable("org/m:Q4_K_M", models["org/m:Q4_K_M"])
    remove(last)
    assert not (tmp_path / "cache" / "models--org--m").exists()


def test_only_files_of_the_cache_are_deleted(hub: FakeHub, tmp_path: Path) -> None:
    """A link that leads out of the cache is removed, and what it leads to stays."""
    [path] = pulled()
    own = tmp_path / "own.gguf"
    own.write_bytes(b"mine")
    path.unlink()
    path.symlink_to(own)
    (path.parent / "m-Q4_K_M.gguf").symlink_to(own)
    model = next(model for model in local_models() if model.name == "org/m:Q8_0")

    remove(removable(model.name, model))

    assert own.read_bytes() == b"mine"
    assert not path.is_symlink()
    for name in ("demo", "ollama:x", str(own), "org/other", "org/m:Q2_K"):
        with pytest.raises(KvchatError):
            removable(name, None)


def test_a_list_shows_formats_and_warm_conversations(tmp_path: Path) -> None:
    directory = tmp_path / "models"
    (directory / "packed").mkdir(parents=True)
    (directory / "packed" / "config.json").write_text(
        '{"quantization_config": {"quant_method": "awq"}, "dtype": "float16"}'
    )
    (directory / "m-q5_k_m.gguf").write_bytes(b"x")

    lines = model_lines({}, [directory], {}, {str(directory / "m-q5_k_m.gguf"): 1})

    shown = {line.split()[0]: line for line in lines}
    assert " Q5_K_M " in shown["m-q5_k_m"]
    assert shown["m-q5_k_m"].endswith(", 1 warm conversation")
    assert " awq " in shown["packed"]
    assert " BF16 " in shown["demo"] or " F32 " in shown["demo"]
