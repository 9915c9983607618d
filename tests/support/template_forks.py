"""Processes of chat templates that cost a fork: one has imported Jinja, and forks for every other.

Each is a process of its own with its limits, as `chat/template_process.py` starts it. Starting
Python and importing Jinja took most of a short test, and most tests have a template.

`python -I -S -c PROGRAM PATH SOCKET` serves the socket of that number.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from kvchat.chat import template_process

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from support.template_fork_server import serve; serve(int(sys.argv[2]))"
)
_MOST_BYTES = 1 << 16


class TemplateForks:
    """Stands in for `subprocess` where a template's process is started. A fork may use it too."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process that forks. Forks of this process share it if it is started before."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), *sys.path]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(path)]
        with closing(theirs):
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def Popen(self, command: Sequence[str], **_: object) -> "TemplateFork":
        """Fork what the command would start; its standard input and output are pipes."""
        with self._lock:
            if self._process is None:
                self.start()
        (stdin, ours_in), (ours_out, stdout) = os.pipe(), os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with closing(theirs):
            ends = [stdin, stdout, theirs.fileno()]
            socket.send_fds(self._socket, [command[-1].encode()], ends)
        os.close(stdin)
        os.close(stdout)
        return TemplateFork(ours, ours_in, ours_out)

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait(60.0)

    def use(self) -> None:
        """Have this process, and its forks, start templates so."""
        template_process.subprocess = self  # type: ignore[assignment]


class TemplateFork:
    """A template's process: its streams and its end, as `subprocess.Popen` shows them."""

    def __init__(self, news: socket.socket, stdin: int, stdout: int) -> None:
        self._news = news
        self.stdin: IO[bytes] = open(stdin, "wb")  # noqa: SIM115
        self.stdout: IO[bytes] = open(stdout, "rb")  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = int(news.recv(_MOST_BYTES))

    def kill(self) -> None:
        if self.poll() is None:  # until its end is told, no other process has its number
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._news], [], [], 0.0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            ending = self._news.recv(_MOST_BYTES)  # none where the server has ended before
            self.returncode = int(ending or -signal.SIGKILL)
            self._news.close()
        return self.returncode
