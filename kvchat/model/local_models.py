"""Lists the models on this machine: the shipped demo, the Hugging Face cache, ollama's store.

Reads directories only. A further place is one more function in `local_models`.
"""

from dataclasses import dataclass
from typing import Any

from kvchat.core.config import format_bytes
from kvchat.model.gguf_source import label, model_sizes, ollama_models
from kvchat.model.source import DEMO, demo_directory


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
    found = [*_hub_models(), *_ollama_models()]
    return [_demo(), *sorted(found, key=lambda model: model.name.lower())]


def _demo() -> LocalModel:
    size = sum(path.stat().st_size for path in demo_directory().iterdir() if path.is_file())
    return LocalModel(DEMO, size, "shipped with kvchat")


def _hub_models() -> list[LocalModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = [repository for repository in repositories if repository.repo_type == "model"]
    return [model for repository in models for model in _of_hub(repository)]


def _of_hub(repository: Any) -> list[LocalModel]:
    """Return a repository's model, or one for each GGUF model in it."""
    files = {f.file_name: f.size_on_disk for r in repository.revisions for f in r.files}
    sizes = model_sizes({name: size for name, size in files.items() if name.endswith(".gguf")})
    if sizes:
        return [
            LocalModel(f"{repository.repo_id}:{label(name)}", size, "Hugging Face cache")
            for name, size in sizes.items()
        ]
    names = files.keys()
    has_weights = any(name.endswith(".safetensors") for name in names)
    trouble = "" if has_weights else "no safetensors weights"
    return [LocalModel(repository.repo_id, repository.size_on_disk, "Hugging Face cache", trouble)]


def _ollama_models() -> list[LocalModel]:
    return [LocalModel(name, size, "ollama's store") for name, size in ollama_models()]


def model_lines(models: list[LocalModel]) -> list[str]:
    """Return one line per model: its name, size, place and trouble."""
    width = max((len(model.name) for model in models), default=0)
    return [
        f"{model.name:{width}}  {format_bytes(model.num_bytes):>9}  {model.place}"
        + (f", {model.trouble}" if model.trouble else "")
        for model in models
    ]
