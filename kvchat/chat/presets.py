"""Presets: names for a model, a system prompt, parameters and files; each is a TOML file.

A preset has the names of parameters as `config.toml` has them, and `file`, a list of what chats
with it begin with: paths, patterns and pins. A system prompt `@FILE`, and the paths, begin in the
directory of presets.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvchat.core.errors import KvchatError, StoreError, UsageError
from kvchat.core.parameters import BY_NAME, new_texts
from kvchat.core.text import one_line, shown
from kvchat.core.toml_text import read_table, write_table

FILE = new_texts("file", "attached to a new conversation: a path, a pattern or a pin")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Preset:
    """What a preset holds: `values` of parameters by their names, and the `files` to attach."""

    values: Mapping[str, Any]
    files: tuple[str, ...] = ()

    def line(self) -> str:
        """Return what it holds in one line for a list."""
        parts = [f"file {each}" for each in self.files]
        for name, value in self.values.items():
            texts = value if isinstance(value, tuple) else (value,)
            parts += [f"{BY_NAME[name].dashed} {one_line(str(text), 40)}" for text in texts]
        return one_line(", ".join(parts), 160)


class Presets:
    """The presets of a directory, which need not exist; None for none that are kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        """Return the names in order."""
        found: list[str] = []
        with suppress(OSError):
            if self._directory is not None:
                files = self._directory.glob(f"*{_SUFFIX}")
                found = sorted(path.stem for path in files if _NAME.fullmatch(path.stem))
        return found

    def lines(self) -> dict[str, str]:
        """Return by name what each preset holds, in one line, or why it cannot be used."""
        lines = {}
        for name in self.names():
            try:
                lines[name] = self.read(name).line()
            except KvchatError as error:
                lines[name] = one_line(str(error), 160)
        return lines

    def read(self, name: str) -> Preset:
        """Return a preset; raises UsageError if there is none, or for a value that cannot be used.

        Raises UnreadableFile for a file that cannot be read.
        """
        path = self.path(name)
        if not path.is_file():
            close = get_close_matches(name, self.names(), 1)
            hint = f"Did you mean {close[0]}?" if close else "`kvchat presets` lists them."
            raise UsageError(f"There is no preset {one_line(name, 64)}.", hint)
        table = read_table(path)
        files = FILE.checked(table.pop(FILE.name, ()), f"{FILE.name} in {path}")
        values = {}
        for key, value in table.items():
            if key not in BY_NAME:
                raise UsageError(f"{path} sets {shown(key)}, which is no setting.")
            values[key] = self._checked(key, value, path)
        return Preset(values, tuple(self._from_here(each) for each in files))

    def _checked(self, key: str, value: object, path: Path) -> Any:
        if key == "system" and isinstance(value, str) and value.startswith("@"):
            value = f"@{self._from_here(value[1:])}"
        return BY_NAME[key].checked(value, f"{key} in {path}")

    def _from_here(self, name: str) -> str:
        """Return a name, where it is a path below the directory of presets the whole path."""
        assert self._directory is not None
        path = os.path.join(self._directory, os.path.expanduser(name))
        return path if os.path.exists(path) else name

    def write(self, name: str, preset: Preset) -> Path:
        """Keep a preset, in place of one of that name; return its file. Raises StoreError."""
        path = self.path(name)
        files = {FILE.name: list(preset.files)} if preset.files else {}
        write_table(path, {**preset.values, **files})
        return path

    def remove(self, name: str) -> None:
        """Delete a preset; raises UsageError if there is none, StoreError if that fails."""
        path = self.path(name)
        if not path.is_file():
            raise UsageError(f"There is no preset {one_line(name, 64)}.")
        try:
            path.unlink()
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error.strerror}.") from error

    def path(self, name: str) -> Path:
        """Return the file of a name; raises UsageError for what cannot be one."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"A preset cannot be called {one_line(name, 64)}.",
                "Letters, digits and any of . _ + - make a name.",
            )
        if self._directory is None:
            raise UsageError("No presets are kept here.")
        return self._directory / f"{name}{_SUFFIX}"
