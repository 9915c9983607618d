"""`kvchat config`: show the settings in force, where they come from, and change the file.

Knows TOML well enough to write the few kinds of values settings have.
"""

import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from kvchat.cli.build import check, user_paths
from kvchat.cli.settings import SETTINGS, Settings, known, parse_value, resolve
from kvchat.core.errors import StoreError
from kvchat.core.paths import open_private, private_directory, user_path

# Read from a file they would depend on where kvchat happens to be started.
_DIRECTORIES = ("cache_dir", "sessions_dir")


def show(with_origin: bool) -> None:
    """Print every setting and its value, and where it comes from if asked."""
    settings = resolve({}, os.environ, user_paths().config)
    for setting in SETTINGS:
        value = settings[setting.name]
        shown = "-" if value is None or value == () else _toml(value)
        line = f"{setting.name:20} {shown}"
        if with_origin:
            line = f"{line:48} {settings.origins[setting.name]}"
        sys.stdout.write(line + "\n")


def path() -> None:
    """Print where the configuration file is, or would be."""
    sys.stdout.write(f"{user_paths().config}\n")


def set_value(name: str, text: str) -> None:
    """Set a value in the configuration file; the file's comments are not kept.

    Raises UsageError for what no chat could begin with.
    """
    if name in _DIRECTORIES:
        text = str(user_path(text).absolute())
    value = parse_value(name, text)
    _try_out(name, value)
    _change(lambda current: {**current, name: value})


def unset(name: str) -> None:
    """Take a setting out of the configuration file."""
    known(name)
    _change(lambda current: {key: item for key, item in current.items() if key != name})


def _try_out(name: str, value: object) -> None:
    """Have everybody look at a value who would refuse it later."""
    defaults = resolve({}, {}, Path(os.devnull)).values
    check(Settings({**defaults, name: value}))


def _change(change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    target = user_paths().config
    try:
        current = tomllib.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StoreError(f"{target} cannot be read: {error}.", "Mend or remove it.") from error
    changed = sorted(change(current).items())
    content = "".join(f"{key} = {_toml(item)}\n" for key, item in changed)
    private_directory(target.parent)
    temporary = target.with_suffix(".new")
    descriptor = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        temporary.replace(target)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}.") from error


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's strings and numbers are TOML's too, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
