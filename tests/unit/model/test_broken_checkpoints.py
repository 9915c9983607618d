"""Checkpoints broken at random: each loads or is refused in one sentence, and soon."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import broken_checkpoints
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.soak_sizes import short_and_long

FAMILIES = ["llama", "qwen3_moe", "gemma3, mixed windows"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One checkpoint of each family, that of the middle one in shards."""
    directories = []
    for family in FAMILIES:
        model_type, settings = SUPPORTED[family]
        directory = tmp_path_factory.mktemp("original") / model_type
        model = tiny_model(model_type, **settings)
        save_checkpoint(directory, model)
        if family == "qwen3_moe":
            (directory / "model.safetensors").unlink()
            model.save_pretrained(directory, max_shard_size="60KB")
        directories.append(directory)
    return directories


@short_and_long(range(6), range(1000, 4000))
def test_a_broken_checkpoint_loads_or_is_refused(size, originals, tmp_path):
    """In one sentence with exit code 3; nothing is unpickled, run, fetched or written elsewhere,
    and no try takes a minute of computing or three gigabytes of memory."""
    arguments = [str(tmp_path), str(size.start), str(size.stop), *map(str, originals)]
    tests = Path(broken_checkpoints.__file__).parents[1]

    done = subprocess.run(
        [sys.executable, broken_checkpoints.__file__, *arguments],
        env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        check=True,
    )

    outcome = json.loads(done.stdout)
    assert outcome["wrong"] == []
    assert outcome["loaded"] > 0
    assert outcome["refused"] > 0
