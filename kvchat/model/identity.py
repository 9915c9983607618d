"""What the weights are: a digest that differs when the numbers a model computes would differ.

Knows safetensors headers and config files. Reads a sample of every tensor, not all of it: cheap
enough for every start, and blind to a change outside the samples.
"""

import hashlib
import json
import struct
from pathlib import Path

from kvchat.core.errors import ModelError
from kvchat.model.source import ModelSource

_SAMPLE_BYTES = 4096


def sample_digest(source: ModelSource) -> str:
    """Return `s1-` and 32 hex digits over config, tensor headers and three samples a tensor."""
    digest = hashlib.sha256()
    digest.update((source.directory / "config.json").read_bytes())
    for path in source.weight_files:
        try:
            _add_weights(digest, path)
        except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path.name} of {source.name} is not a readable safetensors file.",
                "Is the download complete?",
            ) from error
    return f"s1-{digest.hexdigest()[:32]}"


def _add_weights(digest: "hashlib._Hash", path: Path) -> None:
    with path.open("rb") as file:
        length_bytes = file.read(8)
        (header_length,) = struct.unpack("<Q", length_bytes)
        if header_length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = file.read(header_length)
        digest.update(length_bytes + header)
        digest.update(str(path.stat().st_size).encode())
        for name, entry in sorted(json.loads(header).items()):
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                for offset in _sample_offsets(start, end):
                    file.seek(8 + header_length + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))


def _sample_offsets(start: int, end: int) -> tuple[int, ...]:
    """Return where to sample: the beginning, the middle and the end of a tensor."""
    last = max(start, end - _SAMPLE_BYTES)
    return tuple(sorted({start, (start + last) // 2, last}))
