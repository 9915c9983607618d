"""Makes untrusted text safe for a terminal, and reads texts, numbers, sizes and JSON of users.

Text of a model, a file, a title or metadata passes through `sanitize` before it is drawn or piped.
It maps single characters and keeps no state, so an escape sequence always becomes visible text.
"""

import codecs
import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from kvchat.core.errors import UsageError

_VISIBLE_ESCAPE = "␛"
_REPLACEMENT = "\ufffd"

_DROPPED = (
    *range(0x09),  # C0 but for tab, line feed and carriage return
    *range(0x0B, 0x0D),
    *range(0x0E, 0x1B),
    *range(0x1C, 0x20),
    *range(0x7F, 0xA0),  # DEL and C1: 0x9b alone is a CSI to some terminals
    0x200B,  # zero width space
    *range(0x202A, 0x202F),  # bidirectional embeddings and overrides
    *range(0x2066, 0x206A),  # bidirectional isolates
    0xFEFF,  # byte order mark
    *range(0xFFF9, 0xFFFC),  # interlinear annotations
)
_TABLE: dict[int, str | None] = {
    **dict.fromkeys(_DROPPED),
    0x1B: _VISIBLE_ESCAPE,
    0x2028: "\n",
    0x2029: "\n",
    **dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT),  # lone surrogates cannot be encoded
}
_SUSPECT = re.compile("[" + "".join(re.escape(chr(code)) for code in _TABLE) + "]")


# The longer marks first: that of UTF-32 begins with that of UTF-16.
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(data: bytes) -> str:
    """Return the encoding of a user's text by its byte order mark; UTF-8 without one."""
    return next((name for mark, name in _ENCODINGS if data.startswith(mark)), "utf-8")


def text_of(data: bytes) -> tuple[str, bool]:
    """Return a user's text without its byte order mark, with lines that end in a line feed.

    The other value is false where U+FFFD stands for what could not be read.
    """
    encoding, is_whole = encoding_of(data), True
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text, is_whole = data.decode(encoding, errors="replace"), False
    return text.replace("\r\n", "\n").replace("\r", "\n"), is_whole


def sanitize_characters(text: str) -> str:
    """Replace or drop every character that could control a terminal, except carriage returns."""
    return text.translate(_TABLE) if _SUSPECT.search(text) else text


def sanitize(text: str) -> str:
    """Return text that is safe to show: lines end in a line feed, without control characters."""
    return sanitize_characters(text.replace("\r\n", "\n").replace("\r", "\n"))


def sanitize_json(document: str) -> str:
    """Return a JSON document that reads back the same and shows nothing that acts.

    Such characters stand in its strings only, where JSON has escapes for them.
    """
    return _SUSPECT.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def fence_of(text: str) -> str:
    """Return backticks to put around a text in Markdown: as many as do not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence


def one_line(text: str, max_chars: int = 80) -> str:
    """Return text as one safe line of at most `max_chars`, for a title or a file name."""
    line = " ".join(sanitize(text).split())
    if len(line) <= max_chars:
        return line
    return line[: max_chars - 1].rstrip(" …") + "…"  # it may have been cut before


# Letters and marks that are drawn as nothing or as a space, and that Python takes for printable.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U00013441\U00013442\U00016fe4\U0001d159\U000e0000-\U000e0fff]"
)


def model_label(name: str) -> str:
    """Return a model's name without the directories or the owner before it."""
    return one_line(name.rstrip("/").rpartition("/")[2], 32) or "model"


def exact_line(text: str) -> str:
    """Return text as one line that hides nothing: what is not seen is escaped, spaces stay."""
    if text.isprintable() and not _UNSEEN.search(text):
        return text
    return "".join(_seen(character) for character in text)


def _seen(character: str) -> str:
    if character.isprintable() and not _UNSEEN.match(character):
        return character
    return character.encode("unicode_escape").decode()


class Sanitizer:
    """`sanitize` for text in pieces; the result does not depend on how the text is cut."""

    def __init__(self) -> None:
        self._ended_with_return = False

    def feed(self, text: str) -> str:
        """Take more text; return its safe form."""
        if not text:
            return ""
        if self._ended_with_return and text[0] == "\n":
            text = text[1:]
            self._ended_with_return = False
            if not text:
                return ""
        self._ended_with_return = text[-1] == "\r"
        return sanitize(text)


_MAX_DIGITS = 9


def whole_number(text: str) -> int | None:
    """Return the number that up to nine decimal digits spell, None for any other text.

    `str.isdigit` is true of superscripts, and `int` raises ValueError for thousands of digits.
    """
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


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


def format_age(seconds: float) -> str:
    """Return a phrase for a time this many seconds ago."""
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    if minutes < 48 * 60:
        return f"{minutes // 60} h ago"
    return f"{minutes // (24 * 60)} days ago"


def format_bytes(num_bytes: int) -> str:
    """Return a size for display: three or four digits and a binary unit."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    """Parse a number; refuse one that is too large, as it would be written as Infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def read_json_text(text: str | bytes, has_raw_controls: bool = False) -> Any:
    """Return the value of a JSON text; raises ValueError, RecursionError if it is too deep.

    With `has_raw_controls` line ends and tabs may stand within strings, as many models write them.
    """
    return json.loads(
        text, strict=not has_raw_controls, parse_constant=_no_constant, parse_float=_finite
    )
