"""Sizes of memory as users write them, and values as errors quote them."""

import re
from dataclasses import dataclass

from kvchat.core.errors import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(?ai)^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$")
_SHARE = re.compile(r"(?a)^\s*(\d+(?:\.\d+)?)\s*%\s*$")
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of memory: bytes, or a share (0 to 1) of the amount given to `resolve`."""

    num_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        assert (self.num_bytes is None) != (self.share is None), self

    def resolve(self, available_bytes: int) -> int:
        """Return bytes; a share is taken of `available_bytes`."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return int(available_bytes * self.share)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share * 100:g}%"
        assert self.num_bytes is not None
        return format_bytes(self.num_bytes)


_MAX_QUOTED_CHARS = 60
# A smaller number without a unit is refused: the user probably forgot the unit.
_LEAST_PLAIN_BYTES = 1 << 20


def parse_size(text: str, name: str) -> Size:
    """Read `8G`, `512M`, `1.5g`, `20%` or plain bytes. Raises UsageError naming the setting."""
    if match := _SIZE.match(text):
        if text.strip()[-1].isdigit() and 0 < float(match[1]) < _LEAST_PLAIN_BYTES:
            # A store larger than this tiny limit would be emptied.
            number = match[1]
            hint = f"Give a unit: {number}G, or {number}B if bytes are meant."
            raise UsageError(f"{name} is {number} bytes.", hint)
        num_bytes = float(match[1]) * _UNITS[match[2].upper()]
        if num_bytes > _MAX_BYTES:  # also infinity, the float of a number with many digits
            raise UsageError(f"{name} is {shown(text)}, which is more than any machine has.")
        return Size(num_bytes=int(num_bytes))
    if (match := _SHARE.match(text)) and 0 <= float(match[1]) <= 100:
        return Size(share=float(match[1]) / 100)
    raise UsageError(f"{name} is {shown(text)}, but must be a size like 8G, 512M or 20%.")


def shown(value: object) -> str:
    """Return a value for quotation in an error: its repr, cut to 60 characters."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_QUOTED_CHARS:
        return "a number of too many digits"  # Python refuses to convert thousands of digits
    text = repr(value[: _MAX_QUOTED_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def format_bytes(num_bytes: int) -> str:
    """Return a size for display: three or four digits and a binary unit."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
