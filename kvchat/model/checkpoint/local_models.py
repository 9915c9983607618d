"""Lists the models on this machine: the shipped demo, the Hugging Face cache, ollama's store.

Reads directories only. A further place is one more function in `local_models`.
"""

from dataclasses import dataclass
from pathlib import Path

from kvchat.core.text import format_bytes
from kvchat.model.checkpoint.source import DEMO, demo_directory
from kvchat.model.files.hub_cache import cached_models, file_sizes
from kvchat.model.gguf.source import label, model_sizes, ollama_models


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `name` is what `--model` takes; `num_bytes` is its size on disk.

    place     where it is, in a few words
    trouble   why kvchat cannot run it, in a few words; empty if nothing is known against it
    """

    name: str
    num_bytes: int
    place: str
    trouble: str = ""


def local_models() -> list[LocalModel]:
    """Return all models on this machine, the demo first, then by name."""
    size = sum(path.stat().st_size for path in demo_directory().iterdir() if path.is_file())
    found = [model for name, places in cached_models() for model in _of_hub(name, places)]
    found += [LocalModel(name, size, "ollama's store") for name, size in ollama_models()]
    found.sort(key=lambda model: model.name.lower())
    return [LocalModel(DEMO, size, "shipped with kvchat"), *found]


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


def model_lines(models: list[LocalModel]) -> list[str]:
    """Return one line per model: its name, size, place and trouble."""
    width = max((len(model.name) for model in models), default=0)
    return [
        f"{model.name:{width}}  {format_bytes(model.num_bytes):>9}  {model.place}"
        + (f", {model.trouble}" if model.trouble else "")
        for model in models
    ]
