"""Finds a model's files: the shipped demo, a directory, a GGUF file, or a Hugging Face hub id.

Downloads hub models and checks that a checkpoint directory is complete. Loads no weights and
imports neither torch nor transformers, so that a wrong name is reported at once.
"""

import errno
import os
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.core.errors import ModelError, UsageError
from kvchat.core.paths import user_path
from kvchat.model.files.adapter import Adapter, is_adapter, read_adapter
from kvchat.model.files.checkpoint_files import (
    INDEX,
    SINGLE,
    check_weights,
    mark,
    read_json,
    unreadable,
    weight_paths,
)
from kvchat.model.files.hub_cache import main_snapshot, snapshots

if TYPE_CHECKING:
    from kvchat.model.gguf.file import GgufModel

DEMO, DEMO_DRAFT = "demo", "demo-draft"
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
QUANT_NAME = re.compile(r"^(.+):([A-Za-z0-9][\w.-]*)$")
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")
UNWANTED = ("original/*", "consolidated*", "onnx/*", "*/*.safetensors")
_NOT_REACHED = ("ConnectError", "ConnectTimeout", "ProxyError")
_BROKEN_OFF = ("RemoteProtocolError", "ReadError", "ReadTimeout")
_REFUSALS = {
    401: "The hub asks for a login before it gives",
    403: "The hub does not let this account have",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint directory with safetensors weights, and the name the user gave for it.

    For a model in GGUF files, `gguf` has their headers and `directory` is where they are.
    `adapter` is merged into the weights, and is part of the model's identity. `notes` are sentences
    for the user on what was found.
    """

    name: str
    directory: Path
    adapter: Adapter | None = None
    notes: tuple[str, ...] = ()
    gguf: "GgufModel | None" = None

    @property
    def config_file(self) -> Path:
        """The file that describes the architecture."""
        return self.directory / "config.json"

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The weight files to load, in loading order; raises as `weight_paths` does."""
        if self.gguf is not None:
            return self.gguf.paths
        return weight_paths(self.directory, read_json(self.config_file) or {})

    def marks(self) -> dict[Path, str]:
        """Return the `mark` of config.json and each weight file; it changes when the file does."""
        described = () if self.gguf is not None else (self.config_file,)
        try:
            more = self.adapter.files if self.adapter is not None else ()
            return {path: mark(path) for path in (*described, *self.weight_files, *more)}
        except OSError as error:
            raise ModelError(f"{self.name} cannot be read: {error.strerror}.") from error


def demo_directory(part: str = "target") -> Path:
    """Return the shipped demo model's directory; `part` is `target` or `draft`."""
    return Path(str(resources.files("kvchat"))) / "demo" / part


def find_model(name: str, adapter: str | None = None) -> ModelSource:
    """Return the checkpoint for `demo`, a directory or a hub id; downloads a hub id if needed.

    `adapter` is the directory of an adapter to merge into it. A directory that holds only an
    adapter stands for that and its base, if the base is on this machine.

    A download shows huggingface_hub's progress bars on stderr. Raises ModelError, with a hint, if
    the name is wrong, the directory is incomplete or the download fails.
    """
    if adapter is not None:
        return replace(find_model(name), adapter=read_adapter(user_path(adapter)), notes=())
    if name == DEMO:
        return _checked(ModelSource(DEMO, demo_directory()))
    if name == DEMO_DRAFT:
        return _checked(ModelSource(DEMO_DRAFT, demo_directory("draft")))
    try:
        path = user_path(name)
        is_directory, is_other = path.is_dir(), path.exists()
    except UsageError as error:
        raise ModelError(error.message) from error
    except OSError as error:  # no permission on a parent directory, or the name is too long
        raise ModelError(f"{name} cannot be read: {error.strerror}.", "Give another.") from error
    if is_directory:
        if not is_adapter(path):
            return _checked(ModelSource(name, path))
        if not (path / "config.json").exists():
            return _on_its_base(name, read_adapter(path))
        note = f"The adapter that {name} holds too is not used; --adapter {name} merges it."
        return _checked(ModelSource(name, path, notes=(note,)))
    if is_other:
        from kvchat.model.gguf.source import gguf_file

        return ModelSource(name, path.parent, gguf=gguf_file(name, path))
    if (chosen := _chosen(name)) is not None:
        return chosen
    if name.endswith(".gguf"):
        raise ModelError(f"There is no file {name}.", "Give another, or a hub id like org/name.")
    if name.startswith((".", "/", "~")) or not HUB_ID.match(name):
        raise ModelError(
            f"There is no model directory {name}.",
            "Give a directory, a GGUF file or a hub id like org/name.",
        )
    return _checked(ModelSource(name, _hub_snapshot(name)))


def _chosen(name: str) -> ModelSource | None:
    """Return the model of PLACE:QUANT or ollama:NAME; None for a name of another form."""
    if name.startswith("ollama:"):
        from kvchat.model.gguf.source import ollama_gguf

        path, gguf = ollama_gguf(name)
        return ModelSource(name, path.parent, gguf=gguf)
    found = QUANT_NAME.match(name)
    if found is None:
        return None
    from kvchat.model.gguf.source import gguf_in_directory, hub_gguf

    place, quant = found.groups()
    directory = user_path(place)
    if directory.is_dir():
        return ModelSource(name, directory, gguf=gguf_in_directory(name, directory, quant))
    if name.startswith((".", "/", "~")) or not HUB_ID.match(place):
        return None
    try:
        snapshot, gguf = hub_gguf(place, quant)
    except ModelError:
        raise
    except Exception as error:  # each transport of the hub client raises its own error types
        raise download_error(name, error) from error
    return ModelSource(name, snapshot, gguf=gguf)


def _on_its_base(name: str, adapter: Adapter) -> ModelSource:
    """Return the base of an adapter that was given as a model; downloads nothing."""
    base = adapter.base_name
    notes = (f"{name} is an adapter; it is merged into its base, {base}.",)
    path = adapter.directory / base
    try:
        if base and path.is_dir():
            return _checked(ModelSource(name, path, adapter, notes))
        if HUB_ID.match(base):
            snapshot = _hub_snapshot(base, is_local=True)
            return _checked(ModelSource(name, snapshot, adapter, notes))
    except (ModelError, OSError):
        pass
    missing = f"for {base}, which is not on this machine" if base else "and does not name its base"
    raise ModelError(
        f"{name} is an adapter {missing}.",
        f"Give the base with --model, and --adapter {name}.",
    )


def _checked(source: ModelSource) -> ModelSource:
    """Return the source, or one of the GGUF file that the directory holds instead.

    Raises ModelError if config.json or a weight file is missing.
    """
    directory = source.directory
    try:
        names = frozenset(os.listdir(directory))
    except OSError as error:
        raise unreadable(directory, error.strerror) from error
    if not (names & {"config.json", SINGLE, INDEX}) and (gguf := _gguf_inside(source)):
        return gguf
    if "config.json" not in names:
        raise ModelError(
            f"{directory} has no config.json.",
            "Give a directory in Hugging Face's layout, or NAME:QUANT for GGUF files.",
        )
    paths = source.weight_files
    check_weights(paths)
    if not paths and (gguf := _gguf_inside(source)):
        return gguf
    if not paths:
        raise _no_weights(source.name, names)
    return source


def _gguf_inside(source: ModelSource) -> ModelSource | None:
    """Return the model in the GGUF file of a directory; None if it holds none."""
    if not any(source.directory.glob("*.gguf")) and not any(source.directory.glob("*/*.gguf")):
        return None
    from kvchat.model.gguf.source import gguf_in_directory

    return replace(source, gguf=gguf_in_directory(source.name, source.directory, None))


def _no_weights(name: str, names: frozenset[str]) -> ModelError:
    """Return the error for a checkpoint without safetensors; it names the format found instead."""
    if any(fnmatch(file, pattern) for file in names for pattern in _PICKLES):
        return ModelError(
            f"{name} has its weights in pickle files only, which kvchat never opens.",
            "Convert them to safetensors first.",
        )
    return ModelError(f"{name} has neither {SINGLE} nor {INDEX}.", "Is the download complete?")


def _hub_snapshot(name: str, is_local: bool = False) -> Path:
    """Return a hub id's snapshot directory: a complete local one, else a download.

    A download that was begun is completed; without a connection an older snapshot takes its place.
    With `is_local` nothing is downloaded.
    """
    from huggingface_hub import snapshot_download

    whole = [each for each in snapshots(name) if _is_complete(each) or any(each.glob("*.gguf"))]
    begun = main_snapshot(name)
    if whole and (is_local or begun is None or begun == whole[0]):
        return whole[0]
    if is_local:
        raise ModelError(f"{name} is not on this machine.")
    try:
        patterns, others = list(WANTED), list(UNWANTED)
        download = snapshot_download(name, allow_patterns=patterns, ignore_patterns=others)
        directory = Path(download)
        if below := _weights_below(directory):
            patterns = [escape(path) for path in below]
            snapshot_download(name, revision=directory.name, allow_patterns=patterns)
        # Offline the client returns what is there, whole or not.
        return whole[0] if whole and not _is_complete(directory) else directory
    except ModelError:
        raise
    except Exception as error:  # each transport of the hub client raises its own error types
        if whole:
            return whole[0]
        raise download_error(name, error) from error


def _weights_below(directory: Path) -> list[str]:
    """Return the weight files that a snapshot's index names in subdirectories, as relative paths.

    They are downloaded by name, because subdirectories also hold copies in other formats.
    """
    paths = ModelSource("", directory).weight_files
    return [str(path.relative_to(directory)) for path in paths if path.parent != directory]


def _is_complete(directory: Path) -> bool:
    """Return whether the index and every weight file are present and readable."""
    try:
        paths = ModelSource("", directory).weight_files
        check_weights(paths)
    except ModelError:
        return False
    return bool(paths)


def download_error(name: str, error: Exception) -> ModelError:
    """Return the error that says why a download failed, with a hint."""
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
            "Free some space or set HF_HOME to a larger disk; the download continues there.",
        )
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ModelError(f"{name} is not on this machine.", "Unset HF_HUB_OFFLINE to download it.")
    # The client's HTTP library has errors of its own for connections.
    is_line = isinstance(error, (LocalEntryNotFoundError, ConnectionError, TimeoutError))
    if is_line or type(error).__name__ in _NOT_REACHED:
        return ModelError(
            f"{name} is not on this machine and the hub cannot be reached.",
            "Check the connection, or name a local directory.",
        )
    if type(error).__name__ in _BROKEN_OFF or "Consistency check failed" in str(error):
        return ModelError(
            f"The download of {name} broke off.", "The same command goes on from there."
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _REFUSALS:
        return ModelError(f"{_REFUSALS[status]} {name}.", "`hf auth login` names your account.")
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(
        f"{name} could not be downloaded: {reason[:200].rstrip('.')}.",
        "Try again; what is there will be reused.",
    )
