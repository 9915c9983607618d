"""org/name:QUANT downloads that model's files from the hub, and no others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import tiny_model
from support.fake_hub import FakeHub
from support.gguf_files import write_gguf


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1))
    content = path.read_bytes()
    names = ("m-Q4_K_M.gguf", "Q8_0/m-Q8_0.gguf", "m-BF16.gguf", "mmproj-m-F16.gguf")
    hub = FakeHub("org/m-GGUF", dict.fromkeys((*names, "README.md"), content))
    with hub.instead_of(monkeypatch, tmp_path / "cache"):
        yield hub


@pytest.mark.parametrize(
    ("quant", "file"), [("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", "Q8_0/m-Q8_0.gguf")]
)
def test_only_the_files_of_the_format_asked_for_are_downloaded(quant, file, hub):
    source = find_model(f"org/m-GGUF:{quant}")

    assert hub.downloaded == [file]
    assert source.weight_files[0].name == Path(file).name
    assert source.weight_files[0].read_bytes() == hub.files[file]
    assert source.gguf is not None
    assert source.gguf.architecture == "llama"


def test_a_file_that_is_here_is_not_downloaded_again(hub: FakeHub) -> None:
    for _ in range(2):
        find_model("org/m-GGUF:Q8_0")

    assert hub.downloaded == ["Q8_0/m-Q8_0.gguf"]


def test_a_format_that_the_repository_lacks_is_told_with_those_it_has(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"org/m-GGUF has no GGUF file of Q2_K") as caught:
        find_model("org/m-GGUF:Q2_K")

    assert caught.value.hint == "It has BF16, Q4_K_M, Q8_0."
    assert not hub.downloaded


def test_all_parts_of_a_model_in_parts_are_downloaded(hub: FakeHub) -> None:
    content = hub.files["m-BF16.gguf"]
    hub.files = {
        f"big/m-Q6_K-0000{n}-of-00002.gguf": content[: len(content) // n] for n in (1, 2)
    } | {"m-BF16.gguf": content}

    with pytest.raises(ModelError):  # its parts are no parts: only that both came is of interest
        find_model("org/m-GGUF:Q6_K")

    assert sorted(hub.downloaded) == [
        "big/m-Q6_K-00001-of-00002.gguf",
        "big/m-Q6_K-00002-of-00002.gguf",
    ]


def test_a_repository_that_is_not_there_is_told(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="The hub has no model org/other") as caught:
        find_model("org/other:Q8_0")

    assert caught.value.hint
