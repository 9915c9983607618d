"""Reads and writes TOML: tables of the few kinds of values that settings have.

The standard library reads TOML and does not write it.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvchat.core.errors import StoreError, UnreadableFile, UsageError
from kvchat.core.paths import private_directory, read_bounded, replace_private
from kvchat.core.text import encoding_of, one_line

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_MAX_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 120
_MEND_IT = "Mend or remove it."


def read_table(path: Path) -> dict[str, object]:
    """Return what a TOML file holds, empty if there is no file.

    Raises UsageError for a file that is no TOML, UnreadableFile for one that cannot be read.
    """
    try:
        data = read_bounded(path, _MAX_BYTES)
        return tomllib.loads(data.decode(encoding_of(data)))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.", _MEND_IT) from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, as others are
        reason = one_line(str(error), _MAX_SHOWN_CHARS).rstrip(".")
        raise UsageError(f"{path} cannot be read: {reason}.", _MEND_IT) from error


def write_table(path: Path, values: Mapping[str, object]) -> None:
    """Replace a file of this user by a table whose values may be tables of names.

    Comments are lost. Raises UsageError for a value that settings cannot have, StoreError for a
    file that cannot be written.
    """
    content = table_text(values, path)
    private_directory(path.parent)
    try:
        replace_private(path, content)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error


def table_text(values: Mapping[str, object], path: Path) -> bytes:
    """Return what `write_table` writes to a path."""
    try:
        plain = {key: item for key, item in values.items() if not isinstance(item, dict)}
        text = _lines(plain)
        for name, tables in values.items():
            for key, table in tables.items() if isinstance(tables, dict) else ():
                text += f"\n[{_key(name)}.{_key(key)}]\n{_lines(table)}"
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The value is not valid UTF-8.") from error
    except (TypeError, ValueError, AttributeError) as error:  # dates, deeper tables, infinities
        raise UsageError(f"{path} sets what is no setting's value.", "Mend it by hand.") from error


def _lines(table: Mapping[str, object]) -> str:
    return "".join(f"{_key(key)} = {toml_value(item)}\n" for key, item in table.items())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name)


def toml_value(value: object) -> str:
    """Return a text, a number, a switch or a list as TOML; raises TypeError, ValueError."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    # JSON's strings and numbers are valid TOML, except for one character.
    if not isinstance(value, str | int | float):
        raise TypeError
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
