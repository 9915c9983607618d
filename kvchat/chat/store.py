"""SessionStore: the directory of session files. Create, open, list and remove sessions.

A file lock allows one writer per session; files have mode 0600. `session_file.py` defines the
format.
"""

import difflib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvchat.chat import session_file
from kvchat.chat.conversation import ROOT, Conversation
from kvchat.core.errors import SessionNotFound, StoreError
from kvchat.core.paths import Lock, is_at, open_private, private_directory, try_lock
from kvchat.core.text import one_line

_SUFFIX = ".jsonl"
# Enough for millions of turns.
MAX_SESSION_BYTES = 1 << 29
# Suffix of the new version of a session file while it is written.
NEW_SUFFIX = ".new"
# A retry is needed when another process replaces the file between opening and locking it.
_MAX_OPENINGS = 8
# The most sessions that an error lists.
_MAX_LISTED = 5
# The most titles that an error offers as what may have been meant.
_MAX_NEAR = 2
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCKS = Path("/proc/locks")
# A lock on a file, as Linux lists it there: the process, and the file's number on its device.
_LOCK = re.compile(r"^\d+: FLOCK +ADVISORY +WRITE (\d+) \w+:\w+:(\d+) ", re.MULTILINE)
_SESSION_ID = re.compile(r"^[0-9]{8}-[0-9]{6}-[0-9a-f]{4}$")


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One line of a list of sessions. `is_readable` is false for a file that cannot be read.

    `modified_s` is in seconds since the epoch, `model` the name of the model that answered last.
    """

    session_id: str
    title: str
    num_turns: int
    modified_s: float
    is_readable: bool = True
    model: str = ""


class SessionLog:
    """The open and locked file of one session; its owner is the only writer.

    A line that cannot be written (full disk) stays in memory, and the next `write` tries again; so
    does a failed fsync. `write` then returns a sentence for the user. Nothing is lost while the
    process lives. Where the file system has no locks, `is_locked` is false.
    """

    def __init__(self, descriptor: int, path: Path, is_locked: bool = True) -> None:
        self.is_locked = is_locked
        self._descriptor: int | None = descriptor
        self._path = path
        self._unwritten = b""
        self._needs_sync = False

    def write(self, line: str, durable: bool = False) -> str | None:
        """Append a line; with `durable`, wait until it would survive a power loss.

        Returns None, or one sentence on why lines are not yet in the file.
        """
        self._unwritten += line.encode()
        self._needs_sync |= durable
        if self._descriptor is None:
            return f"{self._path} is closed."
        problem = self._catch_up(self._descriptor)
        return f"{problem}; trying again with each turn." if problem is not None else None

    def _catch_up(self, descriptor: int) -> str | None:
        """Write pending data; return None, or the problem as a clause without a full stop."""
        try:
            while self._unwritten:
                num_written = os.write(descriptor, self._unwritten)
                self._unwritten = self._unwritten[num_written:]
            if self._needs_sync:
                self._sync(descriptor)
        except OSError as error:
            return f"{self._path} cannot be saved ({error.strerror})"
        return None

    def complete(self) -> None:
        """Write pending data; if that fails, keep the data and raise StoreError."""
        if self._descriptor is None:
            return
        if (problem := self._catch_up(self._descriptor)) is not None:
            raise StoreError(f"{problem}.", "Make room for it first.")

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system does not support fsync
                raise
        self._needs_sync = False

    def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Replace the file's content by `change(content)`, atomically.

        Raises StoreError, and changes nothing, if that fails.
        """
        if (problem := self.write("", durable=True)) is not None or self._descriptor is None:
            raise StoreError(problem or f"{self._path} is closed.")
        new_path = self._path.with_suffix(NEW_SUFFIX)
        try:
            data = change(self._path.read_bytes())
            descriptor = open_private(new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            try:
                try_lock(descriptor)
                _write_all(descriptor, data)
                os.fsync(descriptor)
                os.replace(new_path, self._path)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                new_path.unlink()
            raise StoreError(f"{self._path} cannot be changed: {error.strerror}.") from error
        os.close(self._descriptor)
        self._descriptor = descriptor
        _settle_directory(self._path.parent)

    def close(self) -> str | None:
        """Try again to write pending data, then release the file and its lock. Idempotent.

        Returns None, or one sentence on what could not be saved. A file that lacks its complete
        first line holds no conversation and is deleted.
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

    def discard(self) -> None:
        """Delete the file and release it; what is there and not ours stays."""
        if self._descriptor is None:
            return
        if is_at(self._path, self._descriptor):
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


class SessionStore:
    """Session files in one directory, which is created on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(
        self, conversation: Conversation, model: str, is_one_shot: bool = False
    ) -> SessionLog:
        """Create and lock the file of a new conversation; the caller closes the returned log.

        If the id is in use, the conversation gets another id. A full disk raises no error: the log
        tries again with each turn. Raises StoreError if the directory or file cannot be used.
        """
        try:
            private_directory(self.directory)
            log = self._open_new(conversation)
        except StoreError as error:
            hint = "Choose another folder with --sessions-dir, or save nothing with --incognito."
            raise StoreError(error.message, hint) from error
        log.write(session_file.header_line(conversation, model, is_one_shot), durable=True)
        _settle_directory(self.directory)
        return log

    def _open_new(self, conversation: Conversation) -> SessionLog:
        """Create a file; draw another id while the id exists, which is possible within a second."""
        while True:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
                return self._open(conversation.session_id, flags)
            except StoreError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
            conversation.session_id = new_session_id()

    def open(self, session_id: str) -> tuple[session_file.ReadSession, SessionLog]:
        """Read a session and lock it for writing; an incomplete last line is cut off the file.

        Raises SessionNotFound, or StoreError if another process has it open.
        """
        path = self._existing(session_id)
        try:
            log = self._open(session_id, os.O_RDWR | os.O_APPEND)
        except StoreError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _READ_ONLY):
                raise
            hint = "With --incognito a copy of it goes on, and nothing is saved."
            raise StoreError(error.message, hint) from error
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
        """Read a session in its current state, without locking it.

        The session's id is taken from the file's name, so a copied file is a separate conversation.
        """
        path = self._path(session_id)
        read = session_file.read_session(self.read_bytes(session_id), path.name)
        read.conversation.session_id = session_id
        return read

    def read_bytes(self, session_id: str) -> bytes:
        """Return the bytes of a session file, without checking its format."""
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
        descriptor, is_locked = self._open_locked(path, flags)
        with suppress(OSError):  # left by a process that was killed while it rewrote the file
            path.with_suffix(NEW_SUFFIX).unlink()
        return SessionLog(descriptor, path, is_locked)

    def _open_locked(self, path: Path, flags: int) -> tuple[int, bool]:
        """Open the file and lock it; try again if its writer replaced it meanwhile.

        Returns the descriptor, and false where the file system has no locks.
        """
        for _ in range(_MAX_OPENINGS):
            descriptor = open_private(path, flags)
            try:
                lock = try_lock(descriptor)
            except OSError as error:
                os.close(descriptor)
                raise StoreError(f"{path} cannot be locked: {error.strerror}.") from error
            if lock is Lock.ANOTHERS:
                os.close(descriptor)
                break
            if is_at(path, descriptor):
                return descriptor, lock is Lock.OURS
            os.close(descriptor)
        raise StoreError(
            f"{self._title_of(path.stem)} is open in another kvchat.",
            f"Close it there, or go on in a copy: kvchat -r {path.stem} --fork",
        )

    def _title_of(self, session_id: str) -> str:
        """Return what a list calls a session, in quotation marks, or its id."""
        with suppress(StoreError, SessionNotFound):
            if label := one_line(self._read_summary(session_id).label, 48):
                return f"“{label}”"
        return f"The session {session_id}"

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the most recently changed first.

        Empty files are left out: the process was killed before it wrote the first line.
        """
        try:
            paths = [p for p in self.directory.iterdir() if p.suffix == _SUFFIX and _has_text(p)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"Cannot list {self.directory}: {error.strerror}.") from error
        changed_ns = {p.stem: _modified_ns(p) for p in paths if _SESSION_ID.match(p.stem)}
        return sorted(changed_ns, key=lambda session_id: -changed_ns[session_id])

    def latest(self, takes_one_shots: bool = False) -> str:
        """Return the id of the session changed last; raises SessionNotFound if there is none.

        Skips a session all of whose messages were refused as too long, and one that a script began
        and nothing has gone on with, unless it `takes_one_shots`.
        """
        ids = self.ids()
        if not ids:
            raise SessionNotFound("There is no saved conversation yet.", "Start one with `kvchat`.")
        if not takes_one_shots:
            ids = [session_id for session_id in ids if not self._is_one_shot(session_id)]
        if not ids:
            raise SessionNotFound(
                "There are only answers to single prompts yet.",
                "`kvchat -c --last` goes on with the last of them.",
            )
        return next((session_id for session_id in ids if self._can_go_on(session_id)), ids[0])

    def _is_one_shot(self, session_id: str) -> bool:
        with suppress(StoreError, SessionNotFound):
            return self._read_summary(session_id).is_one_shot
        return False

    def _can_go_on(self, session_id: str) -> bool:
        try:
            if self._read_summary(session_id).has_answer:
                return True
            conversation = self.read(session_id).conversation
        except (StoreError, SessionNotFound):
            return True  # opening it reports the problem
        return conversation.tip_id != ROOT or not len(conversation)

    def rename(self, session_id: str, title: str) -> None:
        """Give a session a title; raises StoreError if it is open elsewhere or cannot be saved."""
        _, log = self.open(session_id)
        log.write(session_file.title_line(title), durable=True)
        if (problem := log.close()) is not None:
            raise StoreError(problem)

    def keep_waiting(self, session_id: str, texts: Sequence[str]) -> None:
        """Save the messages that wait to be sent in a conversation that is not open here.

        Without any, one in which nothing was said is removed. Raises StoreError.
        """
        with suppress(SessionNotFound):  # it was deleted
            read, log = self.open(session_id)
            try:
                if texts or len(read.conversation):
                    log.write(session_file.waiting_line(texts), durable=True)
                else:
                    log.discard()
            finally:
                log.close()

    def find(self, text: str, anywhere: bool = False) -> str:
        """Return the session id that `text` names: an id, a title, or the beginning of one.

        With `anywhere` it may be any part of a title that no other name fits.
        Raises SessionNotFound for no match, or for several, which it lists.
        """
        ids = self.ids()
        begun = [i for i in ids if i == text] or [i for i in ids if text and i.startswith(text)]
        named = [(session_id, "") for session_id in begun] or self._titled(text, anywhere)
        if not named:
            raise self._not_found(text, anywhere)
        if len(named) > 1:
            shown = "; ".join(f"{i} {title}".rstrip() for i, title in named[:_MAX_LISTED])
            more = f"; and {len(named) - _MAX_LISTED} more" if len(named) > _MAX_LISTED else ""
            raise SessionNotFound(
                f"{text} could be {len(named)} sessions: {shown}{more}.", "Give more of it."
            )
        return named[0][0]

    def _titled(self, text: str, anywhere: bool) -> list[tuple[str, str]]:
        """Return id and title of the sessions so called, or else of those whose title so begins,
        or else, with `anywhere`, of those whose title has the text.
        """
        wanted = " ".join(text.lower().split()).rstrip("…")
        if not wanted:
            return []
        titles = [(s.session_id, s.title) for s in self.summaries() if s.is_readable]
        known = [(i, title, " ".join(title.lower().split()).rstrip("…")) for i, title in titles]
        exact = [(i, title) for i, title, plain in known if plain == wanted]
        begun = [(i, title) for i, title, plain in known if plain.startswith(wanted)]
        within = [(i, title) for i, title, plain in known if anywhere and wanted in plain]
        return exact or begun or within

    def _not_found(self, text: str, anywhere: bool) -> SessionNotFound:
        """Return an error that says where a name was searched, and what comes near it."""
        searched = "has" if anywhere else "begins with"
        sentence = f"No conversation's id begins with {text}, and no title {searched} it."
        return SessionNotFound(sentence, self.near(text) or "`kvchat sessions` lists them.")

    def near(self, text: str) -> str:
        """Return a question that offers the titles most like a text; "" if none is like it."""
        titles = {s.title.lower(): s.title for s in self.summaries() if s.is_readable}
        close = difflib.get_close_matches(" ".join(text.lower().split()), titles, _MAX_NEAR)
        near = " or ".join(f"“{one_line(titles[title], 40)}”" for title in close if title)
        return f"Did you mean {near}?" if near else ""

    def summaries(self) -> list[SessionSummary]:
        """Return one summary per session, the most recently changed first."""
        return [self._summary(session_id) for session_id in self.ids()]

    def open_elsewhere(self, session_ids: Iterable[str]) -> set[str]:
        """Return which of these sessions another process has open; this one has none of them.

        Linux tells who holds a lock. Elsewhere the lock is tried, which keeps another process from
        opening the session at that moment.
        """
        paths = {session_id: self._path(session_id) for session_id in session_ids}
        try:
            locks = _LOCK.findall(_LOCKS.read_text())
        except OSError:
            return {session_id for session_id, path in paths.items() if _is_locked(path)}
        inodes = {int(inode) for process, inode in locks if int(process) != os.getpid()}
        return {session_id for session_id, path in paths.items() if _inode(path) in inodes}

    def _summary(self, session_id: str) -> SessionSummary:
        modified_s = _modified_ns(self._path(session_id)) / 1e9
        try:
            read = self._read_summary(session_id)
        except (StoreError, SessionNotFound):
            return SessionSummary(session_id, "(cannot be read)", 0, modified_s, False)
        return SessionSummary(session_id, read.label, read.num_turns, modified_s, model=read.model)

    def _read_summary(self, session_id: str) -> session_file.Summary:
        return session_file.read_summary(self.read_bytes(session_id), f"{session_id}{_SUFFIX}")

    def remove(self, session_id: str) -> None:
        """Delete a session's file; raises StoreError while a process has it open."""
        with self.removing(session_id):
            pass

    @contextmanager
    def removing(self, session_id: str) -> Iterator[None]:
        """Hold a session's file, and delete it at the end of the block, unless that raises.

        Raises SessionNotFound, or StoreError while a process has it open.
        """
        self._existing(session_id)
        log = self._open(session_id, os.O_WRONLY | os.O_APPEND)
        try:
            yield
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
    """Return a new id: date, time and four random hex digits, and no conversation text."""
    moment = datetime.fromtimestamp(time.time() if now_s is None else now_s)
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _settle_directory(directory: Path) -> None:
    """Sync a directory, so that a file's new name survives a power loss."""
    with suppress(OSError):  # not every file system supports it
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Return whether a file is locked by another holder; false if that cannot be determined."""
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except (StoreError, OSError):
        return False
    try:
        return try_lock(descriptor) is Lock.ANOTHERS
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _has_text(path: Path) -> bool:
    """Return whether a file is not empty; true if that cannot be determined."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return True


def _has_no_line(path: Path) -> bool:
    """Return whether a file has no complete first line; false if it cannot be read."""
    try:
        return b"\n" not in path.read_bytes()
    except OSError:
        return False


def _inode(path: Path) -> int:
    """Return a file's number on its device; 0 for a missing file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _modified_ns(path: Path) -> int:
    """Return a file's modification time; 0 for a missing file or a dangling link."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
