"""Looks for a text, and for its token ids, in every byte of every file below a directory."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_RUN = 4  # so many ids in a row are no chance


def traces(directory: Path, text: str, token_ids: Sequence[int]) -> list[str]:
    """Return the files that have the text, or some of its ids in a row, and as what.

    The text as UTF-8 and as JSON escapes it; ids as integers of 32 and 64 bits, and as JSON.
    """
    needles = dict(_needles(text, token_ids))
    return sorted(
        f"{path.relative_to(directory)}: {name}"
        for path in directory.rglob("*")
        if path.is_file()
        for name in {name for needle, name in needles.items() if needle in path.read_bytes()}
    )


def _needles(text: str, token_ids: Sequence[int]) -> Iterator[tuple[bytes, str]]:
    yield text.encode(), "text"
    yield json.dumps(text)[1:-1].encode(), "text"
    for start in range(len(token_ids) - _RUN + 1):
        run = token_ids[start : start + _RUN]
        yield struct.pack(f"<{_RUN}i", *run), "ids of 32 bits"
        yield struct.pack(f"<{_RUN}q", *run), "ids of 64 bits"
        yield ",".join(map(str, run)).encode(), "ids in JSON"
        yield ", ".join(map(str, run)).encode(), "ids in JSON"
