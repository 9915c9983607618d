"""PinFiles: which files a pin holds, so that they can be attached by its name.

A pin on disk has keys alone. The files' paths and digests are in the state directory, not with the
KV: after the KV is deleted, a name still attaches its files, which are then computed again. No
text of a file is written.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvchat.chat.attachment import Attached, read_attachment
from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.paths import MOST_STATE_BYTES, read_state, write_state
from kvchat.core.text import one_line

_VERSION = 1
_NAME = "pins"


class PinFiles:
    """The files of pins by their label. With `path` None there are none, and none is kept.

    Every call reads the file anew, because another process may have pinned meanwhile.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

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

    def remove(self, labels: Iterable[str]) -> None:
        """Forget the files of labels."""
        before, gone = self._read(), set(labels)
        kept = {label: files for label, files in before.items() if label not in gone}
        if self._path is not None and len(kept) < len(before):
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
        """Return the file that a path names, or else the files of the pin of this name.

        The sentence is on pinned files that changed since, "" for none. Raises UnreadableFile.
        """
        files = self.paths().get(str(path), ()) if not path.exists() else ()
        note = self.check(str(path)) if files else ""
        return [read_attachment(each) for each in files or (path,)], note

    def _read(self) -> dict[str, dict[str, str]]:
        """Return the digest by path of every label; what is damaged is left out."""
        found = read_state(self._path, _VERSION, _NAME) if self._path is not None else {}
        return {
            label: {str(path): str(digest) for path, digest in files.items()}
            for label, files in found.items()
            if isinstance(files, dict) and files
        }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
