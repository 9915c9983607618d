"""KeyParser: turns what a terminal sends into keys, and never takes its replies for typing.

Terminals answer questions that other programs asked, and report focus, in the same stream that
brings the keys. prompt_toolkit's parser takes what it does not know for text: `ESC [ I` typed `[I`,
and the BEL at the end of a reply was Ctrl-G, which opens an editor. This parser takes whole
sequences out of the stream first, and passes on keys and text only. It also collects pasted text,
in time linear in its length, and takes a burst of lines for a paste where the terminal does not
mark it.
"""

import re
import time
from collections.abc import Callable

from prompt_toolkit.input import Input
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

# The kitty protocol reports a key as `CSI code;modifiers:event;text u`, and xterm's modifyOtherKeys
# as `CSI 27;modifiers;code ~`. kvchat asks for neither; a program that ended before may have.

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


_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"

# A control sequence, a key of the keypad, or a string up to its end. `[[A` are keys of the Linux
# console, `[M` and three characters an old report of the mouse.
_SEQUENCE = re.compile(
    r"""
      \x1b\[(?: \[[A-E] | M[^\x1b]{3} | [0-?]*[ -/]*[@-LN-Z\\-~] | [0-?]+[ -/]*M )
    | \x1bO[A-Za-z]
    | (?P<string>\x1b(?:\][0-9lLI]|P[0-9;>!$+|]|_[ -~])[^\x00-\x1f\x7f]*)(?:\x07|\x1b\\)?
    """,
    re.VERBOSE | re.DOTALL,
)
# The beginning of one, at the end of what was read.
_BEGINNING = re.compile(
    r"\x1b(?:\[(?:[0-?]*[ -/]*|\[|M[^\x1b]{0,2})|[O\]P_]"
    r"|(?:\][0-9lLI]|P[0-9;>!$+|]|_[ -~])[^\x00-\x1f\x7f]*\x1b?)?\Z"
)
# Reports that prompt_toolkit knows: the cursor's place, the mouse.
_REPORT = re.compile(r"\x1b\[(?:\d+;\d+R|<?[\d;]+[mM]|M...)\Z", re.DOTALL)
# A sequence whose Esc came alone, shortly before. Fingers do not type two characters in one read.
_WITHOUT_ESCAPE = re.compile(r"(?:\[[0-?]*[ -/]*[@-~]|O[A-Za-z])\Z")
# The rest of a sequence comes within this time, or never.
_PATIENCE_S = 1.0

# So many lines in one read are pasted. Someone may type two while the program is busy.
_BURST_LINES = 5
_LINE_END = re.compile(r"\r\n?|\n")
_IS_TEXT = re.compile(r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*\Z")


class KeyParser(Vt100Parser):
    """Takes the place of the parser of a prompt_toolkit input: `feed` and `flush` make keys."""

    def __init__(
        self,
        feed_key_callback: Callable[[KeyPress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(feed_key_callback)
        self._clock = clock
        self._held = ""  # the beginning of a sequence
        self._held_since_s = float("-inf")
        self._escaped_s = float("-inf")  # when Esc came alone
        self._pasted: list[str] | None = None  # what has come of a paste
        self._burst: list[str] | None = None

    def feed(self, data: str) -> None:
        """Take what was read, and pass on the keys in it."""
        if not data:
            return
        data = data.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if self._pasted is not None:
            self._paste(data)
        elif self._burst is not None or _is_burst(data):
            self._take_burst(data)
        else:
            self._feed_sequences(self._with_held(data))

    def flush(self) -> None:
        """Pass on what waits for more, as nothing came for a while."""
        if self._burst is not None:
            burst, self._burst = "".join(self._burst), None
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, burst))
        if self._held == _ESCAPE:
            self._escaped_s = self._clock()
        if len(self._held) == 1 or (len(self._held) == 2 and self._held != "\x1b["):
            held, self._held = self._held, ""
            self._type(held)
        super().flush()

    def _with_held(self, data: str) -> str:
        """Return what was read behind what was held, if both can belong together."""
        held, self._held = self._held, ""
        if held and self._clock() - self._held_since_s <= _PATIENCE_S:
            return held + data
        is_soon = self._clock() - self._escaped_s <= _PATIENCE_S
        self._escaped_s = float("-inf")
        return _ESCAPE + data if is_soon and _WITHOUT_ESCAPE.match(data) else data

    def _feed_sequences(self, data: str) -> None:
        position = 0
        while (place := data.find(_ESCAPE, position)) >= 0:
            self._type(data[position:place])
            if data.startswith(_PASTE_BEGINS, place):
                self._pasted = []
                self._paste(data[place + len(_PASTE_BEGINS) :])
                return
            if _BEGINNING.match(data, place):
                self._held, self._held_since_s = data[place:], self._clock()
                return
            match = _SEQUENCE.match(data, place)
            if match is None:
                self._type(_ESCAPE)  # Alt and a key, or Esc before one
                position = place + 1
            else:
                self._take(match)
                position = match.end()
        self._type(data[position:])

    def _take(self, match: re.Match[str]) -> None:
        """Pass on the key that a sequence stands for; nothing for a reply or a report of focus."""
        sequence = match.group()
        if match["string"] is not None:
            return
        older = translated(sequence)
        if older is not None:
            self._type(older)
            if older == _ESCAPE:
                super().flush()
        elif sequence in ANSI_SEQUENCES or _REPORT.match(sequence):
            self._type(sequence)

    def _type(self, text: str) -> None:
        if text:
            super().feed(text)

    # Pasted text

    def _paste(self, data: str) -> None:
        """Collect pasted text up to the mark that ends it, which may be divided."""
        assert self._pasted is not None
        before = self._pasted.pop() if self._pasted else ""
        joined = before + data
        end = joined.find(_PASTE_ENDS)
        if end < 0:
            cut = max(0, len(joined) - len(_PASTE_ENDS))
            self._pasted += [joined[:cut], joined[cut:]]
            return
        pasted, self._pasted = "".join([*self._pasted, joined[:end]]), None
        self.feed_key_callback(KeyPress(Keys.BracketedPaste, pasted))
        self.feed(joined[end + len(_PASTE_ENDS) :])

    def _take_burst(self, data: str) -> None:
        if self._burst is None:
            self._burst = []
        if _IS_TEXT.match(data):
            self._burst.append(data)
            return
        self.flush()
        self._feed_sequences(self._with_held(data))


def _is_burst(data: str) -> bool:
    return len(_LINE_END.findall(data)) >= _BURST_LINES and _IS_TEXT.match(data) is not None


def parse_keys(source: Input) -> None:
    """Let an input read its keys with a KeyParser from now on."""
    if isinstance(source, Vt100Input):
        source.vt100_parser = KeyParser(source.vt100_parser.feed_key_callback)


def text_of_line(line: str) -> str:
    """Return a line that a terminal's own line editing gave, without replies and other keys."""
    if _ESCAPE not in line:
        return line
    keys: list[KeyPress] = []
    KeyParser(keys.append).feed_and_flush(line)
    is_text = (Keys.BracketedPaste, Keys.ControlI)
    return "".join(k.data for k in keys if k.key in is_text or not isinstance(k.key, Keys))
