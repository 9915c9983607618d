"""SessionStore: the directory of session files. Create, open, list, rename, remove.

One writer per session, by a file lock; files are private to the user. Knows files and locks; the
format is `session_file.py`'s, and a conversation's meaning is nobody's here.
"""

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvchat.chat import session_file
from kvchat.chat.conversation import ROOT, Conversation
from kvchat.core.errors import SessionNotFound, StoreError
from kvchat.core.paths import open_private, private_directory

_SUFFIX = ".jsonl"
# Some millions of turns; no conversation gets there.
MAX_SESSION_BYTES = 1 << 29
# What is to take the place of a session's file, while it is written.
NEW_SUFFIX = ".new"
# Each time means that somebody put a new file in its place between opening and locking it.
_MAX_OPENINGS = 8
_SESSION_ID = re.compile(r"^[0-9]{8}-[0-9]{6}-[0-9a-f]{4}$")


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One line of a list of sessions. `is_readable` is false for a damaged file."""

    session_id: str
    title: str
    num_turns: int
    modified_s: float
    is_readable: bool = True


class SessionLog:
    """The open file of one session, held by its only writer.

    A line that cannot be written (a full disk) is kept and tried again with the next one, and so is
    a wait for the disk: `write` then returns what to tell the user, and nothing is lost while the
    process lives.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor: int | None = descriptor
        self._path = path
        self._name = path.name
        self._unwritten = b""
        self._needs_sync = False

    @property
    def is_complete(self) -> bool:
        """Whether everything written so far is in the file."""
        return not self._unwritten

    def write(self, line: str, durable: bool = False) -> str | None:
        """Append a line; `durable` waits until it would survive a power loss.

        Returns None, or one sentence on why the file is behind.
        """
        self._unwritten += line.encode()
        self._needs_sync |= durable
        if self._descriptor is None:
            return f"{self._name} is closed."
        problem = self._catch_up(self._descriptor)
        return f"{problem}; trying again with each turn." if problem is not None else None

    def _catch_up(self, descriptor: int) -> str | None:
        """Write what is missing; return None, or half a sentence on why it is still missing."""
        try:
            while self._unwritten:
                num_written = os.write(descriptor, self._unwritten)
                self._unwritten = self._unwritten[num_written:]
            if self._needs_sync:
                self._sync(descriptor)
        except OSError as error:
            return f"{self._name} cannot be saved ({error.strerror})"
        return None

    def complete(self) -> None:
        """Write what is missing; raises StoreError, and forgets nothing, where that cannot be."""
        if self._descriptor is None:
            return
        if (problem := self._catch_up(self._descriptor)) is not None:
            raise StoreError(f"{problem}.", "Make room for it first.")

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says that this file system knows no waiting
                raise
        self._needs_sync = False

    def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Put something else in the place of all that was written, in one step.

        Raises StoreError where that cannot be, and then nothing is changed.
        """
        if (problem := self.write("", durable=True)) is not None or self._descriptor is None:
            raise StoreError(problem or f"{self._name} is closed.")
        new_path = self._path.with_suffix(NEW_SUFFIX)
        try:
            data = change(self._path.read_bytes())
            descriptor = open_private(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(descriptor, data)
                os.fsync(descriptor)
                os.replace(new_path, self._path)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                new_path.unlink()
            raise StoreError(f"{self._name} cannot be changed: {error.strerror}.") from error
        os.close(self._descriptor)
        self._descriptor = descriptor
        _settle_directory(self._path.parent)

    def close(self) -> str | None:
        """Try once more to write what is missing, and release the file and its lock. Idempotent.

        Returns None, or one sentence on what could not be saved. A file without even its first line
        is nobody's conversation, and goes.
        """
        if self._descriptor is None:
            return None
        problem = self._catch_up(self._descriptor)
        if self._unwritten and _has_no_line(self._path):
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None
        return f"{problem}." if problem is not None else None


class SessionStore:
    """Session files in one directory, which is made on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self, conversation: Conversation, model: str) -> SessionLog:
        """Start the file of a new conversation and lock it.

        A conversation whose id is taken gets another. A full disk is no reason not to talk: the log
        tries again with each turn.
        """
        try:
            private_directory(self.directory)
        except StoreError as error:
            hint = "Choose another with --sessions-dir, or save nothing with --incognito."
            raise StoreError(error.message, hint) from error
        log = self._open_new(conversation)
        log.write(session_file.header_line(conversation, model), durable=True)
        _settle_directory(self.directory)
        return log

    def _open_new(self, conversation: Conversation) -> SessionLog:
        """Make a file that was not there. Ids drawn in one second meet now and then: draw again."""
        while True:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
                return self._open(conversation.session_id, flags)
            except StoreError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
            conversation.session_id = new_session_id()

    def open(self, session_id: str) -> tuple[session_file.ReadSession, SessionLog]:
        """Read a session and lock it for writing; a torn last line is cut off the file.

        Raises SessionNotFound, or StoreError where another process is writing to it.
        """
        path = self._existing(session_id)
        log = self._open(session_id, os.O_RDWR | os.O_APPEND)
        try:
            read = self.read(session_id)
            data = self.read_bytes(session_id)
            if not data.endswith(b"\n"):
                os.truncate(path, data.rfind(b"\n") + 1)
        except OSError as error:
            log.close()
            raise StoreError(f"{path} cannot be repaired: {error.strerror}.") from error
        except (StoreError, SessionNotFound):
            log.close()
            raise
        return read, log

    def read(self, session_id: str) -> session_file.ReadSession:
        """Read a session without locking it, as it is at this moment.

        The file's name is the session's id: a copied file is a conversation of its own.
        """
        path = self._path(session_id)
        read = session_file.read_session(self.read_bytes(session_id), path.name)
        read.conversation.session_id = session_id
        return read

    def read_bytes(self, session_id: str) -> bytes:
        """Return what is in a session's file, sound or not."""
        path = self._existing(session_id)
        try:
            with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_SESSION_BYTES:
                    raise StoreError(f"{path} has more than {MAX_SESSION_BYTES >> 20} MiB.")
                return file.read()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}.") from error

    def _open(self, session_id: str, flags: int) -> SessionLog:
        path = self._path(session_id)
        descriptor = self._open_locked(path, flags)
        with suppress(OSError):  # a process that was killed while it changed the file
            path.with_suffix(NEW_SUFFIX).unlink()
        return SessionLog(descriptor, path)

    def _open_locked(self, path: Path, flags: int) -> int:
        """Open the file and lock it; again where its writer put another in its place meanwhile."""
        for _ in range(_MAX_OPENINGS):
            descriptor = open_private(path, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                break
            if _is_at(path, descriptor):
                return descriptor
            os.close(descriptor)
        raise StoreError(
            f"The session {path.stem} is open in another kvchat.",
            "Close it there, or use --fork to go on in a copy.",
        )

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the most recently changed first.

        An empty file is none: whoever began it was killed before its first line.
        """
        try:
            paths = [p for p in self.directory.iterdir() if p.suffix == _SUFFIX and _has_text(p)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"Cannot list {self.directory}: {error.strerror}.") from error
        changed_ns = {p.stem: _modified_ns(p) for p in paths if _SESSION_ID.match(p.stem)}
        return sorted(changed_ns, key=lambda session_id: -changed_ns[session_id])

    def latest(self) -> str:
        """Return the id of the session changed last; raises SessionNotFound where there is none.

        One whose only messages were refused, as too long, is passed over: nobody means that.
        """
        ids = self.ids()
        if not ids:
            raise SessionNotFound("There is no saved conversation yet.", "Start one with `kvchat`.")
        return next((session_id for session_id in ids if self._can_go_on(session_id)), ids[0])

    def _can_go_on(self, session_id: str) -> bool:
        try:
            if self._read_summary(session_id).has_answer:
                return True
            conversation = self.read(session_id).conversation
        except (StoreError, SessionNotFound):
            return True  # whoever opens it says what is wrong
        return conversation.tip_id != ROOT or not len(conversation)

    def find(self, text: str) -> str:
        """Return the session id that `text` names: a full id or an unambiguous beginning."""
        matches = [i for i in self.ids() if i == text] or [
            i for i in self.ids() if i.startswith(text)
        ]
        if not matches:
            raise SessionNotFound(f"There is no session {text}.", "See `kvchat sessions`.")
        if len(matches) > 1:
            raise SessionNotFound(f"{text} could be {len(matches)} sessions.", "Give more of it.")
        return matches[0]

    def summaries(self) -> list[SessionSummary]:
        """Return one summary per session, the most recently changed first."""
        return [self._summary(session_id) for session_id in self.ids()]

    def _summary(self, session_id: str) -> SessionSummary:
        modified_s = _modified_ns(self._path(session_id)) / 1e9
        try:
            read = self._read_summary(session_id)
        except (StoreError, SessionNotFound):
            return SessionSummary(session_id, "(cannot be read)", 0, modified_s, False)
        return SessionSummary(session_id, read.label, read.num_turns, modified_s)

    def _read_summary(self, session_id: str) -> session_file.Summary:
        return session_file.read_summary(self.read_bytes(session_id), f"{session_id}{_SUFFIX}")

    def remove(self, session_id: str) -> None:
        """Delete a session's file; raises StoreError while a process is writing to it."""
        self._existing(session_id)
        log = self._open(session_id, os.O_WRONLY | os.O_APPEND)
        try:
            self._path(session_id).unlink()
        except OSError as error:
            raise StoreError(f"Cannot delete {session_id}: {error.strerror}.") from error
        finally:
            log.close()

    def _path(self, session_id: str) -> Path:
        return self.directory / f"{session_id}{_SUFFIX}"

    def _existing(self, session_id: str) -> Path:
        path = self._path(session_id)
        if not _SESSION_ID.match(session_id) or not path.is_file():
            raise SessionNotFound(f"There is no session {session_id}.", "See `kvchat sessions`.")
        return path


def new_session_id(now_s: float | None = None) -> str:
    """Return a fresh id: date, time and four random digits; nothing of the conversation."""
    moment = datetime.fromtimestamp(time.time() if now_s is None else now_s)
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _settle_directory(directory: Path) -> None:
    """Wait until a file's new name, and not only what is in it, would survive a power loss."""
    with suppress(OSError):  # not every file system can
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one its path names: what is written to another is lost."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _has_text(path: Path) -> bool:
    """Tell whether a file holds anything; true for one that cannot be examined."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return True


def _has_no_line(path: Path) -> bool:
    """Tell whether a file ends before its first line does; false for one that cannot be read."""
    try:
        return b"\n" not in path.read_bytes()
    except OSError:
        return False


def _modified_ns(path: Path) -> int:
    """Return when a file was last changed; 0 for one that has just gone, or a dangling link."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
