"""Files that users and downloads supply: regular ones of a bounded size, or an OSError at once."""

import errno
import os
import socket
from pathlib import Path

import pytest

from kvchat.core.paths import open_regular, read_bounded


def assert_refused(path: Path, words: str, max_bytes: int = 10) -> None:
    with pytest.raises(OSError, match=words) as caught:
        read_bounded(path, max_bytes)
    assert caught.value.strerror


def test_a_file_is_read_up_to_its_bound_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    assert read_bounded(path, 10) == b"0123456789"
    assert_refused(path, "more than 9 bytes", 9)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"here")
    (tmp_path / "link").symlink_to("file")

    assert read_bounded(tmp_path / "link", 10) == b"here"


def test_a_file_that_is_not_there_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 10)


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(OSError, match="more than 1,000 bytes") as caught:
        read_bounded(tmp_path / "sparse", 1000)
    assert caught.value.errno == errno.EFBIG


def test_a_file_that_hides_its_size_is_bounded_too() -> None:
    """Files of /proc say that they have no bytes."""
    assert read_bounded(Path("/proc/self/comm"), 100)
    assert_refused(Path("/proc/self/status"), "more than 10 bytes")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert_refused(tmp_path / "pipe", "a named pipe, not a regular file")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert_refused(tmp_path / "socket", ".")  # the system itself opens none

    assert_refused(tmp_path, "a directory, not a regular file")
    assert_refused(Path("/dev/zero"), "a device, not a regular file")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=["NUL", "half a surrogate pair"])
def test_a_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    assert_refused(tmp_path / name, "not a possible one")


def test_refusals_leave_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        with pytest.raises(OSError, match="a directory"):
            open_regular(tmp_path)

    assert len(os.listdir("/proc/self/fd")) == before
