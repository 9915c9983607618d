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

from kvchat.terminal.key_codes import translated

_ESCAPE = "\x1b"
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
