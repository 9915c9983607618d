"""TemplateProcess: renders a chat template in its own process, with limits on time, memory, output.

`template.py` decides what to render and uses the text.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import kvchat
from kvchat.core.errors import ModelError, TimedOut

_CPU_LIMIT_S = 2.0  # a real template renders a conversation in well under a millisecond
_WALL_LIMIT_S = 60.0  # for a busy machine, where two seconds of CPU time can take that long
_MEMORY_BYTES = 512 << 20
_TEXT_BYTES = 1 << 20  # about ten thousand times a template's built-in system prompt
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kvchat.chat.template_child import main; main(*json.loads(sys.argv[2]))"
)


class RenderingFailed(Exception):
    """The template refused or failed to render; the message says why, without a full stop."""


class TemplateProcess:
    """Renders one template. The process starts to compile it at once, in the background.

    `limit_s` is the user's limit for one rendering in seconds, None for no limit. `child` is a
    process that was started in advance. Thread-safe. If the process has ended, by itself or by its
    limits, the next call starts it again.
    """

    def __init__(
        self, source: str, limit_s: float | None = None, child: "RenderingChild | None" = None
    ) -> None:
        self._source = source
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child = child or RenderingChild()
        self._child.begin(source)

    def compile(self) -> frozenset[str]:
        """Wait until the template is compiled; return the names of the variables that it reads.

        Raises ModelError if it is not valid.
        """
        with self._lock:
            try:
                return self._compiled().names
            except RenderingFailed as error:
                raise ModelError(
                    f"The checkpoint's chat template is not valid: {error}.",
                    "Use a checkpoint with a working template.",
                ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: dict[str, object],
        clock: datetime,
        tools: Sequence[dict[str, Any]] | None = None,
        is_open: bool = True,
    ) -> str:
        """Render a conversation at the time `clock`, with `is_open` up to the next answer's start.

        Raises RenderingFailed if the template refuses or exceeds its limits, and TimedOut if the
        limit that it exceeded is the user's `limit_s`.
        """
        request = {
            "messages": messages,
            "tools": tools,
            "is_open": is_open,
            "variables": variables,
            "clock": clock.isoformat(),
            "limit_s": self._limit_s,
        }
        with self._lock:
            child = self._compiled()
            child.send(request)
            return str(self._receive(child, self._limit_s)["text"])

    def _compiled(self) -> "RenderingChild":
        """Return a process that has compiled the template."""
        if self._child.has_ended:
            self._child = RenderingChild()
            self._child.begin(self._source)
        if not self._child.is_compiled:
            # The user's limit does not include the start.
            self._child.names = frozenset(self._receive(self._child, None)["names"])
            self._child.is_compiled = True
        return self._child

    def _receive(self, child: "RenderingChild", limit_s: float | None) -> dict[str, Any]:
        """Wait for a reply within the limits; end a process that has not replied by then."""
        try:
            reply = child.receive(time.monotonic() + _WALL_LIMIT_S)
        except TimeoutError as error:
            child.end()
            if limit_s is not None and limit_s < _CPU_LIMIT_S:
                raise TimedOut(
                    f"The model's chat template took longer than {limit_s:g} s.",
                    "Raise --timeout, or use a checkpoint with a working template.",
                ) from error
            raise RenderingFailed(f"it takes longer than {_CPU_LIMIT_S:g} s") from error
        except BaseException:  # such as a signal: the next request would read this one's reply
            child.end()
            raise
        if "failed" in reply:
            raise RenderingFailed(reply["failed"])
        return reply


class RenderingChild:
    """The process and its two pipes, for one template.

    The process ends with its parent process, or when this object is deleted. Starting takes about
    0.1 s or more, so a caller may start one before it has the template.
    """

    def __init__(self) -> None:
        path = [str(Path(kvchat.__file__).parents[1]), *sys.path]
        limits = [_CPU_LIMIT_S, _MEMORY_BYTES, _TEXT_BYTES]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(path), json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches kvchat only
        )
        assert self._process.stdout is not None
        self._reader: IO[bytes] = self._process.stdout
        self._end = weakref.finalize(self, _end_process, self._process)
        self.is_compiled = False
        self.names: frozenset[str] = frozenset()

    def begin(self, source: str) -> None:
        """Send the template without waiting; the reply says whether it is valid."""
        # A thread, because a large template fills the pipe before the process reads.
        threading.Thread(target=self.send, args=({"source": source},), daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return not self._end.alive or self._process.poll() is not None

    def end(self) -> None:
        """Kill the process. Idempotent."""
        self._end()

    def send(self, request: dict[str, Any]) -> None:
        """Send a request; does nothing if the process has ended."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """Return the next reply.

        `deadline_s` is a time of `time.monotonic`. Raises TimeoutError at the deadline, or if the
        process was ended by its CPU limit; RenderingFailed if it ended for another reason.
        """
        data = b""
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        while not data.endswith(b"\n"):
            if not waiting.poll(max(0.0, deadline_s - time.monotonic()) * 1000.0):
                raise TimeoutError
            piece = os.read(self._reader.fileno(), 1 << 20)
            if not piece:
                if self._process.wait() == -signal.SIGPROF:
                    raise TimeoutError
                raise RenderingFailed("the process that renders it ended")
            data += piece
        reply = json.loads(data)
        assert isinstance(reply, dict)
        return reply


def _end_process(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError, ValueError):
            assert pipe is not None
            pipe.close()
