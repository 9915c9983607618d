"""RunCommand: the tool that runs a shell command in the working directory."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat.tools.toolbox import MOST_RESULT_CHARS, ToolFailed, schema_of

# The environment of commands has no secrets, which keeps them out of what a command prints or
# passes on. A command that looks for them finds them all the same: it runs as the user, who may
# read the environment of all their processes.

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:PASS|PAT|AUTH|CREDS?|PWD)(?:_|$)|KEYS?(?:_|$)|TOKENS?(?:_|$)"
    r"|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|COOKIE"
)
# An address with a password in it, such as that of a database.
_SECRET_VALUE = re.compile(r"://[^/\s@:]*:[^/\s@]+@")
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK"})


def secret_names(environment: Mapping[str, str], allowed: Collection[str] = ()) -> list[str]:
    """Return the variables that look like secrets, without those that are allowed."""
    return [
        name
        for name, value in environment.items()
        if name not in _NO_SECRETS
        and name not in allowed
        and (_SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value))
    ]


class PipeReader:
    """Reads a descriptor to its end, on a thread of its own. Owns the descriptor."""

    def __init__(self, descriptor: int, head_bytes: int, tail_bytes: int) -> None:
        self._descriptor = descriptor
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0
        self._reader = threading.Thread(target=self._read, name="kvchat-pipe", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._descriptor, 1 << 16):
                room = self._head_bytes - len(self._head)
                self._head += piece[: max(0, room)]
                self._tail += piece[max(0, room) :]
                excess = max(0, len(self._tail) - self._tail_bytes)
                del self._tail[:excess]
                self._num_dropped += excess
        os.close(self._descriptor)

    def text(self, wait_s: float = 1.0) -> str:
        """Return what was read, after a wait for the end: a process in the background may write."""
        self._reader.join(wait_s)
        gap = f"\n[{self._num_dropped:,} bytes left out]\n" if self._num_dropped else ""
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        return head + gap + tail


# On Linux the command is the reaper of its orphans: a process that leaves its session, or whose
# parent has ended, stays below the command, where it is found. Elsewhere only the command's process
# group is ended, and a process that made a session of its own goes on.

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
        # It starts no others meanwhile, and stays their parent.
        os.kill(process.pid, signal.SIGSTOP)
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


_COMMAND_S = 120.0
_MOST_OUTPUT_BYTES = 4 * MOST_RESULT_CHARS
_WATCH_S = 0.05


class RunCommand:
    name = "run_command"
    is_allowed_by_call = True
    description = "Run a shell command in the working directory; its output and exit code return."
    parameters = schema_of(("command",), command=("string", "the command, as for sh -c"))

    def __init__(self, root: Path, allowed_secrets: Collection[str] = ()) -> None:
        self._root = root
        self._allowed_secrets = allowed_secrets

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        command = arguments["command"]
        if not isinstance(command, str) or not command.strip() or "\0" in command:
            raise ToolFailed("the command must be a text.")
        secrets = secret_names(os.environ, self._allowed_secrets)
        seen = {name: value for name, value in os.environ.items() if name not in secrets}
        process = start_shell(command, self._root, seen)
        assert process.stdout is not None
        output = PipeReader(os.dup(process.stdout.fileno()), *(_MOST_OUTPUT_BYTES // 2,) * 2)
        process.stdout.close()
        ending = _wait(process, stop)
        text = output.text()
        missing = [name for name in secrets if re.search(rf"\b{re.escape(name)}\b", command)]
        notes = [f"[{name} is a secret, and not given to commands]" for name in missing]
        lines = [text.removesuffix("\n")] if text else []
        return "\n".join([*lines, *notes, f"[{ending}]"])


def _wait(process: "subprocess.Popen[bytes]", stop: threading.Event) -> str:
    """Wait for a process, at most its time; return how it ended, in words."""
    deadline_s = time.monotonic() + _COMMAND_S
    while process.poll() is None:
        if stop.wait(_WATCH_S) or time.monotonic() > deadline_s:
            num_alive = end_all(process)
            alive = f"; {num_alive} of its processes could not be ended" if num_alive else ""
            how = "stopped by the user" if stop.is_set() else f"stopped after {_COMMAND_S:g} s"
            return how + alive
    return f"exit code {process.returncode}"
