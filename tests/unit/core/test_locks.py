"""File locks: taken, another's, none on this file system, and a failing disk."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvchat.core.paths import Lock, try_lock

Fail = Callable[[int, int], None]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def failing(code: int, times: int = 1000) -> Fail:
    calls: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))

    return flock


def test_a_lock_is_ours_until_its_file_is_closed(descriptor: int, tmp_path: Path) -> None:
    other = os.open(tmp_path / "file", os.O_RDWR)

    assert try_lock(descriptor) is Lock.OURS
    assert try_lock(other) is Lock.ANOTHERS
    os.close(other)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_not_another_process(code, descriptor, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(code))

    assert try_lock(descriptor) is Lock.NONE


def test_an_interrupted_attempt_is_made_again(descriptor, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EINTR, times=3))

    assert try_lock(descriptor) is Lock.OURS


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR])
def test_a_failing_disk_is_told(code, descriptor, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        try_lock(descriptor)
