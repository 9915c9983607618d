"""Nothing that reaches a terminal can act on it."""

import codecs
import json
import random
import unicodedata

import pytest

from kvchat.core.text import Sanitizer, exact_line, one_line, sanitize, sanitize_json, text_of

_ACTING = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_no_control_character_passes() -> None:
    shown = sanitize("".join(_ACTING) + _BIDI + "\u200b\ufeff")

    assert [c for c in shown if unicodedata.category(c) in ("Cc", "Cf")] == ["\n"]  # from the CR


def test_an_escape_sequence_becomes_visible_text() -> None:
    assert sanitize("\x1b]0;owned\x07\x1b[2J") == "␛]0;owned␛[2J"


def test_ordinary_text_of_any_script_is_left_alone() -> None:
    text = "naïve 日本語 עברית 👩\u200d🚀 e\u0301\n\tend"

    assert sanitize(text) == text


@pytest.mark.parametrize(
    ("text", "shown"), [("a\r\nb", "a\nb"), ("a\rb", "a\nb"), ("\r\r\n", "\n\n")]
)
def test_line_ends_become_line_feeds(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_lone_surrogates_can_be_encoded_afterwards() -> None:
    assert sanitize("a\udcffb").encode() == "a\ufffdb".encode()


def test_any_cut_into_pieces_gives_the_same_text() -> None:
    rng = random.Random(7)
    alphabet = ["a", "\r", "\n", "\r\n", "\x1b[31m", "\x9b", "\u202e", "é", "\t", "\ufeff"]
    for _ in range(500):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        sanitizer = Sanitizer()

        assert "".join(sanitizer.feed(piece) for piece in pieces) == sanitize(text), pieces


def test_a_title_is_one_safe_line_of_bounded_length() -> None:
    assert one_line("  two\nlines\x1b[0m  ") == "two lines␛[0m"
    assert one_line("x" * 100, 10) == "x" * 9 + "…"
    assert one_line(f"{'x' * 8}… and more", 10) == "x" * 8 + "…"


def test_a_line_shown_exactly_escapes_what_would_not_be_seen() -> None:
    assert exact_line("a  b é 日本") == "a  b é 日本"
    assert exact_line("a\n\x1b[2J\u202e\u200b\ud800") == r"a\n\x1b[2J\u202e\u200b\ud800"


def test_a_line_shown_exactly_escapes_letters_that_are_drawn_as_nothing() -> None:
    """A Hangul filler in a command was a space to the eye, and Python takes it for printable."""
    ignorable = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164, 0xFFA0]
    selectors = [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]
    blank = [0xAD, 0xA0, 0x2800, 0x3000, 0x13441, 0x16FE4, 0x1D159]
    tags = [0xE0001, *range(0xE0020, 0xE0080)]
    for code in (*ignorable, *selectors, *blank, *tags):
        shown = exact_line(f"rm{chr(code)}x")
        assert shown.isascii(), hex(code)
        assert f"{code:x}" in shown, hex(code)
    assert exact_line("é e\u0301 日本 \u1100\u1161 ❤") == "é e\u0301 日本 \u1100\u1161 ❤"


def test_a_json_document_reads_back_the_same_and_shows_nothing_that_acts() -> None:
    content = {"text": "".join(map(chr, range(0x2070))) + "\udead\ufeff"}

    document = sanitize_json(json.dumps(content, ensure_ascii=False, indent=2))

    assert json.loads(document) == content
    assert sanitize(document) == document


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_a_text_is_read_in_the_encoding_that_its_mark_names(encoding: str) -> None:
    """UTF-16 was "not a text file", and a UTF-8 mark and carriage returns went to the model."""
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    data = marks.get(encoding, b"") + "naïve 🚢\r\nnext\rlast\n".encode(encoding)

    assert text_of(data) == ("naïve 🚢\nnext\nlast\n", True)


@pytest.mark.parametrize("data", [b"caf\xe9", codecs.BOM_UTF16_LE + b"a\0b"])
def test_what_cannot_be_read_is_replaced_and_told(data: bytes) -> None:
    text, is_whole = text_of(data)

    assert "\ufffd" in text
    assert not is_whole
