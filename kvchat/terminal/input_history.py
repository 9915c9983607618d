"""PrivateHistory: the input history, in a file with mode 0600.

One JSON string a line, appended in one write, so that lines of two processes do not mix. A damaged
line is skipped.
"""

import json
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from prompt_toolkit.history import History

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory
from kvchat.terminal.multiline import without_block_marks

_MAX_ENTRIES = 5000
_MAX_FILE_BYTES = 4 * 2**20
_MAX_ENTRY_CHARS = 20_000

_log = logging.getLogger(__name__)


class PrivateHistory(History):
    """History in `path`, which is created on first use.

    With `path` None or an unusable file, the history lasts until exit only. `is_complete` is
    whether the file has every entry so far.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self.is_complete = path is not None

    def load_history_strings(self) -> Iterable[str]:
        """Yield the entries, the newest first."""
        lines = self._lines()
        if len(lines) > 2 * _MAX_ENTRIES:
            self._shorten(lines[-_MAX_ENTRIES:])
        for line in reversed(lines[-_MAX_ENTRIES:]):
            entry = _entry(line)
            if entry is not None:
                yield entry

    def store_string(self, string: str) -> None:
        """Append an entry."""
        if self._path is None or len(string) > _MAX_ENTRY_CHARS:
            self.is_complete = False
            return
        try:
            private_directory(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = open_private(self._path, flags)
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except (OSError, StoreError) as error:
            self.is_complete = False
            _log.info("the history cannot be kept: %s", error)

    def forget(self, texts: Collection[str]) -> None:
        """Remove the entries of these messages, also from the file.

        A message may have attached files before the typed text.
        """
        self._loaded_strings = [s for s in self._loaded_strings if not _is_part(s, texts)]
        lines = self._lines()
        kept = [line for line in lines if not _is_part(_entry(line), texts)]
        if len(kept) < len(lines):
            self._shorten(kept)

    def _lines(self) -> list[bytes]:
        """Return the file's lines, the newest last; none if it cannot be read."""
        if self._path is None:
            return []
        try:
            with os.fdopen(open_private(self._path, os.O_RDONLY), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _MAX_FILE_BYTES))
                return file.read().split(b"\n")
        except (OSError, StoreError) as error:
            _log.info("no history: %s", error)
            return []

    def _shorten(self, lines: list[bytes]) -> None:
        """Keep only some of the entries; the file is replaced atomically."""
        assert self._path is not None
        shorter = self._path.with_suffix(".new")
        try:
            descriptor = open_private(shorter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(b"\n".join(lines))
            os.replace(shorter, self._path)
        except (OSError, StoreError) as error:
            _log.info("the history cannot be shortened: %s", error)


def _is_part(entry: str | None, texts: Collection[str]) -> bool:
    """Whether an entry is one of the messages, or the text of one after its attached files.

    An entry is the typed text; it may have a block's quotation marks, which the message lacks.
    """
    typed = {entry, without_block_marks(entry)} - {""} if entry is not None else ()
    return any(text == each or text.endswith(f"\n{each}") for text in texts for each in typed)


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None
