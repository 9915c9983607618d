"""Files attached to a message, and those of pins: finds them by @path, reads and splits them off.

A file's text is put in a code fence below its name, so that a model sees its beginning and end.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from kvchat.chat.thinned_pins import ThinnedPins
from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.paths import (
    MOST_STATE_BYTES,
    open_regular,
    read_bounded,
    read_state,
    user_path,
    write_state,
)
from kvchat.core.text import fence_of, format_bytes, one_line, text_of


@dataclass(frozen=True, slots=True)
class Attached:
    """A file for the next message; `text` is its fenced text, as the model receives it.

    `is_whole` is whether all of the file could be read as text; U+FFFD stands for what could not.
    """

    name: str
    text: str
    is_whole: bool = True

    @property
    def note(self) -> str:
        """A sentence on bytes that are no text, "" if there are none."""
        if self.is_whole:
            return ""
        return f"Some of {one_line(self.name)} is no UTF-8 text; it is sent as \ufffd."


_MAX_BYTES = 16 * 2**20
_MOST_FILES, _MOST_SEEN = 500, 20_000
_NO_SOURCES = ("node_modules", "__pycache__")
_BEGINNING_BYTES = 8192
_ADDRESS = re.compile(r"https?:/", re.IGNORECASE)
_HAS_SUFFIX = re.compile(r"\.\w+\Z")


def read_attachment(path: Path, title: str = "") -> Attached:
    """Return a file with its text, fenced below its name, to put before a message.

    title   stands for the name, as for a file of a directory its path

    Raises UnreadableFile for one that is missing, not text, or larger than 16 MiB.
    """
    try:
        data = read_bounded(path, _MAX_BYTES)
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    text, is_whole = text_of(data)
    if "\0" in text:
        raise UnreadableFile(f"{path} is not a text file.", "Only text can be attached.")
    return attached_text(title or path.name, text, is_whole)


def attached_text(name: str, text: str, is_whole: bool = True) -> Attached:
    """Return a text to put before a message as a file of that name."""
    text = text.rstrip("\n")
    fence = fence_of(text)
    # Without a dot a name could be a word of the message: "Code:" above a fence.
    title = name if _HAS_SUFFIX.search(name) else f"./{name}"
    return Attached(name, f"{title}:\n{fence}\n{text}\n{fence}\n", is_whole)


_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_TRAILING = ".,;:!?)]}'\""


_NO_PINS: Mapping[str, Sequence[Path]] = MappingProxyType({})


def mentioned_files(text: str, pins: Mapping[str, Sequence[Path]] = _NO_PINS) -> list[Path]:
    """Return the files that a message mentions as @path or @pin, each once, in order.

    `pins` are the files of each pin by its label; a file of the same name comes first.
    """
    found: list[Path] = []
    for match in _MENTION.finditer(text):
        name = match[1] or match[2]
        path = _existing(name)
        paths = pins.get(_pin_label(name, pins), ()) if path is None else (path,)
        found += [each for each in paths if each not in found]
    return found


def mentioned_pins(text: str, pins: Collection[str]) -> list[str]:
    """Return the labels of the pins that a message mentions, each once, in order."""
    names = (match[1] or match[2] for match in _MENTION.finditer(text))
    labels = (_pin_label(name, pins) for name in names if _existing(name) is None)
    return [label for label in dict.fromkeys(labels) if label]


def _pin_label(name: str, pins: Collection[str]) -> str:
    """Return the label that a mention names, "" for none; its end may be punctuation."""
    while name and name not in pins and name[-1] in _TRAILING:
        name = name[:-1]
    return name if name in pins else ""


_LOOKS_LIKE_PATH = re.compile(r"/|\.[A-Za-z0-9]{1,5}$")
# So many names are listed; the others are counted.
_MOST_NAMED = 3


def unattached(text: str, pins: Collection[str] = ()) -> list[str]:
    """Return why each @name of a message that names neither a file nor a pin is not attached.

    In a text of several lines a bare word, as @property, is likely code, and meant as it is.
    """
    named = (match[1] or match[2].rstrip(_TRAILING) for match in _MENTION.finditer(text))
    names = [name for name in dict.fromkeys(named) if name]
    missing = [n for n in names if _existing(n) is None and not _pin_label(n, pins)]
    reasons = {name: _why_unattached(name) for name in missing}
    is_said = "\n" not in text.strip()
    unknown = [n for n in missing if not reasons[n] and (is_said or _LOOKS_LIKE_PATH.search(n))]
    found = [reason for reason in reasons.values() if reason]
    return [_unknown(unknown, pins), *found] if unknown else found


def _why_unattached(name: str) -> str:
    """Return why something that exists, or that is a pattern, is not attached; "" for others."""
    shown = one_line(name, 60)
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(name).expanduser()
        if path.is_dir():
            return f"{shown} is a directory"
        if path.exists():
            return f"{shown} is not a regular file"
    if set(name) & set("*?["):
        return f"@ takes one file, /file {shown} all that match"
    return ""


def _unknown(names: Sequence[str], pins: Collection[str]) -> str:
    """Return one clause on names that nothing has, with a pin that is nearly called so."""
    listed = " or ".join(one_line(name, 60) for name in names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        listed += f" or {len(names) - _MOST_NAMED} more"
    kind = "file" if all(_LOOKS_LIKE_PATH.search(name) for name in names) else "file or pin"
    close = difflib.get_close_matches(names[0], pins, 1) if len(names) == 1 else []
    near = f" (there is a pin {one_line(close[0], 60)})" if close else ""
    return f"There is no {kind} {listed}{near}"


@dataclass(frozen=True, slots=True)
class Files:
    """Files that a word names. With `is_many` it is a directory or a pattern, not one file."""

    paths: tuple[Path, ...]
    is_many: bool = False

    def read(self) -> list[Attached]:
        """Return the files; those of several directories have their paths for names.

        Raises UnreadableFile.
        """
        is_one_place = len({each.parent for each in self.paths}) == 1
        return [read_attachment(each, "" if is_one_place else str(each)) for each in self.paths]


def matching_files(word: str) -> Files:
    """Return the files of a path, of a pattern such as `docs/**/*.md`, or below a directory.

    A path that no file has is returned alone. Of a directory these are its text files without
    hidden ones and links. Raises UsageError for a pattern that no file has, for a directory without
    text or with too much, and for the address of a page.
    """
    if _ADDRESS.match(word):
        raise UsageError(
            "kvchat fetches no pages from addresses.",
            "Pipe one in, as in `curl -s URL | kvchat`, or let a tool fetch it.",
        )
    path = user_path(word)
    if path.is_dir():
        found = list(islice(_below(path), _MOST_FILES + 1))
        if not found:
            raise UsageError(f"{one_line(word, 60)} has no text files.")
        return Files(_few(word, found), is_many=True)
    if path.exists() or not set(word) & set("*?["):
        return Files((path,))
    found = [Path(name) for name in sorted(glob(str(path), recursive=True))]
    found = [each for each in found if each.is_file()]
    if not found:
        raise UsageError(
            f"No file is named {one_line(word, 60)}.",
            "A pattern begins in the working directory, or with / or ~.",
        )
    return Files(_few(word, found), is_many=True)


def _below(directory: Path) -> Iterator[Path]:
    """Yield the text files below a directory in order, without links, hidden ones and packages.

    Raises UsageError where so many are no text that looking at them would take long.
    """
    num_seen = 0
    for root, directories, names in os.walk(directory):
        directories[:] = sorted(d for d in directories if d[0] != "." and d not in _NO_SOURCES)
        num_seen += len(names)
        if num_seen > _MOST_SEEN:
            raise UsageError(
                f"{one_line(str(directory), 60)} has more than {_MOST_SEEN:,} files.",
                "Name a part of them, as in src/*.py.",
            )
        paths = (Path(root, name) for name in sorted(names) if name[0] != ".")
        yield from (each for each in paths if not each.is_symlink() and _is_text(each))


def _is_text(path: Path) -> bool:
    with suppress(OSError):
        descriptor = open_regular(path)
        try:
            return b"\0" not in os.read(descriptor, _BEGINNING_BYTES)
        finally:
            os.close(descriptor)
    return False


def _few(word: str, paths: list[Path]) -> tuple[Path, ...]:
    """Return paths; raises UsageError where they are more than any context holds."""
    num_bytes = 0
    for number, path in enumerate(paths):
        with suppress(OSError):
            num_bytes += path.stat().st_size
        if number >= _MOST_FILES or num_bytes > _MAX_BYTES:
            raise UsageError(
                f"{one_line(word, 60)} names more than {_MOST_FILES} files, or than "
                f"{_MAX_BYTES >> 20} MiB of them.",
                "Name a part of them, as in src/*.py.",
            )
    return tuple(paths)


def _existing(name: str) -> Path | None:
    """Return the file of a name; punctuation at its end may belong to the sentence."""
    while name:
        try:
            path = Path(name).expanduser()
            if path.is_file():
                return path
        except (OSError, ValueError, RuntimeError):
            return None
        if name[-1] not in _TRAILING:
            return None
        name = name[:-1]
    return None


_ATTACHED = re.compile(r"(\./[^\n]+|[^\n]*\.\w+):\n(`{3,})\n.*?\n\2\n\n", re.DOTALL)


def split_attached(text: str) -> tuple[list[str], str]:
    """Return the names of the files at the beginning of a message, and the words after them."""
    files = attached_files(text)
    return [name for name, _ in files], text[sum(len(whole) for _, whole in files) :]


def attached_files(text: str) -> list[tuple[str, str]]:
    """Return the name and the fenced text of each file at the beginning of a message.

    These texts joined are the beginning of the message.
    """
    files: list[tuple[str, str]] = []
    end = 0
    while (match := _ATTACHED.match(text, end)) is not None:
        files.append((match[1].removeprefix("./"), match[0]))
        end = match.end()
    return files


# A pin on disk has keys alone. The files' paths and digests are in the state directory, not with
# the KV: after the KV is deleted, a name still attaches its files, which are then computed again.
# No text of a file is written.

_VERSION = 1
_NAME = "pins"


class PinFiles:
    """The files of pins by their label. With `path` None there are none, and none is kept.

    Every call reads the file anew, because another process may have pinned meanwhile.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.thinned = ThinnedPins(path and path.with_name("thinned_pins.json"))

    def paths(self) -> Mapping[str, Sequence[Path]]:
        """Return the absolute paths of each pin's files, in the order in which they are read."""
        return {label: tuple(map(Path, files)) for label, files in self._read().items()}

    def put(self, label: str, paths: Iterable[Path]) -> None:
        """Keep the files of a label, in place of those it had.

        Raises UsageError for a reserved label, or if the list cannot be kept.
        """
        if self._path is None:
            return
        files = {str(path.absolute()): _digest(read_attachment(path).text) for path in paths}
        everything = {**self._read(), label: files}
        if len(json.dumps(everything)) > MOST_STATE_BYTES - 1024:
            raise UsageError(
                f"The list of all pinned files would exceed {MOST_STATE_BYTES >> 20} MiB.",
                "/unpin removes a pin.",
            )
        if not write_state(self._path, _VERSION, _NAME, dict(everything)):
            raise UsageError(
                f"The files of the pin cannot be noted in {self._path}, so its name attaches none.",
                "`kvchat doctor` says where the log is.",
            )

    def remove(self, labels: Collection[str]) -> None:
        """Forget the files of labels, and which of their positions stay."""
        self.thinned.remove(labels)
        before, gone = self._read(), set(labels)
        kept = {label: files for label, files in before.items() if label not in gone}
        if len(kept) < len(before):
            write_state(self._path, _VERSION, _NAME, dict(kept))

    def check(self, label: str) -> str:
        """Return a sentence on files that changed since they were pinned, "" if none did.

        Raises UnreadableFile if one of them cannot be read any more.
        """
        changed = []
        for name, digest in self._read()[label].items():
            try:
                text = read_attachment(Path(name)).text
            except UnreadableFile as error:
                raise UnreadableFile(
                    f"The pin {one_line(label, 64)} needs all its files: {error.message}",
                    f"/unpin {one_line(label, 64)} removes the pin.",
                ) from error
            if _digest(text) != digest:
                changed.append(one_line(Path(name).name))
        if not changed:
            return ""
        return (
            f"Since it was pinned, {', '.join(changed)} changed: it is read again from there on. "
            f"/pin {one_line(label, 64)} FILE... pins it again."
        )

    def attachments(self, path: Path) -> tuple[list[Attached], str]:
        """Return the files that a path or a pattern names, or else those of the pin of this name.

        The sentence is on pinned files that changed since, or how many the files are; "" for one.
        Raises UnreadableFile, UsageError.
        """
        files = self.paths().get(str(path), ()) if not path.exists() else ()
        if files:
            note = self.check(str(path))
            return [read_attachment(each) for each in files], note
        found = matching_files(str(path))
        attached = found.read()
        size = format_bytes(sum(len(each.text.encode()) for each in attached))
        note = f"{one_line(str(path))}: {len(attached):,} files, {size}, are attached."
        return attached, note if found.is_many else ""

    def _read(self) -> dict[str, dict[str, str]]:
        """Return the digest by path of every label; what is damaged is left out."""
        found = read_state(self._path, _VERSION, _NAME)
        return {
            label: {str(path): str(digest) for path, digest in files.items()}
            for label, files in found.items()
            if isinstance(files, dict) and files
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
