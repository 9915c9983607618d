"""Makes untrusted text safe for a terminal, and reads the texts and whole numbers of users.

Text of a model, a file, a title or metadata passes through `sanitize` before it is drawn or piped.
It maps single characters and keeps no state, so an escape sequence always becomes visible text.
"""

import codecs
import re

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
