"""`kvchat presets`, and the flag --preset: values that flags left open come from a preset."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvchat.chat.modelfile import read_modelfile
from kvchat.chat.presets import Presets
from kvchat.cli.build import user_paths
from kvchat.cli.lines import print_line, say
from kvchat.core.paths import user_path
from kvchat.core.text import sanitize
from kvchat.core.toml_text import table_text


def open_presets() -> Presets:
    """Return this user's presets."""
    return Presets(user_paths().config.with_name("presets"))


def with_preset(flags: Mapping[str, Any], name: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return flags with a preset's values where none was given, and the files of the preset.

    A preset counts as flags do: it comes before the environment and config.toml, and holds in a
    conversation that is resumed. Raises UsageError.
    """
    if name is None:
        return dict(flags), []
    preset = open_presets().read(name)
    given = {key: value for key, value in flags.items() if value not in (None, [], ())}
    return {**flags, **preset.values, **given}, list(preset.files)


def list_presets() -> None:
    """Print each preset and what it holds, one a line."""
    lines = open_presets().lines()
    width = max((len(name) for name in lines), default=0)
    for name, line in lines.items():
        print_line(f"{name:{width}}  {line}")
    if not lines:
        print_line("There are no presets. /preset save NAME in a chat makes one.")


def show(name: str) -> None:
    """Print a preset as its file has it."""
    presets = open_presets()
    preset = presets.read(name)
    files = {"file": list(preset.files)} if preset.files else {}
    sys.stdout.write(sanitize(table_text({**preset.values, **files}, Path(name)).decode()))


def remove(name: str) -> None:
    """Delete a preset."""
    open_presets().remove(name)


def import_modelfile(name: str, file: str) -> None:
    """Make a preset of a Modelfile; say what is left out."""
    preset, notes = read_modelfile(user_path(file))
    path = open_presets().write(name, preset)
    for note in notes:
        say(note)
    print_line(f"Written to {path}. `kvchat --preset {name}` chats with it.")
