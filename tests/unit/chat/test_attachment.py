"""Attached files: text under its name, fenced; what is no text is refused by name."""

from pathlib import Path

import pytest

from kvchat.chat.attachment import PinFiles, matching_files, read_attachment, split_attached
from kvchat.core.errors import UsageError


def test_a_file_stands_under_its_name_in_a_fence(tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("x = 1\n\n")

    assert read_attachment(tmp_path / "a b.py").text == "a b.py:\n```\nx = 1\n```\n"


def test_a_fence_in_the_text_is_outdone(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("````\ncode\n````")

    text = read_attachment(tmp_path / "notes.md").text

    assert text.splitlines()[1] == text.splitlines()[-1] == "`````"


def test_what_is_not_utf_8_is_shown_as_replacements(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")

    assert "caf\ufffd" in read_attachment(tmp_path / "latin").text
    assert read_attachment(tmp_path / "latin").note == (
        "Some of latin is no UTF-8 text; it is sent as \ufffd."
    )


def test_a_file_that_rightly_has_the_replacement_character_is_whole(tmp_path: Path) -> None:
    """It was said to be no UTF-8."""
    (tmp_path / "unicode.md").write_text("U+FFFD is \ufffd.\n")

    file = read_attachment(tmp_path / "unicode.md")
    assert "U+FFFD is \ufffd." in file.text
    assert file.note == ""


def test_an_empty_file_is_attached_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    assert read_attachment(tmp_path / "empty").text == "./empty:\n```\n\n```\n"


def test_what_cannot_be_attached_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(17 * 2**20)
    for name, message in (
        ("binary", "is not a text file"),
        ("huge", "has more than 16,777,216 bytes"),
        (".", "is a directory"),
        ("missing", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            read_attachment(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
def test_a_file_of_another_editor_is_read_as_its_text(tmp_path: Path, encoding: str) -> None:
    """UTF-16 was refused; the mark and the carriage returns of others went to the model."""
    (tmp_path / "notes.txt").write_bytes("naïve\r\nlines\r\n".encode(encoding))

    assert read_attachment(tmp_path / "notes.txt").text == "notes.txt:\n```\nnaïve\nlines\n```\n"


def test_a_directory_and_a_pattern_are_the_text_files_that_they_name(tmp_path, monkeypatch):
    """A directory was refused, and `**` was the same as `*`."""
    monkeypatch.chdir(tmp_path)
    for name in ("src/a/one.py", "src/two.py", "src/.hidden", "src/node_modules/x.js", ".git/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("src/data.bin").write_bytes(b"a\0b")
    Path("src/link.py").symlink_to(tmp_path / "src/two.py")

    whole, note = PinFiles(None).attachments(Path("src"))
    names = [each.name for each in matching_files("src/**/*.py").read()]

    assert [each.name for each in whole] == ["src/two.py", "src/a/one.py"]
    assert whole[1].text.startswith("src/a/one.py:\n```\nsrc/a/one.py\n```")
    assert note.startswith("src: 2 files, ")
    assert names == ["src/a/one.py", "src/link.py", "src/two.py"]
    assert split_attached("".join(f"{each.text}\n" for each in whole) + "why?") == (
        [each.name for each in whole],
        "why?",
    )


def test_too_many_files_an_empty_directory_and_an_address_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.chat.attachment._MOST_FILES", 2)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x")
    (tmp_path / "empty").mkdir()

    for word, words in (
        (str(tmp_path), "names more than 2 files, or than 16 MiB"),
        (str(tmp_path / "empty"), "has no text files"),
        ("https://example.org/a.txt", "fetches no pages"),
    ):
        with pytest.raises(UsageError, match=words):
            matching_files(word)
