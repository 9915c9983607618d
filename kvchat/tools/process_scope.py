"""Starts a command in a scope of its own, and ends it with all that it started.

On Linux the command is the reaper of its orphans: a process that leaves its session, or whose
parent has ended, stays below the command, where it is found. Elsewhere only the command's process
group is ended, and a process that made a session of its own goes on.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

# A program of its own: code between fork and exec could wait for another thread's lock for ever.
# It undoes what Python changes at its start: signals that it ignores, and a locale that it sets.
_PR_SET_CHILD_SUBREAPER = 36
_REAPER = f"""
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl({_PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0)
except (OSError, AttributeError):
    pass
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored, signal.SIG_DFL)
if sys.argv[2:] == ["no locale"]:
    os.environ.pop("LC_CTYPE", None)
os.execv("/bin/sh", ["/bin/sh", "-c", sys.argv[1]])
"""
_LINUX = sys.platform == "linux"
_END_S = 2.0
_LOOK_S = 0.01


def start_shell(
    command: str, directory: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a shell command without input; its outputs come together from `stdout`."""
    shell = ["/bin/sh", "-c", command]
    if _LINUX and sys.executable:
        locale = [] if "LC_CTYPE" in environment else ["no locale"]
        shell = [sys.executable, "-I", "-S", "-c", _REAPER, command, *locale]
    return subprocess.Popen(
        shell,
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches kvchat only
    )


def end_all(process: "subprocess.Popen[bytes]") -> int:
    """End a command and all its descendants; return how many of them go on all the same."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(
            process.pid, signal.SIGSTOP
        )  # it starts no others meanwhile, and stays their parent
    deadline_s = time.monotonic() + _END_S
    while (alive := list(_descendants(process.pid))) and time.monotonic() < deadline_s:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return len(alive)


def _descendants(root: int) -> Iterator[int]:
    """Yield the processes below one that have not ended; none without /proc."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (parent := _parent(name)) is not None:
                children.setdefault(parent, []).append(int(name))
    waiting = children.get(root, [])
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _parent(pid: str) -> int | None:
    """Return the parent of a process; None for one that has ended."""
    try:
        stat = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return None
    state, parent = stat.rpartition(b")")[2].split()[:2]  # the name before may hold anything
    return int(parent) if state not in (b"Z", b"X") else None
