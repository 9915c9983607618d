"""A reader that stops reading, and a stderr that takes nothing: neither decides what becomes of an
answer or how soon the program ends.
"""

import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import TIMEOUT_S
from support.fork_server import ForkedShell
from support.matrix import spread

GREEDY = ("--temperature", "0", "--repetition-limit", "0")
_PIPE_BYTES = 4096
_NEARLY_FULL = 3700
_FILLING = b"." * 3000
# The program needs half a second; a busy machine more. Without an end it took for ever.
_DEADLINE_S = 120
_LOOK_AGAIN_S = 0.02
_REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = never_stopping(tiny_model("llama", max_position_embeddings=1 << 17))
    return str(save_checkpoint(tmp_path_factory.mktemp("endless"), model))


class _EndedTooSoon(Exception):
    """The program ended before its stream was full."""


def _num_unread(descriptor: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])


def _ended_by_signal(
    shell: ForkedShell,
    arguments: list[str],
    stdin: bytes,
    number: signal.Signals | None,
    stream: int = 1,
    filling: bytes = _FILLING,
) -> int:
    """Send a signal when one stream, a small pipe that is never read, is full; return the code.

    None sends none: it ends by itself.
    """
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.write(sink, filling)
    process = shell.start(*arguments, streams={stream: sink})
    os.close(sink)
    try:
        process.stdin.write(stdin)
        process.stdin.close()
        end_s = time.monotonic() + _DEADLINE_S
        while _num_unread(source) < _NEARLY_FULL:
            with suppress(TimeoutError):
                code = process.wait(_LOOK_AGAIN_S)
                raise _EndedTooSoon(f"it ended with {code}: {os.read(source, _PIPE_BYTES)!r}")
            assert time.monotonic() < end_s
        if number is not None:
            process.send_signal(number)
        return process.wait(_DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        os.close(source)


@pytest.mark.parametrize(
    ("flags", "stdin", "number", "code"),
    [
        ([], b"Hello", signal.SIGTERM, 143),
        (["--output-format", "stream-json"], b"Hello", signal.SIGHUP, 129),
        (["--input-format", "lines"], b"Hello\nmore\n", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_an_answer_that_nobody_reads_and_keeps_it(
    shell: ForkedShell,
    endless: str,
    flags: list[str],
    stdin: bytes,
    number: signal.Signals,
    code: int,
) -> None:
    """The first signal was ignored for as long as the reader stalled."""
    assert _ended_by_signal(shell, ["-m", endless, *GREEDY, *flags], stdin, number) == code

    [kept] = shell.sessions
    assert kept.read_text().count('"finish":"cancelled"') == 1


def test_a_signal_ends_a_batch_that_nobody_reads(shell: ForkedShell, endless: str) -> None:
    flags = ["-m", endless, *GREEDY, "--input-format", "jsonl", "--output-format", "stream-json"]

    assert _ended_by_signal(shell, flags, b'{"prompt": "Hello"}\n', signal.SIGTERM) == 143


@pytest.mark.parametrize(
    ("form", "stdin"),
    spread(
        [("text", b"Hello"), ("lines", b"Hello\nmore\n"), ("jsonl", b'{"prompt": "Hello"}\n')],
        [("lines", b"Hello\nmore\n")],
    ),
)
def test_a_time_limit_ends_an_answer_that_nobody_reads(shell, endless, form, stdin):
    """The limit ended the answer, and the program waited for its reader without end."""
    flags = ["-m", endless, *GREEDY, "--input-format", form, "--output-format", "stream-json"]
    try:
        code = _ended_by_signal(shell, [*flags, "--timeout", "3"], stdin, None)
    except _EndedTooSoon:  # loading shares the limit, and the processors may be busy
        code = _ended_by_signal(shell, [*flags, "--timeout", "30"], stdin, None)

    assert code == 124


def test_a_signal_ends_a_program_whose_stderr_nobody_reads(shell: ForkedShell, tiny: str) -> None:
    flags = ["-m", tiny, *GREEDY, "--input-format", "lines"]
    complaints = b"/nothing\n" * 60  # a short line each: a pipe takes a write whole or not at all

    assert _ended_by_signal(shell, flags, complaints, signal.SIGINT, stream=2) == 130


def test_an_interrupt_ends_an_export_that_nobody_reads(shell: ForkedShell, tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    long.write_text('[{"role": "user", "content": "' + "word " * 40_000 + '"}]')
    imported = shell.run("sessions", "import", str(long)).stdout.decode().strip()

    arguments = ["sessions", "export", imported]
    assert _ended_by_signal(shell, arguments, b"", signal.SIGINT, filling=b"") == 130


_TWO_THREADS_COMPLAIN = """
import sys, threading
from kvchat.cli.streams import Interrupted, Interruption, forget_streams, prepare_streams

def complain():
    for _ in range(9):
        print("complaint " * 100, file=sys.stderr)

prepare_streams()
with Interruption():
    threading.Thread(target=complain, daemon=True).start()
    sys.stdin.readline()
    try:
        print("both", flush=True)  # from here on a signal comes; its traceback would wait, too
        complain()
    except Interrupted as error:
        forget_streams()
        raise SystemExit(error.code)
"""


def test_a_signal_ends_a_program_while_another_thread_waits_for_the_reader() -> None:
    """The waiting thread held the lock of stderr's buffer, and the main thread waited for it."""
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    process = subprocess.Popen(
        [sys.executable, "-c", _TWO_THREADS_COMPLAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sink,
        cwd=_REPOSITORY,
    )
    os.close(sink)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        end_s = time.monotonic() + _DEADLINE_S
        while _num_unread(source) < _PIPE_BYTES - 1010:
            assert time.monotonic() < end_s
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stdout.readline() == b"both\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(_DEADLINE_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(source)


_INTERRUPTED_AT_ITS_END = """
import signal
from kvchat.cli import main

main._run = lambda: 130
main.forget_streams = lambda: signal.raise_signal(signal.SIGINT)
main.run()
"""


def test_a_second_interrupt_prints_no_traceback() -> None:
    """It came while the first one ended `kvchat bench`: Python's own traceback, and no code 130."""
    command = [sys.executable, "-c", _INTERRUPTED_AT_ITS_END]
    done = subprocess.run(command, capture_output=True, cwd=_REPOSITORY, timeout=_DEADLINE_S)

    assert (done.returncode, done.stderr) == (130, b"")


_UNDER_NOHUP = """
import signal
from kvchat.cli.streams import Interruption

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Interruption():
    signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGHUP)
"""


def test_a_command_under_nohup_outlives_its_terminal() -> None:
    """`nohup kvchat bench` and `nohup kvchat -p` were ended by the end of their terminal."""
    command = [sys.executable, "-c", _UNDER_NOHUP]
    done = subprocess.run(command, capture_output=True, cwd=_REPOSITORY, timeout=_DEADLINE_S)

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture(params=["full", "closed", "closed at its other end"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """A stderr that takes nothing."""
    if request.param == "closed":
        yield None
        return
    source, sink = os.pipe()
    os.close(source)
    descriptor = os.open("/dev/full", os.O_WRONLY) if request.param == "full" else sink
    yield descriptor
    for end in {descriptor, sink}:
        os.close(end)


def test_an_unwritable_stderr_costs_no_answer(shell, tiny, unwritable):
    """What stderr refused was taken for a failed answer: exit code 1, or 141."""
    done = shell.run(
        *("-m", tiny, *GREEDY, "-p", "Hi", "--stats", "--max-tokens", "4"),
        streams={2: unwritable},
        KVCHAT_NO_SUCH_THING="1",
    )

    assert done.returncode == 0
    assert done.stdout


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_an_unwritable_stderr_changes_no_code(shell, tiny, redirection):
    """Not a fork, for Python itself writes to stderr once more where torch has not been loaded."""
    command = shlex.join(shell.command("-m", tiny, *GREEDY, "-p", ""))
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {redirection}"],
        env={**shell.environment, "KVCHAT_NO_SUCH_THING": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        cwd=shell.home,
    )

    assert done.returncode == 2
    assert not done.stdout
