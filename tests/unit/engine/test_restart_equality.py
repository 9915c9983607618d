"""Real models whose conversation goes on in another process: the same ids, and only the new ones
computed.

Every engine is built as the command builds it, on weights read anew, with an empty device tier; the
directory on the disk is all that two engines have in common.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvchat.core.types import CachedTokens
from support.architectures import SUPPORTED
from support.assembled import Life, begin_life
from support.cached_contexts import images_of
from support.checkpoints import save_checkpoint, tiny_model
from support.matrix import spread
from support.specimens import random_ids

FAMILIES = [
    "llama",
    "mistral, window",
    "gemma3, mixed windows",
    "gemma3n, shared KV",
    "gpt_oss, sinks",
    "deepseek_v3, wide keys",
]
BLOCK = 16


@dataclass
class Home:
    """A checkpoint, and the directory in which its KV survives."""

    checkpoint: Path
    directory: Path

    def start(self, kept: bool = True, checkpoint: Path | None = None, **settings: Any) -> Life:
        directory = self.directory if kept else None
        return begin_life(checkpoint or self.checkpoint, directory, **settings)

    def answer(self, prompt: list[int], **settings: Any) -> tuple[list[int], CachedTokens]:
        """Answer in a life of its own."""
        life = self.start(**settings)
        answered = life.answer(prompt)
        life.engine.close()
        return answered


def home_of(name: str, directory: Path) -> Home:
    model_type, settings = SUPPORTED[name]
    return Home(save_checkpoint(directory / "model", tiny_model(model_type, **settings)), directory)


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("family", spread(FAMILIES, FAMILIES[2::3]))
def test_a_conversation_that_was_interrupted_goes_on_as_one_that_was_not(family, tmp_path):
    home = home_of(family, tmp_path)
    first, more = random_ids(61, 1), random_ids(17, 2)
    never_interrupted = home.start(kept=False)
    one, _ = never_interrupted.answer(first)
    second = [*first, *one, *more]
    two, _ = never_interrupted.answer(second)

    assert home.answer(first)[0] == one
    resumed, cached = home.answer(second)

    assert resumed == two
    # The last token drawn was never computed.
    assert cached == CachedTokens(disk=full_blocks(len(first) + len(one) - 1))


def test_every_branch_resumes_with_only_its_own_tokens(tmp_path: Path) -> None:
    home = home_of("gemma3, mixed windows", tmp_path)
    trunk = random_ids(70, 1)
    branches = [[*trunk[:cut], *random_ids(21, cut)] for cut in (16, 33, 48, 70)]
    cold = [home.answer(branch, kept=False)[0] for branch in branches]
    before = home.start()
    for branch in branches:
        before.answer(branch)
    before.engine.close()

    for branch, answer in zip(branches, cold, strict=True):
        assert home.answer(branch) == (answer, CachedTokens(disk=full_blocks(len(branch) - 1)))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3, wide keys"])
def test_what_comes_back_is_bit_for_bit_what_was_kept(family: str, tmp_path: Path) -> None:
    home = home_of(family, tmp_path)
    prompt = random_ids(70, 1)
    before = home.start(dtype="bfloat16")
    answer, _ = before.answer(prompt)
    num_blocks = (len(prompt) + len(answer) - 1) // BLOCK
    kept = images_of(before.engine.cache, [*prompt, *answer], 0, num_blocks)
    before.engine.close()
    after = home.start(dtype="bfloat16")
    _, cached = after.answer([*prompt, *answer, 5])

    assert cached.disk == num_blocks * BLOCK
    restored = images_of(after.engine.cache, [*prompt, *answer], 0, num_blocks)
    assert any(kept)
    assert restored == kept
    after.engine.close()


# One thing that changes the numbers, each


def one_weight_changed(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(-1)[1234] += 0.5  # far from what a sample of the file would read
    save_file(tensors, path, metadata={"format": "pt"})


def other_rope(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("change", [one_weight_changed, other_rope])
def test_another_model_meets_nothing_of_this_one(tmp_path, change):
    home = home_of("llama", tmp_path)
    other = shutil.copytree(home.checkpoint, tmp_path / "other")
    change(other)
    prompt = random_ids(70, 1)
    home.answer(prompt)
    cold, _ = home.answer(prompt, kept=False, checkpoint=other)

    assert home.answer(prompt, checkpoint=other) == (cold, CachedTokens())


def test_a_weight_changed_in_place_is_another_model(tmp_path: Path) -> None:
    """The digest is remembered by file; the file is the same, and its contents are not."""
    home = home_of("llama", tmp_path)
    prompt = random_ids(70, 1)
    home.answer(prompt)
    one_weight_changed(home.checkpoint)

    assert home.answer(prompt)[1] == CachedTokens()


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"block_size": 8}])
def test_other_settings_of_one_model_meet_nothing_of_these(tmp_path, settings):
    home = home_of("llama", tmp_path)
    prompt = random_ids(70, 1)
    home.answer(prompt)

    assert home.answer(prompt, **settings)[1] == CachedTokens()
    assert home.answer(prompt)[1] == CachedTokens(disk=full_blocks(len(prompt)))
