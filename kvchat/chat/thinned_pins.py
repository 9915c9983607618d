"""ThinnedPins: of which pins the KV of some positions only stays, in the state directory.

A pin on disk has all of its KV. Here are the positions that `/pin --keep` chose, with a hash of the
pin's ids: no token of it.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvchat.core.errors import UsageError
from kvchat.core.paths import MOST_STATE_BYTES, read_state, write_state
from kvchat.core.types import KeptPositions

_VERSION = 1
_NAME = "thinned pins"
# Each label takes less than that: one bit a token.
_MOST_TOKENS = MOST_STATE_BYTES // 4


class ThinnedPins:
    """The positions of pins by their label. With `path` None there are none, and none is kept.

    Every call reads the file anew, because another process may have pinned meanwhile.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def of_model(self, name: str) -> list[KeptPositions]:
        """Return the positions that were chosen with this model; what is damaged is left out."""
        return [kept for model, kept in self._entries().values() if model == name]

    def shares(self) -> dict[str, float]:
        """Return the share of positions that stays, by label."""
        entries = self._entries().items()
        return {label: len(kept.positions) / kept.num_tokens for label, (_, kept) in entries}

    def _entries(self) -> dict[str, tuple[str, KeptPositions]]:
        """Return the model and the positions of every label; what is damaged is left out."""
        found = {}
        for label, entry in self._read().items():
            with suppress(KeyError, TypeError, ValueError):
                if isinstance(entry, dict):
                    found[label] = str(entry["model"]), _read_entry(entry)
        return found

    def put(self, label: str, model: str, kept: KeptPositions) -> None:
        """Keep the positions of a label, in place of those it had; raises UsageError if they cannot
        be kept.
        """
        bits = sum(1 << position for position in kept.positions)
        entry = {
            "model": model,
            "digest": kept.digest,
            "num_tokens": kept.num_tokens,
            "positions": f"{bits:x}",
            "method": kept.method,
        }
        others = self._read()
        is_too_long = sum(len(str(each)) for each in others.values()) > _MOST_TOKENS
        everything = {**others, label: entry}
        if is_too_long or not write_state(self._path, _VERSION, _NAME, everything):
            raise UsageError("The positions of the pin cannot be noted, so all of its KV stays.")

    def remove(self, labels: Iterable[str]) -> None:
        """Forget the positions of labels: all of their KV stays."""
        before, gone = self._read(), set(labels)
        left = {label: entry for label, entry in before.items() if label not in gone}
        if len(left) < len(before):
            write_state(self._path, _VERSION, _NAME, left)

    def _read(self) -> dict[str, object]:
        return read_state(self._path, _VERSION, _NAME)


def _read_entry(entry: dict[str, object]) -> KeptPositions:
    """Return an entry; raises KeyError, TypeError or ValueError for a damaged one."""
    num_tokens, written = entry["num_tokens"], entry["positions"]
    if not isinstance(num_tokens, int) or not isinstance(written, str):
        raise TypeError
    bits = int(written, 16)
    positions = tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
    if not positions or positions[-1] >= num_tokens:
        raise ValueError
    return KeptPositions(str(entry["digest"]), num_tokens, positions, str(entry["method"]))
