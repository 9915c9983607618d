"""Standard streams that are closed, or full: one sentence, and never another program's file."""

import shlex
import subprocess

import pytest

from support.commands import TIMEOUT_S, Shell
from support.fork_server import ForkedShell

GREEDY = ("--temperature", "0", "--max-tokens", "4")


def run(
    shell: Shell, arguments: list[str], redirections: str
) -> "subprocess.CompletedProcess[str]":
    command = f"exec {shlex.join(shell.command(*arguments))} {redirections}"
    return subprocess.run(
        ["sh", "-c", command],
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=shell.home,
    )


@pytest.mark.parametrize("closed", [[0], [1], [0, 1, 2]])
def test_a_closed_stream_keeps_no_prompt_from_its_answer(shell, tiny, closed):
    # With -p given, "Standard input is closed. Give a prompt with -p." was said; with stdout
    # closed, that an AttributeError was a bug, and then nothing: the answer was lost with exit 0.
    asked = ("-m", tiny, *GREEDY, "-p", "hi", "-q")
    done = shell.run(*asked, streams=dict.fromkeys(closed))

    is_said = 1 in closed and 2 not in closed
    assert done.returncode == (1 in closed)
    assert done.stderr == (b"kvchat: Cannot write: Bad file descriptor.\n" if is_said else b"")
    assert len(shell.sessions) == 1
    assert bool(done.stdout) == (1 not in closed)


@pytest.mark.parametrize("redirections", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_stream_may_be_closed_before_python_starts(shell: ForkedShell, redirections: str) -> None:
    done = run(shell, ["config", "show"], redirections)

    assert done.returncode == (redirections != "<&-")
    assert ("Cannot write" in done.stderr) == (redirections == ">&-")
    assert bool(done.stdout) == (redirections == "<&-")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "show"]], ids=" ".join)
def test_what_cannot_be_printed_is_said_in_one_sentence(shell: Shell, arguments: list[str]) -> None:
    done = run(shell, arguments, "> /dev/full")

    assert done.returncode == 1
    assert done.stderr == ("kvchat: Cannot write: No space left on device.\n")
