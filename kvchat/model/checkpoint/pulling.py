"""Downloads a model from the Hugging Face hub into its cache: what there is, room, files, hashes.

huggingface_hub asks and sends, and knows the cache. It begins a file anew after a cut, and compares
sizes only: so large files come into a file of our own, which is gone on with, and their hashes are
compared with what the hub said before they enter the cache.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from kvchat.core.errors import KvchatError, ModelError, StoreError, UsageError
from kvchat.core.paths import Lock, open_private, try_lock
from kvchat.core.text import format_bytes, one_line
from kvchat.model.checkpoint.source import HUB_ID, QUANT_NAME, UNWANTED, WANTED, download_error
from kvchat.model.files.hub_cache import hub_directory, repository_directory
from kvchat.model.gguf.source import choose, gguf_names, label, model_sizes, parts_of

_PIECE_BYTES = 1 << 20
# The hash of a large file, and of a small one as git has it.
_SHA256, _SHA1 = 64, 40


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. `digest` is its SHA-256, of a small one git's SHA-1, "" for none."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A repository with all its files."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def formats(self) -> dict[str, int]:
        """The formats of its GGUF models with their bytes, the smallest first."""
        sizes = model_sizes({f.name: f.num_bytes for f in self.files if f.name.endswith(".gguf")})
        return {label(name): size for name, size in sorted(sizes.items(), key=lambda s: s[1])}

    def files_of(self, quant: str | None) -> tuple[RemoteFile, ...]:
        """Return the files of a format, or without one of a model in safetensors.

        Raises ModelError where the repository has none.
        """
        names = [file.name for file in self.files]
        if quant is not None or self.formats:
            name = self.name if quant is None else f"{self.name}:{quant}"
            wanted = set(parts_of(choose(name, gguf_names(names), quant), names))
        else:
            wanted = {name for name in names if _is_wanted(name)}
        if not any(name.endswith((".gguf", ".safetensors")) for name in wanted):
            raise ModelError(
                f"{self.name} has weights neither in safetensors nor in GGUF.",
                "kvchat never opens pickle files; look for a repository of the same model.",
            )
        return tuple(file for file in self.files if file.name in wanted)


def _is_wanted(name: str) -> bool:
    is_unwanted = any(fnmatch(name, pattern) for pattern in UNWANTED)
    return not is_unwanted and any(fnmatch(name, pattern) for pattern in WANTED)


def split_name(name: str) -> tuple[str, str | None]:
    """Return the repository and the format of org/name[:QUANT]; UsageError for another form."""
    match = QUANT_NAME.match(name)
    place, quant = match.groups() if match is not None else (name, None)
    if not HUB_ID.match(place) or "/" not in place:
        raise UsageError(
            f"{one_line(name, 80)} names no model of the hub.", "Give org/name or org/name:QUANT."
        )
    return place, quant


def remote_model(name: str) -> RemoteModel:
    """Ask the hub what a repository has; raises ModelError with one sentence on why it cannot."""
    from huggingface_hub import HfApi

    try:
        told = HfApi().model_info(name, files_metadata=True)
    except Exception as error:  # each transport of the hub client raises its own error types
        raise download_error(name, error) from error
    files = []
    for each in told.siblings or ():
        digest = each.lfs.sha256 if each.lfs is not None else each.blob_id
        files.append(RemoteFile(each.rfilename, each.size or 0, digest or ""))
    return RemoteModel(name, tuple(files))


def require_room(model: RemoteModel, files: Sequence[RemoteFile]) -> int:
    """Return the bytes that are to come; raises StoreError if the disk has no room for them."""
    needed = sum(max(0, file.num_bytes - _bytes_here(model.name, file)) for file in files)
    directory = hub_directory()
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StoreError(
            f"{model.name} needs {format_bytes(needed)} more, and {directory} has "
            f"{format_bytes(free)} free.",
            "Free some space, or set HF_HOME to a larger disk.",
        )
    return needed


def _bytes_here(name: str, file: RemoteFile) -> int:
    """Return how much of a file the cache has, whole or begun."""
    blob = _blob(name, file)
    for path in (blob, _begun(blob)):
        with suppress(OSError):
            if file.digest and path.is_file():
                return path.stat().st_size
    return 0


def _blob(name: str, file: RemoteFile) -> Path:
    return repository_directory(name) / "blobs" / file.digest


def _begun(blob: Path) -> Path:
    """Return where a file that has come in part is."""
    return blob.with_name(f"{blob.name}.kvchat.incomplete")


def fetch(
    model: RemoteModel, files: Sequence[RemoteFile], tell: Callable[[str], None]
) -> list[Path]:
    """Download files, each with a progress bar on stderr, and return their paths.

    One that is here is not asked for again, and one that was begun goes on. Raises ModelError with
    one sentence on what went wrong; what has come stays for the next try, but for a wrong file.
    """
    from huggingface_hub import hf_hub_download, logging

    logging.set_verbosity_error()  # what it tries again is shown by its progress bar
    paths = []
    for file in sorted(files, key=lambda each: each.num_bytes):
        is_large = len(file.digest) == _SHA256
        try:
            if is_large and not _blob(model.name, file).exists():
                _fetch_large(model, file, tell)
            path = Path(hf_hub_download(model.name, file.name))  # what is in the cache is linked
        except KvchatError:
            raise
        except Exception as error:  # each transport of the hub client raises its own error types
            raise download_error(model.name, error) from error
        if not is_large and not _is_right(path, file.digest):
            _remove(path)
            raise _wrong(file)
        paths.append(path)
    return paths


def _fetch_large(model: RemoteModel, file: RemoteFile, tell: Callable[[str], None]) -> None:
    """Bring a file's blob into the cache, from where an earlier try ended."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if file.num_bytes > MAX_HTTP_DOWNLOAD_SIZE:
        return  # only the client's own way brings so large a file
    blob = _blob(model.name, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    begun = _begun(blob)
    descriptor = open_private(begun, os.O_RDWR | os.O_CREAT, has_one_name=True)
    with os.fdopen(descriptor, "r+b") as target:
        if try_lock(descriptor) is Lock.ANOTHERS:
            raise ModelError(f"Another process downloads {model.name} now.", "Wait for it.")
        size = os.fstat(descriptor).st_size
        if size > file.num_bytes:
            size = 0
            target.truncate()
        target.seek(size)
        http_get(
            hf_hub_url(model.name, file.name),
            target,
            resume_size=size,
            headers=build_hf_headers(),
            expected_size=file.num_bytes,
            displayed_filename=file.name,
        )
        target.flush()
        if file.num_bytes > _PIECE_BYTES:
            tell(f"comparing the hash of {one_line(file.name, 80)}")
        if not _is_right(begun, file.digest):
            begun.unlink()
            raise _wrong(file)
        mask = os.umask(0o077)
        os.umask(mask)
        begun.chmod(0o666 & ~mask)  # as the client's own files are
        begun.replace(blob)


def _wrong(file: RemoteFile) -> ModelError:
    return ModelError(
        f"{one_line(file.name, 80)} came with other bytes than the hub has: its hash is wrong.",
        "It is deleted; try again.",
    )


def _is_right(path: Path, digest: str) -> bool:
    """Return whether a file has a hash, by SHA-256 or as git does it; true of a hash of no kind."""
    if not re.fullmatch(r"[0-9a-f]+", digest) or len(digest) not in (_SHA256, _SHA1):
        return True
    if len(digest) == _SHA256:
        hashed = hashlib.sha256()
    else:
        hashed = hashlib.sha1(usedforsecurity=False)
        hashed.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest() == digest


def _remove(path: Path) -> None:
    """Delete a file of the cache, and what its link points to there."""
    target = Path(os.path.realpath(path))
    with suppress(OSError):
        path.unlink()
        if target.parent.name == "blobs":
            target.unlink(missing_ok=True)
