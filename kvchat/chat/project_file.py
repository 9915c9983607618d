"""ProjectFile: AGENTS.md or CLAUDE.md of a directory, which joins the system prompt of chats there.

The user decides it once for each directory: the file may be another person's.
"""

from pathlib import Path

from kvchat.core.paths import read_state, read_text, write_state

_NAMES = ("AGENTS.md", "CLAUDE.md")
_VERSION, _FACT = 1, "projects"
_TOLD = "told"
_MOST_BYTES, _MOST_DIRECTORIES = 1 << 20, 1024


class ProjectFile:
    """The project file of a directory. `state` keeps what was decided; None keeps nothing."""

    def __init__(self, directory: Path, state: Path | None) -> None:
        self._directory = directory
        self._state = state
        self._choice = self._choices().get(str(directory))
        self._joined = ""

    @property
    def path(self) -> Path | None:
        """The first of the files that is there, None for none."""
        paths = (self._directory / name for name in _NAMES)
        return next((path for path in paths if path.is_file()), None)

    @property
    def is_used(self) -> bool:
        return self._choice is True and self.path is not None

    def is_new(self) -> bool:
        """Return whether the user has yet to hear of the file; later calls return false."""
        is_new = self.path is not None and self._choice is None
        if is_new:
            self.use(_TOLD)
        return is_new

    def read(self) -> str:
        """Return the file's text, "" without one; raises UnreadableFile."""
        return read_text(self.path, _MOST_BYTES) if self.path is not None else ""

    def joined(self, system: str | None, text: str | None = None) -> str | None:
        """Return a system prompt with the file's text behind it, where it is used.

        text   stands for the file's, whether it is used or not

        Raises UnreadableFile for a file that is used and cannot be read.
        """
        if text is None:
            text = self.read() if self.is_used else ""
        self._joined = text or self._joined
        return "\n\n".join(part for part in (system, text) if part) or None

    def is_in(self, system: str | None) -> bool:
        """Return whether a system prompt ends with the text that this process has joined."""
        return bool(self._joined) and (system or "").endswith(self._joined)

    def without(self, system: str | None) -> str | None:
        """Return a system prompt without that text."""
        if system is None or not self.is_in(system):
            return system
        return system.removesuffix(self._joined).rstrip("\n") or None

    def _choices(self) -> dict[str, object]:
        return read_state(self._state, _VERSION, _FACT)

    def use(self, choice: bool | str) -> None:
        """Decide whether chats in this directory have it in their system prompt."""
        self._choice = choice
        others = {k: v for k, v in self._choices().items() if k != str(self._directory)}
        newest = [*others.items(), (str(self._directory), choice)][-_MOST_DIRECTORIES:]
        write_state(self._state, _VERSION, _FACT, dict(newest))
