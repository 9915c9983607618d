"""The shipped demo pair: its files are the pinned ones, small enough, and fit for kvchat."""

import hashlib
import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from kvchat.model.checkpoint.source import demo_directory

TARGET, DRAFT = demo_directory("target"), demo_directory("draft")
MANIFEST = TARGET.parent / "manifest.json"
# The most parameters and the most bytes of each.
LIMITS = {TARGET: (12_000_000, 24_000_000), DRAFT: (1_500_000, 3_000_000)}
both = pytest.mark.parametrize("directory", LIMITS, ids=lambda path: path.name)


def test_every_shipped_file_has_the_pinned_digest() -> None:
    found = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for directory in (TARGET, DRAFT)
        for path in directory.iterdir()
    }

    assert found == json.loads(MANIFEST.read_text())["files"]


@both
def test_parameters_and_bytes_stay_within_their_limits(directory: Path) -> None:
    max_parameters, max_bytes = LIMITS[directory]
    with safe_open(directory / "model.safetensors", "pt") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118

        assert {each.get_dtype() for each in slices} == {"BF16"}
        assert sum(math.prod(each.get_shape()) for each in slices) <= max_parameters
    assert sum(path.stat().st_size for path in directory.iterdir()) <= max_bytes


@both
def test_the_context_is_long_enough(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())

    assert config["max_position_embeddings"] >= 4096


def test_the_draft_is_one_layer() -> None:
    assert json.loads((DRAFT / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_target_and_draft_share_the_tokenizer_and_its_template(name: str) -> None:
    assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_a_card_fits_on_a_page() -> None:
    assert len((TARGET / "README.md").read_text().splitlines()) <= 90
