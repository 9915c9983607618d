"""Texts of other editors: on standard input and in the configuration file."""

import io
from pathlib import Path

import pytest

from kvchat.cli.batch import read_requests
from kvchat.cli.output import Notices
from kvchat.cli.script_input import read_lines, read_text
from kvchat.core.toml_text import read_table

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_standard_input_is_read_in_its_encoding(encoding: str) -> None:
    """UTF-16 was sent as replacement characters, and the mark and carriage returns as they were."""
    stderr = io.StringIO()
    notices = Notices(is_quiet=False, stderr=stderr)
    data = "naïve\r\nlines\r\n".encode(encoding)

    assert read_text(io.BytesIO(data), notices) == "naïve\nlines"
    assert [text for _, text in read_lines(io.BytesIO(data), notices)] == ["naïve", "lines"]
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_requests_are_read_in_their_encoding(encoding: str) -> None:
    data = '{"prompt": "naïve"}\r\n{"prompt": "two"}\r\n'.encode(encoding)

    requests = list(read_requests(io.BytesIO(data)))

    assert [type(request).__name__ for request in requests] == ["JsonRequest"] * 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_configuration_with_a_mark_is_read(tmp_path: Path, encoding: str) -> None:
    """ "Invalid statement (at line 1, column 1)" was said of it."""
    (tmp_path / "config.toml").write_bytes("temperature = 0.5\r\n".encode(encoding))

    assert read_table(tmp_path / "config.toml") == {"temperature": 0.5}
