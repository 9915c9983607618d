"""`make test-gpu` on a machine that has torch and pytest, but no package index.

A CPU stands in for the GPU: its tests are skipped, its figures are a CPU's, and the whole way there
is the same.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What comes with the Python of such a machine: torch, transformers, triton and pytest, what these
# need, and programs that people have beside them.
BARE = [
    "torch",
    "triton",
    "transformers",
    "pytest",
    "pytest-xdist",
    "accelerate",
    "annotated-doc",
    "anyio",
    "certifi",
    "click",
    "execnet",
    "filelock",
    "fsspec",
    "h11",
    "hf-xet",
    "huggingface_hub",
    "idna",
    "iniconfig",
    "jinja2",
    "llvmlite",
    "markdown-it-py",
    "markupsafe",
    "mdurl",
    "mpmath",
    "networkx",
    "numpy",
    "packaging",
    "pip",
    "pluggy",
    "psutil",
    "pydantic",
    "pydantic_core",
    "pygments",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "setuptools",
    "shellingham",
    "sympy",
    "tokenizers",
    "tqdm",
    "typer",
    "typing_extensions",
    "typing-inspection",
    "urllib3",
    "wheel",
    "xxhash",
    "annotated-types",
    "kvchat",
]
# Python imports it before anything else. Names are those of distributions, in any spelling.
BARE_PYTHON = """
import re, sys
from importlib.metadata import packages_distributions

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

there = {plain(name) for name in ALLOWED}
hidden = {
    module
    for module, names in packages_distributions().items()
    if not there & {plain(name) for name in names}
}

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""


@pytest.mark.matrix  # half a minute; what it runs has tests of its own
def test_without_an_index_the_whole_command_runs_from_the_checkout(tmp_path: Path) -> None:
    """On its first real machine two packages were missing, and a scenario imported a third."""
    checkout, bare = tmp_path / "checkout", tmp_path / "bare"
    for name in ("Makefile", "pyproject.toml", "kvchat", "kernels", "tests"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        checkout.mkdir(exist_ok=True)
        copy(ROOT / name, checkout / name)
    carried = re.search(r"GPU_PACKAGES := ((\\\n|.)*)", (ROOT / "Makefile").read_text())
    assert carried is not None
    allowed = [*BARE, *carried[1].replace("\\\n", " ").split()]
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"ALLOWED = {allowed}\n{BARE_PYTHON}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{bare}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = {"PYTHON": str(python), "VENV": "", "GPU_DEVICE": "cpu", "GPU_SHAPE": "tiny"}
    settings |= {"GPU_JOBS": "1", "GPU_BENCH": "--quick --repeats 1"}

    done = subprocess.run(
        ["make", "test-gpu", *(f"{name}={value}" for name, value in settings.items())],
        cwd=checkout,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"\d{3,} skipped", done.stdout), "no test of a GPU was collected"
    assert not re.search("passed|failed|error", done.stdout)
    assert ".venv" not in done.stderr
    [figures] = (checkout / ".gpu" / "figures").glob("*.json")
    results = {found["scenario"]: found for found in json.loads(figures.read_text())["results"]}
    assert list(results) == ["kernels", "decode", "prefill"]
    assert "CUDA device" in results["kernels"]["refusal"]
    assert results["decode"]["figures"]
    assert results["prefill"]["figures"]


def test_figures_are_measured_where_a_test_fails_too() -> None:
    command = ["make", "--no-print-directory", "-n", "test-gpu", "PYTHON=some-python", "VENV="]
    commands = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert commands.count("|| status=1") == 2
    assert commands.count("timeout") == 1  # one definition, used twice
    assert commands.count("$limited") == 2
