"""The log file: failures and degradations, in a private file of the state directory.

It holds no conversation text. An exception's message may contain such text, so the file gets the
exception's type and stack only. Messages are written only for errors of the system, SQLite and
torch, which are about files, memory and shapes. With `--debug` everything also goes to standard
error, including messages.
"""

import logging
import os
import sqlite3
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import TextIO

from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory

LOG_NAME = "kvchat.log"
_MAX_BYTES = 1 << 20
_NUM_OLD_FILES = 2
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_LOGGERS = ("kvchat", "kvchat_kernels")
# Errors whose messages come from the system, a store or a library that handles no text.
_SPEAKS_OF_NO_TEXT = (OSError, sqlite3.Error, MemoryError, RuntimeError, StoreError)

_ErrorInfo = tuple[type[BaseException], BaseException, TracebackType | None]
_NoErrorInfo = tuple[None, None, None]


def open_log(state_directory: Path, is_debug: bool) -> None:
    """Send kvchat's log to its file; with `is_debug` log more, and to stderr too.

    The file is created at its first line. Errors of writing it are ignored: a log must not cost an
    answer.
    """
    close_log()
    to_file = LogFile(state_directory / LOG_NAME)
    to_file.setLevel(logging.DEBUG if is_debug else logging.WARNING)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG if is_debug else logging.WARNING)
        logger.addHandler(to_file)
        if is_debug:
            to_stderr = _Stderr(sys.stderr)
            to_stderr.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(to_stderr)


def close_log() -> None:
    """Stop logging to the file and to the terminal, for a chat that must leave no trace."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if isinstance(h, (LogFile, _Stderr))]:
            logger.removeHandler(handler)
            handler.close()
        # Without a handler Python prints our warnings with their tracebacks.
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


class _Stderr(logging.StreamHandler[TextIO]):
    """The stderr handler of `--debug`."""


class LogFile(RotatingFileHandler):
    """Appends to `path`, mode 0600, which several processes may share.

    A file of more than 1 MiB becomes `kvchat.log.1`, and two old ones are kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a", _MAX_BYTES, _NUM_OLD_FILES, encoding="utf-8", delay=True)
        self.setFormatter(_WithoutText(_FORMAT))

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        private_directory(path.parent)
        try:
            descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except StoreError as error:
            raise OSError(str(error)) from error
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        stream = self.stream
        if stream is not None and not self._is_current(stream):
            stream.close()  # another process has started a new file
            self.stream = self._open()
        return bool(super().shouldRollover(record))

    def _is_current(self, stream: TextIOWrapper) -> bool:
        try:
            return os.path.samestat(os.fstat(stream.fileno()), os.stat(self.baseFilename))
        except OSError:
            return False

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written: the disk may be full."""
        with suppress(Exception):
            super().close()


class _WithoutText(logging.Formatter):
    """Formats an exception as its type and stack, without its message."""

    def formatException(self, ei: _ErrorInfo | _NoErrorInfo) -> str:
        error = ei[1]
        lines: list[str] = []
        while error is not None and len(lines) < 200:
            frames = traceback.extract_tb(error.__traceback__)
            lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            lines.append(_without_text(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n".join(lines)

    def format(self, record: logging.LogRecord) -> str:
        own = logging.makeLogRecord(record.__dict__)
        own.exc_text = None  # another handler may have stored the exception's message there
        if isinstance(own.args, tuple):
            own.args = tuple(
                _without_text(value) if isinstance(value, BaseException) else value
                for value in own.args
            )
        return super().format(own)


def _without_text(error: BaseException) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if isinstance(error, _SPEAKS_OF_NO_TEXT) else kind
