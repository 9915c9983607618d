"""`kvchat config`: shows the current settings and their origins, and changes the file.

It writes TOML itself, for the few kinds of values that settings have.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvchat.cli.build import check, user_paths
from kvchat.cli.settings import (
    BY_NAME,
    SETTINGS,
    Settings,
    known,
    parse_value,
    read_config,
    resolve,
)
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.paths import open_private, private_directory, user_path

# In the file their meaning would depend on the directory that kvchat is started in.
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
    """Print the path of the configuration file, which may not exist yet."""
    sys.stdout.write(f"{user_paths().config}\n")


def set_value(name: str, text: str) -> None:
    """Set a value in the configuration file; comments in the file are lost.

    Raises UsageError for a value with which no chat could start.
    """
    if name in _DIRECTORIES:
        text = str(user_path(text).absolute())
    value = parse_value(name, text)
    _try_out(name, value)
    _change(lambda current: {**current, name: value})


def unset(name: str) -> None:
    """Remove a setting from the configuration file."""
    known(name)
    _change(lambda current: {key: item for key, item in current.items() if key != name})


def _try_out(name: str, value: object) -> None:
    """Run all checks of a value that a chat would run; raises UsageError."""
    defaults = {setting.name: setting.default for setting in SETTINGS}
    check(Settings({**defaults, name: value}))


def _change(change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    target = user_paths().config
    changed = sorted(change(read_config(target)).items())
    content = _document(changed, target)
    private_directory(target.parent)
    temporary = target.with_suffix(".new")
    descriptor = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{target} cannot be written: {error.strerror}.") from error


def _document(values: list[tuple[str, object]], target: Path) -> bytes:
    """Return the TOML file that sets these values; raises UsageError for unsupported values."""
    try:
        return "".join(f"{_key(key)} = {_toml(item)}\n" for key, item in values).encode()
    except UnicodeEncodeError as error:
        raise UsageError("The value is not valid UTF-8.") from error
    except (TypeError, ValueError) as error:  # dates, tables, and numbers without an end
        raise UsageError(
            f"{target} sets what is no setting's value.", "Mend it by hand."
        ) from error


def _key(name: str) -> str:
    return name if name in BY_NAME else json.dumps(name)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's strings and numbers are valid TOML, except for one character.
    if not isinstance(value, str | int | float):
        raise TypeError
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
