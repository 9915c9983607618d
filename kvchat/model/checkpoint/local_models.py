"""Lists the models on this machine: the shipped demo, files, the Hugging Face cache, ollama's.

Reads directories only, and what is known of the models that were used. A further place is one more
function in `local_models`.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvchat.core.errors import KvchatError
from kvchat.core.text import format_age, format_bytes, one_line
from kvchat.model.checkpoint.source import DEMO, ModelSource, demo_directory
from kvchat.model.checkpoint.used_models import UsedModel
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.files.hub_cache import cached_models, file_sizes
from kvchat.model.gguf.source import format_in, label, model_sizes, ollama_models

_HUB = "Hugging Face cache"
_SHORT_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `name` is what `--model` takes; `num_bytes` is its size on disk.

    place     where it is, in a few words
    trouble   why kvchat cannot run it, in a few words; empty if nothing is known against it
    used_s    when it was loaded last, in seconds since the epoch; 0 if that is not known
    weights   the format of its weights, as its name or configuration says; "" if they do not
    """

    name: str
    num_bytes: int
    place: str
    trouble: str = ""
    used_s: float = 0.0
    weights: str = ""


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
    found = _once_each(_of_files(used, directories), used)
    found += [LocalModel(name, size, "ollama's store") for name, size in ollama_models()]
    found.sort(key=lambda model: model.name.lower())
    weights = format_of_directory(demo_directory())
    found = [LocalModel(DEMO, size, "shipped with kvchat", weights=weights), *found]
    found = [
        replace(model, used_s=max(model.used_s, used[model.name].used_s))
        if model.name in used
        else model
        for model in found
    ]
    return sorted(found, key=lambda model: -model.used_s)


def _once_each(files: list[LocalModel], used: Mapping[str, UsedModel]) -> list[LocalModel]:
    """Return the models of files and of the hub's cache once each, whatever links lead to them.

    One in the cache has its name there. Of several other names that stands which was used last,
    else the file's own.
    """

    def rank(model: LocalModel) -> tuple[float, bool]:
        known = used.get(model.name)
        is_own = model.name == os.path.realpath(model.name)
        return known.used_s if known is not None else 0.0, is_own

    by_file = {_identity(model.name): model for model in sorted(files, key=rank)}
    in_hub = []
    for name, places in cached_models():
        for model, paths in _of_hub(name, places):
            linked = [by_file.pop(identity, model) for identity in map(_identity, paths)]
            used_s = max(rank(each)[0] for each in (model, *linked))
            in_hub.append(replace(model, used_s=used_s))
    return [*in_hub, *by_file.values()]


def _identity(path: str) -> object:
    """Return what all names of a file or a directory have in common."""
    try:
        status = os.stat(path)
    except OSError:
        return path
    return status.st_dev, status.st_ino


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
        for folder, below, names in os.walk(directory, followlinks=True):
            is_top = folder == str(directory)
            below[:] = below if is_top else []
            weights = 0
            for name in names:
                with suppress(OSError):
                    if name.endswith(".gguf"):
                        path = os.path.join(folder, name)
                        sizes.setdefault(path, os.stat(path).st_size)
                    elif name.endswith(".safetensors") and not is_top:
                        weights += os.stat(os.path.join(folder, name)).st_size
            if "config.json" in names and not is_top:
                sizes.setdefault(folder, weights)
    return [
        LocalModel(name, size, _shown_place(name), weights=_format_of(name))
        for name, size in sizes.items()
    ]


def _format_of(path: str) -> str:
    return format_in(path).upper() if path.endswith(".gguf") else format_of_directory(Path(path))


def stored_format(source: ModelSource) -> str:
    """Return the format of a model's weights, as its files say; "" if they do not."""
    return (
        source.gguf.file_type if source.gguf is not None else format_of_directory(source.directory)
    )


