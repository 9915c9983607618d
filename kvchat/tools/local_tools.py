"""The built-in tools: read, list and search files below a directory, and run a command there.

No path leads out of the directory, with links or without. A command may reach whatever the user may
reach: that is why every call is asked for.
"""

import fnmatch
import os
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvchat.tools.run_command import RunCommand
from kvchat.tools.toolbox import Tool, ToolFailed, schema_of
from kvchat.tools.working_directory import WorkingDirectory, read_below

_MOST_FILE_BYTES = 16 << 20
_MOST_SEARCHED_BYTES = 1 << 20
_MOST_ENTRIES = 500
_MOST_LINES = 400
_SEARCH_S = 20.0
_MORE = "[there may be more]"
# Directories of other programs: thousands of files that are not the user's own work.
_PASSED_OVER = frozenset({".git", ".venv", "node_modules", "__pycache__"})
# What separates lines elsewhere, but not for other programs: grep counts line feeds.
_SEPARATORS = str.maketrans("\r\u2028\u2029", "   ")


def local_tools(directory: Path, allowed_secrets: Collection[str] = ()) -> list[Tool]:
    """Return the tools for one directory.

    allowed_secrets   variables that commands see although their names look like secrets
    """
    root = WorkingDirectory(directory)
    command = RunCommand(root.path, allowed_secrets)
    return [ReadFile(root), ListFiles(root), SearchFiles(root), command]


class _OfFiles:
    is_allowed_by_call = False

    def __init__(self, root: WorkingDirectory) -> None:
        self._root = root


class ReadFile(_OfFiles):
    name = "read_file"
    description = "Read a text file below the working directory."
    parameters = schema_of(
        ("path",),
        path=("string", "the file, relative to the working directory"),
        first_line=("integer", "the line to begin with; 1 is the first"),
    )

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        name = arguments["path"]
        first = max(1, int(arguments.get("first_line") or 1))
        lines = _lines(_text_of(self._root.read(name, _MOST_FILE_BYTES), name))
        shown = lines[first - 1 : first - 1 + _MOST_LINES]
        rest = len(lines) - (first - 1 + len(shown))
        more = [f"[{rest:,} more lines; first_line={first + len(shown)}]"] if rest > 0 else []
        return "\n".join([*shown, *more])


class ListFiles(_OfFiles):
    name = "list_files"
    description = "List the files below a directory, by a pattern such as *.py."
    parameters = schema_of(
        (),
        path=("string", "the directory; the working directory if it is missing"),
        pattern=("string", "only names like this; all if it is missing"),
    )

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        names: list[str] = []
        is_cut = False
        with self._root.directory(arguments.get("path") or ".") as (start, path):
            files = _Files(start, arguments.get("pattern") or "*", stop)
            for _, name, below in files:
                if len(names) == _MOST_ENTRIES:
                    is_cut = True
                    break
                names.append(os.path.join(path, below, name))
        more = [f"[more than {_MOST_ENTRIES} files; give a path or a pattern]"] if is_cut else []
        more += [_MORE] if files.is_cut else []
        return "\n".join([*names, *more]) or "There is no such file."


class SearchFiles(_OfFiles):
    name = "search_files"
    description = "Find the lines that contain a text, in files below a directory."
    parameters = schema_of(
        ("text",),
        text=("string", "the text, not a pattern; upper and lower case are the same"),
        path=("string", "the directory; the working directory if it is missing"),
        pattern=("string", "only in files with names like this"),
    )

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        wanted = str(arguments["text"]).lower()
        lines: list[str] = []
        with self._root.directory(arguments.get("path") or ".") as (start, path):
            files = _Files(start, arguments.get("pattern") or "*", stop)
            for directory, name, below in files:
                lines += _matches(directory, name, os.path.join(path, below, name), wanted)
                if len(lines) >= _MOST_LINES:
                    break
        is_cut = files.is_cut or len(lines) >= _MOST_LINES
        return "\n".join([*lines, *([_MORE] if is_cut else [])]) or "No line contains it."


def _matches(directory: int, name: str, path: str, wanted: str) -> Iterator[str]:
    """Yield the lines of a file that contain a text; none of a file that cannot be read."""
    with suppress(ToolFailed):
        content = read_below(directory, name, _MOST_SEARCHED_BYTES)
        for number, line in enumerate(_lines(_text_of(content or b"", name)), 1):
            if wanted in line.lower():
                yield f"{path}:{number}: {line.strip()[:300]}"


class _Files:
    """The regular files below an open directory in order, without following links.

    Each comes as the descriptor of its directory, its name, and the path of the directory. They end
    after 20 seconds, however few names are like the pattern: `is_cut` then.
    """

    def __init__(self, start: int, pattern: str, stop: threading.Event) -> None:
        self._start, self._pattern, self._stop = start, pattern, stop
        self.is_cut = False

    def __iter__(self) -> Iterator[tuple[int, str, str]]:
        deadline_s = time.monotonic() + _SEARCH_S
        for below, names, files, directory in os.fwalk(".", dir_fd=self._start):
            names[:] = sorted(name for name in names if name not in _PASSED_OVER)
            if self._must_end(deadline_s):  # a directory may be empty
                return
            for name in sorted(files):
                if self._must_end(deadline_s):
                    return
                if fnmatch.fnmatch(name, self._pattern) and _is_regular(directory, name):
                    yield directory, name, below.removeprefix(".").removeprefix("/")

    def _must_end(self, deadline_s: float) -> bool:
        if self._stop.is_set():
            raise ToolFailed("the user stopped it.")
        self.is_cut = time.monotonic() > deadline_s
        return self.is_cut


def _is_regular(directory: int, name: str) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    return False


def _text_of(content: bytes, name: str) -> str:
    """Return the text of a file; raises ToolFailed for what is no text."""
    if b"\0" in content[:8192]:
        raise ToolFailed(f"{os.path.basename(name)} is not a text file.")
    return content.decode(errors="replace")


def _lines(text: str) -> list[str]:
    """Return the lines of a text as other programs count them: line feeds end them."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r").translate(_SEPARATORS) for line in lines]
