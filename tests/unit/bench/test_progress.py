"""A benchmark says that it goes on, and an interrupted one leaves nothing behind."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvchat.bench import scenarios
from kvchat.bench.processes import ProcessFailed, in_a_process
from kvchat.bench.progress import Progress
from kvchat.bench.setup import BenchSetup
from kvchat.cli.bench import BenchRequest, run_bench
from kvchat.cli.streams import Interrupted
from kvchat.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[3]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Lines(io.StringIO):
    """Says when a third line has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.has_three = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.getvalue().count("\n") >= 3:
            self.has_three.set()
        return count


def test_a_phase_is_told_again_and_again() -> None:
    """`bench startup --quick` was silent for minutes, and `bench kv` told no more than its time."""
    stderr = _Lines()
    with Progress(True, stderr, interval_s=0.001) as progress:
        progress.begin("turns (1 of 9)")
        assert stderr.has_three.wait(30)
        progress.begin_part("int8, 1 of 4 codes")
        progress.begin("cold (2 of 9)")

    lines = stderr.getvalue().splitlines()
    assert any(line.startswith("kvchat bench: turns (1 of 9): int8, 1 of 4 co") for line in lines)
    assert any(line.startswith("kvchat bench: cold (2 of 9), ") for line in lines)
    assert lines[0] == "kvchat bench: starting, 0 s"
    assert "kvchat bench: turns (1 of 9), 0 s" in lines
    assert "\r" not in stderr.getvalue()


def test_on_a_terminal_it_is_one_line_that_goes() -> None:
    stderr = _Terminal()
    with Progress(False, stderr) as progress:
        progress.begin("cold (2 of 2)")

    assert "\n" not in stderr.getvalue()
    assert stderr.getvalue().endswith("cold (2 of 2), 0 s\r\x1b[K")


def test_a_stderr_that_takes_nothing_spoils_no_measurement() -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.write("")
    stderr = _Lines()
    stderr.write = closed.write  # type: ignore[method-assign]
    with Progress(True, stderr) as progress:
        progress.begin("cold")


def test_a_function_runs_in_a_process_of_its_own() -> None:
    assert in_a_process(os.getpid) != os.getpid()
    with pytest.raises(ProcessFailed, match="without a result"):
        in_a_process(os._exit, 3)
    with pytest.raises(ProcessFailed, match="ZeroDivisionError"):
        in_a_process(divmod, 1, 0)


_WAITS = """
import os, sys, time
from kvchat.bench.processes import in_a_process
print(os.getpid(), flush=True)
try:
    in_a_process(time.sleep, 600)
except KeyboardInterrupt:
    os._exit(130)
"""


def test_an_interrupted_one_leaves_no_process_and_no_word() -> None:
    """A pool left "leaked semaphore objects", and its worker a traceback."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels"))
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    group = int(process.stdout.readline())
    end_s = time.monotonic() + 60
    while len(_members(group)) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    os.killpg(group, signal.SIGINT)  # as a terminal sends it

    _, told = process.communicate(timeout=60)

    assert process.returncode == 130
    assert told == b""
    while _members(group) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert _members(group) == []


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (signal.SIGTERM, 1, ExitCode.TERMINATED),
        (signal.SIGHUP, 1, ExitCode.HANGUP),
        (signal.SIGINT, 2, ExitCode.INTERRUPT),
    ],
)
def test_signals_leave_no_random_weights(number, times, code, tmp_path, monkeypatch):
    """Each `timeout 300 kvchat bench` left a checkpoint of 0.8 GB in /tmp, and then a second Ctrl-C
    that came while an engine closed.
    """
    weights: list[Path] = []

    def interrupted(setup: BenchSetup) -> None:
        weights.extend(tmp_path.rglob("*.safetensors"))
        with ExitStack() as closing:
            for _ in range(times):
                closing.callback(os.kill, os.getpid(), number)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scenarios, "scenario", lambda name: interrupted)
    request = BenchRequest(
        *(("memory",), None, "tiny", "float32", "auto", "cpu", None, 16, 1), *(1, True, None, None)
    )
    with pytest.raises(Interrupted) as caught:
        run_bench(request)

    assert caught.value.code == code
    assert weights
    assert list(tmp_path.iterdir()) == []


def _members(group: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True)
    pairs = re.findall(r"(\d+) +(\d+)", listed.stdout)
    return [int(pid) for pid, pgid in pairs if int(pgid) == group]
