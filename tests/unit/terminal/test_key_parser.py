"""What a terminal sends besides keys is never typed, and newer key reports are keys."""

import random

import pytest
from prompt_toolkit.key_binding import KeyPress

from kvchat.terminal.key_parser import KeyParser, text_of_line

_REPLIES = [
    "\x1b[I",  # focus, and its loss
    "\x1b[O",
    "\x1b[?997;1n",  # the colour scheme has changed
    "\x1b[?62;22c",
    "\x1b[>1;10;0c",
    "\x1b[?2026;2$y",
    "\x1b[?1u",
    "\x1b[8;24;80t",
    "\x1b]11;rgb:1e1e/1e1e/1e1e\x07",
    "\x1b]11;rgb:1e1e/1e1e/1e1e\x1b\\",
    "\x1b]52;c;aGVsbG8=\x07",
    "\x1bP>|XTerm(388)\x1b\\",
    "\x1bP1+r544e=787465726d\x1b\\",
    "\x1b_Gi=31;OK\x1b\\",
    "\x1b[105;1:3u",  # a key is released
    "\x1b[57441;2u",  # Shift alone
    "\x1b[97;9u",  # Super and a letter
]


class _Typist:
    """Feeds a parser, by a clock that stands still, and writes down its keys."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: list[KeyPress] = []
        self.parser = KeyParser(self._keys.append, lambda: self.now_s)

    def press(self, *reads: str) -> list[tuple[str, str]]:
        """Return the keys of these reads, after which nothing more comes."""
        for read in reads:
            self.parser.feed(read)
        self.parser.flush()
        keys = [(str(getattr(k.key, "value", k.key)), k.data) for k in self._keys]
        self._keys.clear()
        return keys

    def text(self, *reads: str) -> str:
        return "".join(name if len(name) == 1 else f"<{name}>" for name, _ in self.press(*reads))


@pytest.mark.parametrize("reply", _REPLIES)
def test_a_reply_is_not_typed_however_it_is_cut(reply: str) -> None:
    """Its letters stood in the message, and its BEL was Ctrl-G: the editor opened."""
    assert _Typist().text(f"a{reply}b") == "ab"
    for cut in range(1, len(reply)):
        assert _Typist().text(f"a{reply[:cut]}", f"{reply[cut:]}b") == "ab", cut


def test_a_reply_that_pauses_is_not_typed() -> None:
    typist = _Typist()
    assert typist.text("a\x1b]11;rgb:1e") == "a"
    assert typist.text("1e/00/00\x07b") == "b"
    assert typist.text("\x1b") == "<escape>"
    assert typist.text("[I") == ""


def test_keys_come_through_behind_a_reply_that_never_ends() -> None:
    typist = _Typist()
    assert typist.text("\x1b]11;rgb:1e") == ""
    assert typist.text("\x03") == "<c-c>"
    assert typist.text("\x1b]11;rgb:1e") == ""
    typist.now_s += 2.0
    assert typist.text("b") == "b"


@pytest.mark.parametrize(
    ("report", "same_as"),
    [
        ("\x1b[97u", "a"),
        ("\x1b[97;1:1u", "a"),
        ("\x1b[97;2u", "A"),
        ("\x1b[49:33;2u", "!"),
        ("\x1b[97;;229u", "å"),
        ("\x1b[97;5u", "\x01"),
        ("\x1b[99;5u", "\x03"),
        ("\x1b[99;69u", "\x03"),
        ("\x1b[98;3u", "\x1bb"),
        ("\x1b[9u", "\t"),
        ("\x1b[9;2u", "\x1b[Z"),
        ("\x1b[27u", "\x1b"),
        ("\x1b[127u", "\x7f"),
        ("\x1b[127;5u", "\x17"),
        ("\x1b[13u", "\r"),
        ("\x1b[13;2u", "\n"),
        ("\x1b[13;3u", "\x1b\r"),
        ("\x1b[13;5u", "\r"),
        ("\x1b[27;2;13~", "\n"),
        ("\x1b[27;5;13~", "\r"),
        ("\x1b[27;5;99~", "\x03"),
        ("\x1b[1;1:1D", "\x1b[D"),
        ("\x1b[1;3:2D", "\x1b[1;3D"),
        ("\x1b[3;1:1~", "\x1b[3~"),
        ("\x1b[57414u", "\r"),
        ("\x1b[57400u", "1"),
        ("\x1b[57419u", "\x1b[A"),
        ("\x1bOM", "\r"),
        ("\x1bOp", "0"),
    ],
)
def test_a_report_of_a_key_is_the_key(report: str, same_as: str) -> None:
    """`ESC [ 99 ; 5 u` typed [99;5u, and Ctrl-C did nothing."""
    assert _Typist().text(report) == _Typist().text(same_as)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("\x1b[A", "<up>"),
        ("\x1b[1;3D", "<escape><left>"),
        ("\x1bOP", "<f1>"),
        ("\x1b[[A", "<f1>"),
        ("\x1b", "<escape>"),
        ("\x1b\r", "<escape><c-m>"),
        ("\x1b]", "<escape>]"),
        ("\x1bP", "<escape>P"),
        ("\x1bhi", "<escape>hi"),
        ("\x1b[3;5R", "<<cursor-position-response>>"),
        ("\x1b[<0;3;5M", "<<vt100-mouse-event>>"),
        ("\x1b[M !!", "<<vt100-mouse-event>>"),
        ("caf\u00e9 \u0e33", "caf\u00e9 \u0e33"),
        ("\udcff", "\ufffd"),
    ],
)
def test_keys_are_still_keys(keys: str, names: str) -> None:
    assert _Typist().text(keys) == names


def test_a_paste_is_whole_however_it_is_cut() -> None:
    rng = random.Random(3)
    pasted = "one\r\ntwo \x1b[I \x07 \x1b[200~ three" * 20
    sent = f"a\x1b[200~{pasted}\x1b[201~b"
    whole = [("a", "a"), ("<bracketed-paste>", pasted), ("b", "b")]
    for _ in range(30):
        reads, rest = [], sent
        while rest:
            size = rng.randint(1, 40)
            reads.append(rest[:size])
            rest = rest[size:]
        assert _Typist().press(*reads) == whole


def test_many_lines_at_once_are_a_paste_though_no_terminal_says_so() -> None:
    """Each was sent as a message of its own: 500 lines were 500 messages."""
    lines = "".join(f"line {number}\r" for number in range(500))
    reads = [lines[start : start + 1024] for start in range(0, len(lines), 1024)]

    assert _Typist().press(*reads) == [("<bracketed-paste>", lines)]


def test_a_few_lines_typed_while_the_program_was_busy_are_typed() -> None:
    assert _Typist().text("one\rtwo\r") == "one<c-m>two<c-m>"


def test_what_ends_a_burst_is_a_key() -> None:
    lines = "line\r" * 9
    assert _Typist().text(lines, "\x03x") == "<<bracketed-paste>><c-c>x"


def test_a_line_of_a_terminal_without_a_cursor_has_no_replies_either() -> None:
    assert text_of_line("a\tb") == "a\tb"
    assert text_of_line("\x1b[Ia\tb\x1b]11;rgb:0/0/0\x07 \x1b[200~c\x1b[201~\x1b[D") == "a\tb c"
