"""`make test-gpu` on a machine that has torch and pytest, but no package index."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands_of(*settings: str) -> str:
    command = ["make", "--no-print-directory", "-n", "test-gpu", *settings]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_without_an_environment_the_given_python_runs_everything_from_the_checkout() -> None:
    commands = commands_of("PYTHON=some-python", "VENV=")

    assert ".venv" not in commands
    assert "-m venv" not in commands
    runs = [line for line in commands.splitlines() if " -m pytest" in line or " -m kvchat" in line]
    assert len(runs) == 3
    for line in runs:
        assert f'PYTHONPATH="{ROOT}/.gpu/site:{ROOT}:{ROOT}/kernels" some-python -m' in line


def test_figures_are_measured_where_a_test_fails_too() -> None:
    assert commands_of("PYTHON=some-python", "VENV=").count("|| status=1") == 3
