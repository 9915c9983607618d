"""Runs a few lines of Python in another process that finds kvchat as this one does."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "tests")),
    }


def run_python(code: str, *arguments: object, timeout_s: float = 120.0, **variables: str) -> str:
    """Run code to its end and return what it printed; fails the test where the code failed.

    `variables` are added to its environment.
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    result = subprocess.run(
        command,
        env=_environment(variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def start_python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start code that speaks through its standard output, line by line."""
    command = [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(
        command, env=_environment({}), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
