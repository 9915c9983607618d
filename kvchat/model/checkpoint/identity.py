"""Digests of a checkpoint's weights, and of the code that computes recurrent state.

They identify the model whose KV a cache holds. `sample_digest` reads three samples of every tensor,
which is fast enough for every start, and misses a change outside the samples. `content_digest`
reads everything once, and stores each file's digest under its inode, size and change time.
`state_code` names the code behind a state, which no computed token verifies.
"""

import errno
import hashlib
import os
import re
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from kvchat.core.paths import open_regular, read_bounded
from kvchat.core.types import Memory
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.files.checkpoint_files import MAX_CONFIG_BYTES, mark, read_text, unreadable
from kvchat.model.gguf.file import weight_header
from kvchat_kernels.cpu import __file__ as _kernels

_SAMPLE_BYTES = 4096


def sample_digest(source: ModelSource) -> str:
    """Return `s1-` and 32 hex digits over config, tensor headers and three samples per tensor.

    Covers exactly the files that are loaded, in loading order. The configuration of a GGUF file is
    in its header. Raises ModelError if one cannot be
    read.
    """
    digest = hashlib.sha256()
    settings, weights = _identifying(source)
    for path in settings:
        digest.update((read_text(path) or "").encode())
    for path in weights:
        header = weight_header(path, source.gguf)
        digest.update(header.raw)
        digest.update(str(header.file_bytes).encode())
        try:
            descriptor = open_regular(path)
            try:
                for tensor in sorted(header.tensors, key=lambda entry: entry.name):
                    for offset in _sample_offsets(tensor.start, tensor.end):
                        size = min(_SAMPLE_BYTES, tensor.end - offset)
                        digest.update(os.pread(descriptor, size, len(header.raw) + offset))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unreadable(path, error.strerror) from error
    return f"s1-{digest.hexdigest()[:32]}"


def _identifying(source: ModelSource) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files of settings and of weights that results depend on, in loading order.

    The settings of a GGUF file are in its header.
    """
    settings = (source.config_file,) if source.gguf is None else ()
    weights = source.weight_files
    if source.adapter is None:
        return settings, weights
    more, changes = source.adapter.files
    return (*settings, more), (*weights, changes)


def _sample_offsets(start: int, end: int) -> tuple[int, ...]:
    """Return the byte offsets of the samples: the tensor's start, middle and end."""
    last = max(start, end - _SAMPLE_BYTES)
    return tuple(sorted({start, (start + last) // 2, last}))


_KIND = "weights"
_LOW_PRIORITY = 10
_DIGEST = re.compile(r"[0-9a-f]{32}")


def content_digest(source: ModelSource, memory: Memory) -> str:
    """Return 32 hex digits over config.json and the files that are loaded, in loading order.

    Stores the digest of each file of weights in `memory`. Raises OSError if a file cannot be read
    or changes while it is read, ModelError if the weight files cannot be found.
    """
    settings, weights = _identifying(source)
    whole = hashlib.blake2b(digest_size=16)
    for path in settings:
        whole.update(read_bounded(path, MAX_CONFIG_BYTES))
    for path in weights:
        found = mark(path)
        known = memory.get(_KIND, found)
        is_known = isinstance(known, str) and _DIGEST.fullmatch(known)
        digest = str(known) if is_known else _file_digest(path)
        if mark(path) != found:
            raise OSError(errno.ESTALE, "it changed while it was read", str(path))
        if not is_known:
            memory.set(_KIND, found, digest)
        whole.update(digest.encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    """Read a file whole, in a thread of its own that gives way to those that compute."""

    def digest() -> str:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    with ThreadPoolExecutor(1, initializer=_give_way) as pool:
        return pool.submit(digest).result()


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


# transformers computes recurrences by the other packages where they are installed.
_STATE_PACKAGES = (
    "transformers",
    "causal-conv1d",
    "flash-linear-attention",
    "kernels",
    "mamba-ssm",
)
# The modules of this package that decide what a state is, and with which kernels of ours it is
# computed.
_STATE_MODULES = ("cpu/*.py", "decoder/*.py", "paged_model.py", "state.py")


def state_code(is_compiled: bool) -> list[str]:
    """Return what names the code that computes recurrent state, for the identity of stored KV.

    A restored state is verified by its checksum alone: unlike keys and values, no token of it can
    be computed again. So state of other code, by which its meaning may have changed, is not read.
    """
    versions = []
    for name in _STATE_PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    own = Path(__file__).parents[1]
    sources = [path for pattern in _STATE_MODULES for path in own.glob(pattern)]
    if not is_compiled:
        return [*versions, "modules", sources_digest(sources)]
    kernels = Path(_kernels).parent.glob("*.py")
    return [*versions, "compiled", sources_digest([*sources, *kernels])]


def sources_digest(paths: Iterable[Path]) -> str:
    """Return 32 hex digits over the names and the bytes of files, in whichever order."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(set(paths), key=lambda path: (path.name, str(path))):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
