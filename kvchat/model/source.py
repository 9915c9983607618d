"""Where a model's files are: the shipped demo, a directory, or a Hugging Face hub id.

Knows hub downloads and what a checkpoint directory must hold. Loads no weights and imports neither
torch nor transformers, so that a wrong name is told at once.
"""

import errno
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvchat.core.errors import ModelError, UsageError
from kvchat.core.paths import user_path

DEMO, DEMO_DRAFT = "demo", "demo-draft"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
_UNWANTED = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint directory that exists and holds safetensors, and the name the user gave it."""

    name: str
    directory: Path

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name."""
        return tuple(sorted(self.directory.glob("*.safetensors")))


def demo_directory(part: str = "target") -> Path:
    """Return the shipped demo model's directory; `part` is `target` or `draft`."""
    return Path(str(resources.files("kvchat"))) / "demo" / part


def find_model(name: str) -> ModelSource:
    """Turn `demo`, a directory or a hub id into a checkpoint directory, downloading if need be.

    A hub download shows huggingface_hub's own progress bars on stderr. Raises ModelError with one
    sentence on what to do for everything that can be wrong with a name or a directory.
    """
    if name == DEMO:
        return _checked(ModelSource(DEMO, demo_directory()))
    if name == DEMO_DRAFT:
        return _checked(ModelSource(DEMO_DRAFT, demo_directory("draft")))
    try:
        path = user_path(name)
    except UsageError as error:
        raise ModelError(error.message) from error
    if path.is_dir():
        return _checked(ModelSource(name, path))
    if path.is_file():
        raise ModelError(
            f"{name} is a file.", "Give the directory that holds config.json and *.safetensors."
        )
    if name.startswith((".", "/", "~")) or not _HUB_ID.match(name):
        raise ModelError(
            f"There is no model directory {name}.", "Give a directory or a hub id like org/name."
        )
    return _checked(ModelSource(name, _hub_snapshot(name)))


def _checked(source: ModelSource) -> ModelSource:
    directory = source.directory
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json.", "Give a directory in Hugging Face's layout."
        )
    if source.weight_files:
        return source
    if any(any(directory.glob(pattern)) for pattern in _PICKLES):
        raise ModelError(
            f"{source.name} has its weights in pickle files only, which kvchat never opens.",
            "Convert them to safetensors first.",
        )
    if any(directory.glob("*.gguf")):
        raise ModelError(
            f"{source.name} holds GGUF weights.", "kvchat reads safetensors checkpoints."
        )
    raise ModelError(f"{source.name} has no *.safetensors files.", "Is the download complete?")


def _hub_snapshot(name: str) -> Path:
    """Return the snapshot directory of a hub id: the local one if it is complete, else download."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                local_files_only=local_files_only,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
            )
        )

    try:
        with suppress(LocalEntryNotFoundError):
            local = snapshot(local_files_only=True)
            if _is_complete(local):
                return local
        return snapshot(local_files_only=False)
    except Exception as error:  # each of the hub client's transports has errors of its own
        raise _download_error(name, error) from error


def _is_complete(directory: Path) -> bool:
    """Tell whether every file the weight index names is there."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return any(directory.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return all((directory / str(file_name)).is_file() for file_name in names)


def _download_error(name: str, error: Exception) -> ModelError:
    """Say in one sentence why a download failed, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{name} is gated.", "Accept its terms on the hub and log in with `hf auth login`."
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"The hub has no model {name}.", "Check the spelling; a private one needs a login."
        )
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return ModelError(
            f"The disk is full; {name} was not downloaded.",
            "Free some space or set HF_HOME to a larger disk; what is there will be reused.",
        )
    if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
        return ModelError(
            f"{name} is not on this machine and the hub cannot be reached.",
            "Check the connection, or give a local directory with --model.",
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(
        f"{name} could not be downloaded: {reason[:200].rstrip('.')}.",
        "Try again; what is there will be reused.",
    )
