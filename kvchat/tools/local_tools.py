"""The built-in tools: read, list and search files below a directory, and run a command there.

Paths are resolved with their links first, so none leads out of the directory. A command may reach
whatever the user may reach: that is why every call is asked for.
"""

import fnmatch
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat.core.bounded_files import read_bounded
from kvchat.tools.toolbox import MOST_RESULT_CHARS, Tool, ToolFailed

_MOST_FILE_BYTES = 16 << 20
_MOST_SEARCHED_BYTES = 1 << 20
_MOST_ENTRIES = 500
_MOST_LINES = 400
_SEARCH_S = 20.0
_COMMAND_S = 120.0
_MOST_OUTPUT_BYTES = 4 * MOST_RESULT_CHARS
_LOOK_S = 0.05
# Directories of other programs: thousands of files that are not the user's own work.
_PASSED_OVER = frozenset({".git", ".venv", "node_modules", "__pycache__"})


def local_tools(directory: Path) -> list[Tool]:
    """Return the tools for one directory."""
    root = directory.resolve()
    return [ReadFile(root), ListFiles(root), SearchFiles(root), RunCommand(root)]


def _schema(required: tuple[str, ...], **properties: tuple[str, str]) -> dict[str, Any]:
    described = {
        name: {"type": kind, "description": meaning} for name, (kind, meaning) in properties.items()
    }
    return {"type": "object", "properties": described, "required": list(required)}


def _inside(root: Path, name: object) -> Path:
    """Return a path below the directory; raises ToolFailed for one that leads out of it."""
    if not isinstance(name, str) or "\0" in name:
        raise ToolFailed("the path must be a text.")
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ToolFailed(f"{name} is not below the working directory.")
    return path


def _directory(root: Path, arguments: Mapping[str, Any]) -> Path:
    """Return the directory that a call names, the working directory if it names none."""
    name = arguments.get("path") or "."
    path = _inside(root, name)
    if not path.is_dir():
        raise ToolFailed(f"there is no directory {name}.")
    return path


class ReadFile:
    name = "read_file"
    is_allowed_by_call = False
    description = "Read a text file below the working directory."
    parameters = _schema(
        ("path",),
        path=("string", "the file, relative to the working directory"),
        first_line=("integer", "the line to begin with; 1 is the first"),
    )

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        path = _inside(self._root, arguments["path"])
        first = max(1, int(arguments.get("first_line") or 1))
        if not path.is_file():
            raise ToolFailed(f"there is no file {arguments['path']}.")
        lines = _text_of(path, _MOST_FILE_BYTES).splitlines()
        shown = lines[first - 1 : first - 1 + _MOST_LINES]
        rest = len(lines) - (first - 1 + len(shown))
        more = [f"[{rest:,} more lines; first_line={first + len(shown)}]"] if rest > 0 else []
        return "\n".join([*shown, *more])


class ListFiles:
    name = "list_files"
    is_allowed_by_call = False
    description = "List the files below a directory, by a pattern such as *.py."
    parameters = _schema(
        (),
        path=("string", "the directory; the working directory if it is missing"),
        pattern=("string", "only names like this; all if it is missing"),
    )

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        start = _directory(self._root, arguments)
        names: list[str] = []
        is_cut = False
        for path in _files(start, arguments.get("pattern") or "*", stop):
            if len(names) == _MOST_ENTRIES:
                is_cut = True
                break
            names.append(str(path.relative_to(self._root)))
        more = [f"[more than {_MOST_ENTRIES} files; give a path or a pattern]"] if is_cut else []
        return "\n".join([*names, *more]) or "There is no such file."


class SearchFiles:
    name = "search_files"
    is_allowed_by_call = False
    description = "Find the lines that contain a text, in files below a directory."
    parameters = _schema(
        ("text",),
        text=("string", "the text, not a pattern; upper and lower case are the same"),
        path=("string", "the directory; the working directory if it is missing"),
        pattern=("string", "only in files with names like this"),
    )

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        start = _directory(self._root, arguments)
        wanted = str(arguments["text"]).lower()
        deadline_s = time.monotonic() + _SEARCH_S
        found: list[str] = []
        for path in _files(start, arguments.get("pattern") or "*", stop):
            if time.monotonic() > deadline_s or len(found) >= _MOST_LINES:
                found.append("[there may be more]")
                break
            found += self._lines(path, wanted)
        return "\n".join(found) or "No line contains it."

    def _lines(self, path: Path, wanted: str) -> Iterator[str]:
        with suppress(ToolFailed):
            name = path.relative_to(self._root)
            for number, line in enumerate(_text_of(path, _MOST_SEARCHED_BYTES).splitlines(), 1):
                if wanted in line.lower():
                    yield f"{name}:{number}: {line.strip()[:300]}"


class RunCommand:
    name = "run_command"
    is_allowed_by_call = True
    description = "Run a shell command in the working directory; its output and exit code return."
    parameters = _schema(("command",), command=("string", "the command, as for sh -c"))

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        command = arguments["command"]
        if not isinstance(command, str) or not command.strip() or "\0" in command:
            raise ToolFailed("the command must be a text.")
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=self._root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches kvchat only, and all of it can be ended
        )
        output = _Output(process)
        ending = _wait(process, stop)
        text = output.text()
        return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}[{ending}]"


class _Output:
    """Reads the output of a process on a thread; keeps its beginning and its end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        half = _MOST_OUTPUT_BYTES // 2
        with suppress(OSError, ValueError):
            while piece := os.read(self._pipe.fileno(), 1 << 16):
                room = half - len(self._head)
                self._head += piece[: max(0, room)]
                self._tail += piece[max(0, room) :]
                excess = max(0, len(self._tail) - half)
                del self._tail[:excess]
                self._num_dropped += excess

    def text(self) -> str:
        """Return what was read. A process that was left in the background may still hold it."""
        self._reader.join(1.0)
        gap = f"\n[{self._num_dropped:,} bytes left out]\n" if self._num_dropped else ""
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        return head + gap + tail


def _wait(process: "subprocess.Popen[bytes]", stop: threading.Event) -> str:
    """Wait for a process, at most its time; return how it ended, in words."""
    deadline_s = time.monotonic() + _COMMAND_S
    while process.poll() is None:
        if stop.wait(_LOOK_S) or time.monotonic() > deadline_s:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "stopped by the user" if stop.is_set() else f"stopped after {_COMMAND_S:g} s"
    return f"exit code {process.returncode}"


def _files(start: Path, pattern: str, stop: threading.Event) -> Iterator[Path]:
    """Yield the regular files below a directory in order, without following links."""
    for directory, names, files in os.walk(start):
        names[:] = sorted(name for name in names if name not in _PASSED_OVER)
        for name in sorted(files):
            if stop.is_set():
                raise ToolFailed("the user stopped it.")
            path = Path(directory, name)
            if fnmatch.fnmatch(name, pattern) and path.is_file() and not path.is_symlink():
                yield path


def _text_of(path: Path, most_bytes: int) -> str:
    """Return a file's text; raises ToolFailed for one that cannot be read, and for no text."""
    try:
        data = read_bounded(path, most_bytes)
    except OSError as error:
        raise ToolFailed(f"{path.name} cannot be read: {error.strerror}.") from error
    if b"\0" in data[:8192]:
        raise ToolFailed(f"{path.name} is not a text file.")
    return data.decode(errors="replace")
