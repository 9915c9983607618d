"""Lists the models on this machine: the shipped demo, files, the Hugging Face cache, ollama's.

Reads directories only, and what is known of the models that were used. A further place is one more
function in `local_models`.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvchat.core.text import format_age, format_bytes
from kvchat.model.checkpoint.source import DEMO, demo_directory
from kvchat.model.checkpoint.used_models import UsedModel
from kvchat.model.files.hub_cache import cached_models, file_sizes
from kvchat.model.gguf.source import label, model_sizes, ollama_models


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `name` is what `--model` takes; `num_bytes` is its size on disk.

    place     where it is, in a few words
    trouble   why kvchat cannot run it, in a few words; empty if nothing is known against it
    used_s    when it was loaded last, in seconds since the epoch; 0 if that is not known
    """

    name: str
    num_bytes: int
    place: str
    trouble: str = ""
    used_s: float = 0.0


def local_models(
    used: Mapping[str, UsedModel] | None = None, directories: Sequence[Path] | None = None
) -> list[LocalModel]:
    """Return the models on this machine: those used last first, then the demo, then by name.

    used          the models that were loaded, by their names: files of them are listed wherever
                  they are
    directories   are searched for others; None for `~/models` alone
    """
    used = used or {}
    size = sum(path.stat().st_size for path in demo_directory().iterdir() if path.is_file())
    found = [model for name, places in cached_models() for model in _of_hub(name, places)]
    found += [LocalModel(name, size, "ollama's store") for name, size in ollama_models()]
    found += _of_files(used, directories)
    found.sort(key=lambda model: model.name.lower())
    found = [LocalModel(DEMO, size, "shipped with kvchat"), *found]
    found = [
        replace(model, used_s=used[model.name].used_s) if model.name in used else model
        for model in found
    ]
    return sorted(found, key=lambda model: -model.used_s)


def _of_files(
    used: Mapping[str, UsedModel], directories: Sequence[Path] | None
) -> list[LocalModel]:
    """Return the models that were used from a path, and those of directories."""
    sizes = {
        name: model.num_bytes
        for name, model in used.items()
        if os.path.isabs(name) and os.path.exists(name)
    }
    for directory in directories if directories is not None else (default_directory(),):
        with suppress(OSError):
            for path in (*directory.glob("*.gguf"), *directory.glob("*/*.gguf")):
                sizes.setdefault(str(path), path.stat().st_size)
            for path in directory.glob("*/config.json"):
                weights = path.parent.glob("*.safetensors")
                sizes.setdefault(str(path.parent), sum(file.stat().st_size for file in weights))
    return [LocalModel(name, size, _shown_place(name)) for name, size in sizes.items()]


def default_directory() -> Path:
    """Return where models are looked for without being asked."""
    return Path.home() / "models"


def _shown_place(path: str) -> str:
    """Return the directory of a model's files, as people write it."""
    directory = os.path.dirname(path)
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if f"{directory}/".startswith(f"{home}/") else directory


def short_names(
    used: Mapping[str, UsedModel], directories: Sequence[Path] | None = None
) -> dict[str, str]:
    """Return the path of each model of files by its short name: the file's, without .gguf.

    Of two models of one name the one that was used last has it.
    """
    paths = sorted(
        (model.name for model in _of_files(used, directories)),
        key=lambda path: used[path].used_s if path in used else 0.0,
    )
    return {os.path.basename(path).removesuffix(".gguf"): path for path in paths}


def _of_hub(name: str, places: list[Path]) -> list[LocalModel]:
    """Return a repository's model, or one for each GGUF model in it."""
    files = file_sizes(places)
    sizes = model_sizes({name: size for name, size in files.items() if name.endswith(".gguf")})
    if sizes:
        return [
            LocalModel(f"{name}:{label(file)}", size, "Hugging Face cache")
            for file, size in sizes.items()
        ]
    has_weights = any(file.endswith(".safetensors") for file in files)
    trouble = "" if has_weights else "no safetensors weights"
    return [LocalModel(name, sum(files.values()), "Hugging Face cache", trouble)]


def model_lines(
    used: Mapping[str, UsedModel] | None = None,
    directories: Sequence[Path] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a line for each of the `local_models`: its name, size, place, last use and trouble.

    A model of files has its short name, unless another one has it; `aliases` stand behind it.
    """
    short = {path: name for name, path in short_names(used or {}, directories).items()}
    models = [
        replace(model, name=short.get(model.name, model.name) + _other_names(model, aliases or {}))
        for model in local_models(used, directories)
    ]
    width = max((len(model.name) for model in models), default=0)
    return [
        f"{model.name:{width}}  {format_bytes(model.num_bytes):>9}  {model.place}"
        + (f", used {format_age(time.time() - model.used_s)}" if model.used_s else "")
        + (f", {model.trouble}" if model.trouble else "")
        for model in models
    ]


def _other_names(model: LocalModel, aliases: Mapping[str, str]) -> str:
    names = [alias for alias, name in aliases.items() if name == model.name]
    return f" ({', '.join(names)})" if names else ""
