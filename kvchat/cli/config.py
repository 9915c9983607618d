"""`kvchat config`: shows the current settings and their origins, and changes the file."""

import os
import re
import sys
from collections.abc import Callable, Mapping

from kvchat.cache.disk.quota import disk_budget
from kvchat.cli.build import cache_directory, session_store, settings_of, user_paths
from kvchat.cli.settings import OTHER_VARIABLES, Settings, known
from kvchat.cli.shared_cache import without_password
from kvchat.core.parameters import BY_NAME, Kind
from kvchat.core.paths import from_anywhere, user_path
from kvchat.core.text import format_bytes
from kvchat.core.toml_text import read_table, toml_value, write_table
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT

# In the file the meaning of a path would depend on the directory that kvchat is started in. A name
# is a path only if there is one, or if it begins as a path does.
_NAMES = (DEMO, DEMO_DRAFT, "ngram", "none")
_BEGINS_AS_PATH = re.compile(r"(~|\.{1,2})(/|$)")


def show(flags: Mapping[str, object], with_origin: bool) -> None:
    """Print every setting and the value that a chat would use, and where it comes from if asked.

    `flags` are those before the subcommand, None for those not given.
    """
    settings = settings_of(flags)
    for name in BY_NAME:
        line = f"{name:20} {_effective(name, settings)}"
        if with_origin:
            line = f"{line:64} {settings.origins[name]}"
        sys.stdout.write(line + "\n")
    for name in OTHER_VARIABLES:
        if value := os.environ.get(name):
            line = f"{name:20} {toml_value(value)}"
            sys.stdout.write(f"{line:64} {name}\n" if with_origin else line + "\n")


def _effective(name: str, settings: Settings) -> str:
    """Return a setting's value as TOML, or in words what a chat does without it."""
    value = settings[name]
    if name == "cache_dir":
        value = str(cache_directory(settings))
    elif name == "sessions_dir":
        value = str(session_store(settings).directory)
    elif name == "spec":
        value = settings.speculation_config(settings["model"]).mode != "off"
    elif name == "draft" and value is None:
        value = settings.draft_name(settings["model"]) or "none"
    elif name == "disk_cache" and value is None:
        return f"10% of what is free: {format_bytes(disk_budget(None, cache_directory(settings)))}"
    elif name == "shared_cache" and value is not None:
        value = without_password(value)
    if value is None or value == ():
        return BY_NAME[name].otherwise or "none"
    return toml_value(value)


def path() -> None:
    """Print the path of the configuration file, which may not exist yet."""
    sys.stdout.write(f"{user_paths().config}\n")


def set_value(name: str, text: str) -> None:
    """Set a value in the configuration file; comments in the file are lost.

    Raises UsageError for a value with which no chat could start.
    """
    value = known(name).parsed(_from_anywhere(name, text), name)
    _change(lambda current: {**current, name: value})


def _from_anywhere(name: str, text: str) -> str:
    """Return a setting's text, where it is a path one that holds in every working directory."""
    is_name = known(name).kind is Kind.NAME_OR_PATH
    if known(name).kind is Kind.PATH or (is_name and _BEGINS_AS_PATH.match(text)):
        return os.path.abspath(user_path(text)) if text.strip() else text
    return from_anywhere(text) if is_name and text not in _NAMES else text


def unset(name: str) -> None:
    """Remove a setting from the configuration file."""
    known(name)
    _change(lambda current: {key: item for key, item in current.items() if key != name})


def _change(change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    target = user_paths().config
    write_table(target, dict(sorted(change(read_table(target)).items())))
