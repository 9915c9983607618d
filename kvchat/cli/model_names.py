"""Names of models: short ones and aliases stand for what `--model` takes.

Aliases are a table beside config.toml, `aliases.toml`, from each alias to a model's name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.cli.build import has_endpoint, memory_of, user_paths
from kvchat.cli.settings import Settings, name_to_keep
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.paths import user_path
from kvchat.core.text import one_line
from kvchat.core.toml_text import read_table, write_table
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT

if TYPE_CHECKING:
    from kvchat.chat.surroundings import Surroundings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_OWN_NAMES = (DEMO, DEMO_DRAFT, "ngram", "none")


def _aliases_path() -> Path:
    return user_paths().config.with_name("aliases.toml")


def aliases() -> dict[str, str]:
    """Return the model's name of each alias; raises UsageError for a file that is none."""
    table = read_table(_aliases_path())
    return {name: model for name, model in table.items() if isinstance(model, str)}


def set_alias(alias: str, model: str | None) -> None:
    """Let an alias stand for a model, or with None for none. Raises UsageError, StoreError."""
    if not _NAME.fullmatch(alias) or alias in _OWN_NAMES:
        raise UsageError(
            f"{one_line(alias, 64)} cannot be an alias.",
            "Letters, digits and any of . _ + - make one; the demo's names are taken.",
        )
    known: Mapping[str, str] = aliases()
    if model is None and alias not in known:
        raise UsageError(f"There is no alias {one_line(alias, 64)}.")
    others = {name: target for name, target in known.items() if name != alias}
    write_table(_aliases_path(), others if model is None else {**others, alias: model})


def whole_name(settings: Settings, name: str) -> str:
    """Return a model's name as a conversation keeps it, for an alias or a short name too.

    A short name is that of a file that was used, or of one where models are looked for, without
    its directory; .gguf may be left out. A file or a directory of the name here comes first.
    """
    whole = name_to_keep(name)
    is_short = whole == name and name not in _OWN_NAMES and not set(name) & set("/:")
    if not is_short or has_endpoint(settings):
        return whole
    if (model := aliases().get(name)) is not None:
        return model
    from kvchat.model.checkpoint.local_models import short_names
    from kvchat.model.checkpoint.used_models import UsedModels

    known = short_names(UsedModels(memory_of(settings)).read(), model_directories(settings))
    return known.get(name.removesuffix(".gguf"), name)


def short_name(name: str) -> str:
    """Return a model's name for clients: of files on this machine, the last part of their path."""
    path = Path(name)
    return path.absolute().name.removesuffix(".gguf") if path.exists() else name


def model_directories(settings: Settings) -> list[Path]:
    """Return where models are looked for."""
    from kvchat.model.checkpoint.local_models import default_directory

    return [default_directory(), *map(user_path, settings["model_dir"])]


def surroundings_of(settings: Settings) -> "Surroundings":
    """Return what a user may name in a chat."""
    from kvchat.chat.presets import Presets
    from kvchat.chat.project_file import ProjectFile
    from kvchat.chat.surroundings import Surroundings
    from kvchat.model.checkpoint.used_models import UsedModels

    used = UsedModels(memory_of(settings))

    def lines() -> list[str]:
        from kvchat.model.checkpoint.local_models import model_lines

        return model_lines(used.read(), model_directories(settings), aliases_if_any())

    def names() -> list[str]:
        from kvchat.model.checkpoint.local_models import short_names

        return [*aliases_if_any(), *short_names(used.read(), model_directories(settings))]

    presets = Presets(user_paths().config.with_name("presets"))
    state = None if settings["incognito"] else user_paths().state / "projects.json"
    return Surroundings(lines, names, presets, ProjectFile(Path.cwd(), state))


def aliases_if_any() -> dict[str, str]:
    """Return the aliases; none where their file cannot be read: lists go on without them."""
    try:
        return aliases()
    except KvchatError:
        return {}
