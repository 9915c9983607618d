"""ChatScreen: the interactive chat in this process, and the screen a person would see.

The chat runs while the test waits for it, on an event loop that stands still otherwise: nothing
happens between two waits but what threads do. Its keys come through a pipe, and what it draws goes
to an emulated terminal. Of a real terminal it lacks: raw mode and echo, job control, programs that
use the terminal beside the chat, and standard error as a stream of the process.
"""

import asyncio
import io
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input

from kvchat.terminal import dialogue, keys
from kvchat.terminal.prompt import Terminal
from kvchat.terminal.repl import run_repl
from support.screen import Screen
from support.scripted_engine import ScriptedEngine
from support.scripted_repl import chat_setup, parsed, read_half


class _Output(io.StringIO):
    """What was written and not yet shown."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.has_more = asyncio.Event()

    def fileno(self) -> int:
        raise io.UnsupportedOperation

    def write(self, text: str) -> int:
        self.has_more.set()
        return super().write(text)

    def take(self) -> bytes:
        """Return what was written since, as a terminal gets it."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        self.has_more.clear()
        return text.replace("\r\n", "\n").replace("\n", "\r\n").encode(errors="surrogateescape")


def _begin_log(path: Path) -> Callable[[], None]:
    """Write the log to a file; return what ends that."""
    logger, handler = logging.getLogger(), logging.FileHandler(path)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def end() -> None:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()

    return end


class ChatScreen(Screen):
    """Starts the chat that `support.scripted_repl` describes; its files are below `home`."""

    def __init__(
        self,
        home: Path,
        arguments: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(columns, rows)
        self._size = Size(rows, columns)
        self._output = _Output()
        self._exit = ExitStack()
        self._keys = self._exit.enter_context(create_pipe_input())
        self._patch = patch = self._exit.enter_context(pytest.MonkeyPatch.context())
        given = {"HOME": "/nonexistent", "TERM": "xterm-256color", **(environment or {})}
        for name, value in given.items():
            patch.setenv(name, value)
        for name in ("_TWICE_S", "_ESCAPE_TWICE_S"):
            patch.setattr(keys, name, 60.0)
        patch.setattr(sys, "stderr", self._output)
        asked = parsed(arguments)
        if asked.reads_half:
            patch.setattr(ScriptedEngine, "read_ahead", read_half)
        if asked.log is not None:
            self._exit.callback(_begin_log(asked.log))
        self._home = home
        terminal = Terminal(self._keys, self._output, lambda: self._size, "xterm-256color")
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._running = self._loop.create_task(run_repl(chat_setup(asked, terminal)))

    def _read(self, within_s: float = 0.05) -> bool:
        if not self._running.done() and not self._output.has_more.is_set():
            self._loop.run_until_complete(self._more(within_s))
        if self._running.done() and self._running.exception() is not None:
            self._running.result()
        data = self._output.take()
        self._feed(data)
        return bool(data) or not self._running.done()

    async def _more(self, within_s: float) -> None:
        """Let the chat run until it has drawn or ended, or a moment has passed."""
        drawn = asyncio.ensure_future(self._output.has_more.wait())
        waited_for = (self._running, drawn)
        await asyncio.wait(waited_for, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        drawn.cancel()

    def type(self, text: str) -> Self:
        self._keys.send_text(text)
        return self

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, and send the signal that says so."""
        self._becomes(columns, rows)
        self._size = Size(rows, columns)
        os.kill(os.getpid(), signal.SIGWINCH)

    def exit_code(self) -> int:
        return self._loop.run_until_complete(self._running)

    def abandon(self) -> None:
        """End the chat, and leave the files that SIGKILL would have left at this moment."""
        with TemporaryDirectory() as kept:
            shutil.copytree(self._home, kept, dirs_exist_ok=True)
            self.close()
            shutil.rmtree(self._home)
            shutil.copytree(kept, self._home)

    def close(self) -> None:
        """End the chat, whatever it does."""
        if self._loop.is_closed():
            return
        self._patch.setattr(dialogue, "_STOP_PATIENCE_S", 0.05)
        self._running.cancel()
        self._loop.run_until_complete(asyncio.wait((self._running,)))
        self._runner.close()
        self._exit.close()


class PlainChat(ChatScreen):
    """The chat on plain lines: it reads a pipe, and what is typed is echoed as a terminal does.

    Ctrl-C is the signal that a terminal makes of it. Other keys of line editing are not there.
    """

    def __init__(self, home: Path, arguments: Sequence[str], **settings: Any) -> None:
        super().__init__(home, arguments, **settings)
        source, sink = os.pipe()
        stdin = self._exit.enter_context(open(source))  # noqa: SIM115
        self._keyboard = self._exit.enter_context(open(sink, "w", buffering=1))  # noqa: SIM115
        self._patch.setattr(sys, "stdin", stdin)
        self._patch.setattr(sys, "stdout", self._output)

    def type(self, text: str) -> Self:
        if text == "\x03":
            self._feed(b"^C")
            os.kill(os.getpid(), signal.SIGINT)
            return self
        line = text.replace("\r", "\n")
        self._feed(line.replace("\n", "\r\n").encode())
        self._keyboard.write(line)
        self._keyboard.flush()
        return self
