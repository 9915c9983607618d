"""Translates key reports of newer terminals into the bytes that older ones send for the same keys.

The kitty protocol reports a key as `CSI code;modifiers:event;text u`, and xterm's modifyOtherKeys
as `CSI 27;modifiers;code ~`. kvchat asks for neither; a program that ended before may have.
"""

import re

_SHIFT, _ALT, _CTRL, _LOCKS = 1, 2, 4, 64 | 128
_RELEASE = 3
_ESCAPE = "\x1b"

_KITTY = re.compile(
    r"\x1b\[(\d{1,9})(?::(\d{0,9}))?(?::\d*)?(?:;(\d{0,9})(?::(\d))?)?(?:;((?:\d{1,9}:?)*))?u\Z"
)
_OTHER_KEYS = re.compile(r"\x1b\[27;(\d{1,9});(\d{1,9})~\Z")
# Arrows, function keys and the like, whose modifiers are followed by an event.
_WITH_EVENT = re.compile(r"\x1b\[(\d+);(\d+):(\d)([A-Z~])\Z")
_KEYPAD = re.compile(r"\x1bO([M-y])\Z")

# Keys that have a code of their own in the kitty protocol: those of the keypad.
_KEYPAD_CODES = {
    **{57399 + digit: str(digit) for digit in range(10)},
    **dict(zip(range(57409, 57414), "./*-+", strict=True)),
    57414: "\r",
    57415: "=",
    **dict(
        zip(range(57417, 57425), ("[D", "[C", "[A", "[B", "[5~", "[6~", "[H", "[F"), strict=True)
    ),
    57425: "[2~",
    57426: "[3~",
}
_FIRST_PRIVATE, _LAST_PRIVATE = 0xE000, 0xF8FF


def translated(sequence: str) -> str | None:
    """Return the older bytes of a key report; "" for a key that is released or means nothing here.

    None for a sequence that is no such report.
    """
    if (match := _KITTY.match(sequence)) is not None:
        if match[4] == str(_RELEASE):
            return ""
        shifted = int(match[2]) if match[2] else None
        return _key(int(match[1]), int(match[3] or 1), shifted, match[5] or "")
    if (match := _OTHER_KEYS.match(sequence)) is not None:
        return _key(int(match[2]), int(match[1]), None, "")
    if (match := _WITH_EVENT.match(sequence)) is not None:
        number, modifiers, event, last = match.groups()
        if event == str(_RELEASE):
            return ""
        if modifiers != "1":
            return f"{_ESCAPE}[{number};{modifiers}{last}"
        return f"{_ESCAPE}[{number if last == '~' else ''}{last}"
    if (match := _KEYPAD.match(sequence)) is not None and match[1] in _KEYPAD_KEYS:
        return _KEYPAD_KEYS[match[1]]
    return None


# What the keypad sends in application mode.
_KEYPAD_KEYS = {
    "M": "\r",
    "X": "=",
    **dict(zip("jklmnopqrstuvwxy", "*+,-./0123456789", strict=True)),
}


def _key(code: int, modifiers: int, shifted: int | None, text: str) -> str:
    """Return the bytes of a key; `modifiers` is one more than the sum of their bits."""
    held = max(0, modifiers - 1) & ~_LOCKS
    if held & ~(_SHIFT | _ALT | _CTRL):
        return ""
    if text and not held & (_ALT | _CTRL):
        return "".join(_character(int(part)) for part in text.split(":") if part)
    alt = _ESCAPE if held & _ALT else ""
    if (own := _own_bytes(code, held)) is not None:
        return f"{alt}{own}" if own else ""
    character = _character(code)
    if held & _CTRL:
        return f"{alt}{_control(character)}"
    if held & _SHIFT:
        character = _character(shifted) if shifted else character.upper()
    return f"{alt}{character}"


def _own_bytes(code: int, held: int) -> str | None:
    """Return the bytes of a key that types no character, "" for one without; None for others."""
    if code == 13:
        return "\n" if held & _SHIFT else "\r"
    if code == 9:
        return f"{_ESCAPE}[Z" if held & _SHIFT else "\t"
    if code == 127:
        return "\x17" if held & _CTRL else "\x7f"
    if code == 27:
        return _ESCAPE
    if _FIRST_PRIVATE <= code <= _LAST_PRIVATE:
        own = _KEYPAD_CODES.get(code, "")
        return f"{_ESCAPE}{own}" if len(own) > 1 else own
    return None


def _character(code: int) -> str:
    is_valid = 32 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_valid else ""


def _control(character: str) -> str:
    """Return what Ctrl and a character send, "" if nothing."""
    upper = character.upper()
    if len(upper) == 1 and "@" <= upper <= "_":
        return chr(ord(upper) & 0x1F)
    return {" ": "\x00", "/": "\x1f", "?": "\x7f"}.get(character, "")
