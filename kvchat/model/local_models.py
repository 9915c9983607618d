"""Lists the models on this machine: the shipped demo, and those in the Hugging Face cache.

Reads directories only. A further place is one more function in `local_models`.
"""

from dataclasses import dataclass
from typing import Any

from kvchat.core.config import format_bytes
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
    return [_demo(), *sorted(_hub_models(), key=lambda model: model.name.lower())]


def _demo() -> LocalModel:
    size = sum(path.stat().st_size for path in demo_directory().iterdir() if path.is_file())
    return LocalModel(DEMO, size, "shipped with kvchat")


def _hub_models() -> list[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [_of_hub(repository) for repository in repositories if repository.repo_type == "model"]


def _of_hub(repository: Any) -> LocalModel:
    names = {file.file_name for revision in repository.revisions for file in revision.files}
    has_weights = any(name.endswith(".safetensors") for name in names)
    trouble = "" if has_weights else "no safetensors weights"
    return LocalModel(repository.repo_id, repository.size_on_disk, "Hugging Face cache", trouble)


def model_lines(models: list[LocalModel]) -> list[str]:
    """Return one line per model: its name, size, place and trouble."""
    width = max((len(model.name) for model in models), default=0)
    return [
        f"{model.name:{width}}  {format_bytes(model.num_bytes):>9}  {model.place}"
        + (f", {model.trouble}" if model.trouble else "")
        for model in models
    ]
