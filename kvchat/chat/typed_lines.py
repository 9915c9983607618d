"""TypedLines: the file of what was typed at the prompt, each line with the conversation it was for.

One JSON object a line, appended in one write, so that lines of two processes do not mix. A damaged
line is skipped. Earlier versions wrote the text alone.
"""

import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvchat.chat.attachment import split_attached
from kvchat.core.errors import StoreError
from kvchat.core.paths import (
    Lock,
    is_at,
    open_private,
    private_directory,
    replace_private,
    try_lock,
)

MAX_LINES = 5000
MAX_LINE_CHARS = 20_000
MAX_FILE_BYTES = 4 * 2**20
_BLOCK_MARK = '"""'
_COMMAND_MARK = "/"
# A process holds the file for milliseconds.
_LOCK_TRIES, _RETRY_S = 100, 0.005

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TypedLine:
    """A text as it was typed; `session_id` is "" where none was open, or none is known."""

    text: str
    session_id: str = ""


class Forgotten:
    """Which typed lines go with conversations and with messages.

    With a message go the line that is its text, `/edit 3 TEXT` and other commands that end in it,
    and commands that name one of its attached files.
    """

    def __init__(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        self._session_ids = session_ids
        self._texts = [text for text in texts if text]
        split = [split_attached(text) for text in texts]
        self._words = {said.strip() for _, said in split} - {""}
        names = {name for names, _ in split for name in names}
        self._names = [re.compile(rf'[\s"/]{re.escape(name)}(?:["\s]|$)') for name in names]

    def has(self, line: TypedLine) -> bool:
        return line.session_id in self._session_ids or self.has_text(line.text)

    def has_text(self, typed: str) -> bool:
        """Return whether a typed text is a message, or a command about one.

        A message may have attached files before the typed text, and lacks a block's marks.
        """
        forms = {typed, typed.strip(), _without_marks(typed)} - {""}
        for text in self._texts:
            if text.strip() in forms or any(text.endswith(f"\n{form}") for form in forms):
                return True
        command = typed.strip()
        if not command.startswith(_COMMAND_MARK):
            return False
        ends = any(command.endswith(f" {words}") for words in self._words)
        return ends or any(name.search(command) for name in self._names)


class TypedLines:
    """The lines in the file `path`, which is created with mode 0600 at the first.

    The file never has much more than 4 MiB: the oldest lines go.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[TypedLine]:
        """Return the newest lines, the newest last; none if the file cannot be read."""
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:  # as earlier versions left it
                with self._locked():
                    self._replace(_newest(self._lines()))
            lines = self._lines()
            if len(lines) > 2 * MAX_LINES:
                with self._locked():
                    self._replace(self._lines()[-MAX_LINES:])
        except (OSError, StoreError) as error:
            _log.info("no history: %s", error)
            return []
        known = (_typed_line(line) for line in lines[-MAX_LINES:])
        return [line for line in known if line is not None]

    def add(self, lines: Sequence[TypedLine]) -> bool:
        """Append lines; false if that is not possible."""
        try:
            private_directory(self._path.parent)
            with self._locked() as descriptor:
                data = b"".join(map(_encoded, lines))
                while data:
                    data = data[os.write(descriptor, data) :]
                if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
                    self._replace(_newest(self._lines()))
        except (OSError, StoreError) as error:
            _log.info("the history cannot be kept: %s", error)
            return False
        return True

    def remove(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        """Remove the lines of conversations and of messages, for good. Raises StoreError."""
        if not self._path.exists():
            return
        gone = Forgotten(session_ids, texts)
        try:
            with self._locked():
                lines = self._lines()
                kept = [line for line in lines if not _is_gone(line, gone)]
                if len(kept) < len(lines):
                    self._replace(kept)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be changed: {error.strerror}.") from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the file, which others replace as well; yields a descriptor to append with."""
        for left in reversed(range(_LOCK_TRIES)):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            descriptor = open_private(self._path, flags)
            try:
                is_ours = try_lock(descriptor) is not Lock.ANOTHERS
                if not left or (is_ours and is_at(self._path, descriptor)):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
            time.sleep(_RETRY_S)

    def _lines(self) -> list[bytes]:
        with os.fdopen(open_private(self._path, os.O_RDONLY), "rb") as file:
            return file.read().splitlines(keepends=True)

    def _replace(self, lines: Sequence[bytes]) -> None:
        replace_private(self._path, b"".join(lines))


def _newest(lines: Sequence[bytes]) -> list[bytes]:
    """Return the newest lines that take half of the limit."""
    kept, room = [], MAX_FILE_BYTES // 2
    for line in reversed(lines):
        room -= len(line)
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]


def _is_gone(line: bytes, gone: Forgotten) -> bool:
    typed = _typed_line(line)
    return typed is not None and gone.has(typed)


def _encoded(line: TypedLine) -> bytes:
    value = {"text": line.text, "in": line.session_id} if line.session_id else line.text
    return json.dumps(value).encode() + b"\n"


def _typed_line(line: bytes) -> TypedLine | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, str):
        return TypedLine(value)
    if not isinstance(value, dict):
        return None
    text, session_id = value.get("text"), value.get("in")
    if not isinstance(text, str) or not isinstance(session_id, str):
        return None
    return TypedLine(text, session_id)


def _without_marks(text: str) -> str:
    plain = text.strip()
    return plain.removeprefix(_BLOCK_MARK).removesuffix(_BLOCK_MARK).strip("\n")
