"""What the weights are: a digest that differs when the numbers a model computes would differ.

Knows safetensors headers and config files. Reads a sample of every tensor, not all of it: cheap
enough for every start, and blind to a change outside the samples.
"""

import hashlib
import os

from kvchat.core.bounded_files import open_regular
from kvchat.model.small_files import read_text, unreadable
from kvchat.model.source import ModelSource
from kvchat.model.weight_files import read_header

_SAMPLE_BYTES = 4096


def sample_digest(source: ModelSource) -> str:
    """Return `s1-` and 32 hex digits over config, tensor headers and three samples a tensor.

    Covers the files that are loaded, in their order, and no others; raises ModelError where one
    cannot be read.
    """
    digest = hashlib.sha256()
    digest.update((read_text(source.config_file) or "").encode())
    for path in source.weight_files:
        header = read_header(path)
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


def _sample_offsets(start: int, end: int) -> tuple[int, ...]:
    """Return where to sample: the beginning, the middle and the end of a tensor."""
    last = max(start, end - _SAMPLE_BYTES)
    return tuple(sorted({start, (start + last) // 2, last}))