def format_of_directory(directory: Path) -> str:
    """Return the format of a checkpoint's weights, as its configuration names it; "" if not."""
    try:
        config = read_json(directory / "config.json") or {}
    except KvchatError:
        return ""
    packed = config.get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, dict) else None
    dtype = config.get("dtype", config.get("torch_dtype"))
    for name in (method, _SHORT_DTYPES.get(dtype) if isinstance(dtype, str) else None):
        if isinstance(name, str):
            return one_line(name, 16)
    return ""


def default_directory() -> Path:
    """Return where models are looked for without being asked."""
    return Path.home() / "models"


def _shown_place(path: str) -> str:
    """Return the directory of a model's files, as people write it."""
    directory, home = os.path.dirname(path), os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if f"{directory}/".startswith(f"{home}/") else directory


def short_names(
    used: Mapping[str, UsedModel], directories: Sequence[Path] | None = None
) -> dict[str, str]:
    """Return the path of each model of files by its short name: the file's, without .gguf.

    Of two models of one name the one that was used last has it.
    """
    paths = [model.name for model in _of_files(used, directories)]
    return _by_short_name(paths, {name: model.used_s for name, model in used.items()})


def _by_short_name(paths: list[str], used_s: Mapping[str, float]) -> dict[str, str]:
    in_order = sorted(paths, key=lambda path: used_s.get(path, 0.0))
    return {os.path.basename(path).removesuffix(".gguf"): path for path in in_order}


def _of_hub(name: str, places: list[Path]) -> Iterator[tuple[LocalModel, list[str]]]:
    """Yield a repository's model, or one for each GGUF model in it, with its paths there."""
    files = file_sizes(places)
    sizes = model_sizes({name: size for name, size in files.items() if name.endswith(".gguf")})
    for file, size in sizes.items():
        weights = format_in(file).upper()
        paths = [os.path.join(place, file) for place in places]
        yield LocalModel(f"{name}:{label(file)}", size, _HUB, weights=weights), paths
    if not sizes:
        has_weights = any(file.endswith(".safetensors") for file in files)
        trouble = "" if has_weights else "no safetensors weights"
        weights = format_of_directory(places[0])
        model = LocalModel(name, sum(files.values()), _HUB, trouble, weights=weights)
        yield model, list(map(str, places))


def model_lines(
    used: Mapping[str, UsedModel] | None = None,
    directories: Sequence[Path] | None = None,
    aliases: Mapping[str, str] | None = None,
    warm: Mapping[str, int] | None = None,
) -> list[str]:
    """Return a line for each of the `local_models`: its name, format, size, place, last use,
    conversations and trouble.

    A model of files has its short name, unless another one has it; `aliases` stand behind it.
    `warm` is how many conversations of a model have KV on the disk, by the model's name.
    """
    models = local_models(used, directories)
    paths = [model.name for model in models if os.path.isabs(model.name)]
    used_s = {model.name: model.used_s for model in models}
    short = {path: name for name, path in _by_short_name(paths, used_s).items()}
    names = [short.get(m.name, m.name) + _other_names(m, aliases or {}) for m in models]
    width = max(map(len, names), default=0)
    formats = max((len(model.weights) for model in models), default=0)
    now_s = time.time()
    return [
        f"{name:{width}}  {model.weights:{formats}}  {format_bytes(model.num_bytes):>9}  "
        + ", ".join(_facts(model, (warm or {}).get(model.name, 0), now_s))
        for name, model in zip(names, models, strict=True)
    ]


def _facts(model: LocalModel, num_warm: int, now_s: float) -> Iterator[str]:
    yield model.place
    if model.used_s:
        yield f"used {format_age(now_s - model.used_s)}"
    if num_warm:
        yield f"{num_warm} warm {'conversation' if num_warm == 1 else 'conversations'}"
    if model.trouble:
        yield model.trouble


def _other_names(model: LocalModel, aliases: Mapping[str, str]) -> str:
    names = [alias for alias, name in aliases.items() if name == model.name]
    return f" ({', '.join(names)})" if names else ""
