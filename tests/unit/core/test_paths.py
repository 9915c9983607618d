"""Private directories and files, whatever the umask; links and strangers' files are refused."""

import errno
import os
import pwd
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvchat.core import paths
from kvchat.core.errors import StoreError
from kvchat.core.paths import (
    close_to_others,
    from_anywhere,
    open_private,
    private_directory,
    private_file,
    replace_private,
    settle_home,
)

CREATE = os.O_WRONLY | os.O_CREAT


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_directories_are_private_up_to_the_first_that_was_there(tmp_path: Path) -> None:
    """Only the last one was; the ones leading to it took what the umask left, so that others could
    rename what stands in them."""
    made = private_directory(tmp_path / "a" / "b" / "c")

    assert made.is_dir()
    assert {mode(tmp_path / part) for part in ("a", "a/b", "a/b/c")} == {0o700}


def test_a_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)

    private_directory(shared)

    assert mode(shared) == 0o750


@pytest.mark.usefixtures("umask")
def test_files_are_private(tmp_path: Path) -> None:
    os.close(open_private(tmp_path / "new", CREATE))

    assert mode(tmp_path / "new") == 0o600


def test_a_file_that_was_open_to_others_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o666)

    os.close(open_private(tmp_path / "old", os.O_RDONLY))

    assert mode(tmp_path / "old") == 0o600


@pytest.mark.usefixtures("umask")
def test_a_private_file_is_made_or_made_private_and_keeps_what_it_holds(tmp_path: Path) -> None:
    private_file(tmp_path / "new")
    (tmp_path / "old").write_text("kept")
    (tmp_path / "old").chmod(0o644)
    private_file(tmp_path / "old")

    assert mode(tmp_path / "new") == mode(tmp_path / "old") == 0o600
    assert (tmp_path / "old").read_text() == "kept"


def test_a_private_file_is_no_link_and_no_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory").mkdir()
    for name in ("link", "directory", "nowhere/file"):
        with pytest.raises(StoreError):
            private_file(tmp_path / name)


def test_symbolic_links_are_refused_and_what_they_name_is_untouched(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / "link").symlink_to(target)

    with pytest.raises(StoreError, match="Cannot open"):
        open_private(tmp_path / "link", CREATE | os.O_TRUNC)

    assert target.read_text() == "keep"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError):
        open_private(tmp_path / "directory", os.O_RDONLY)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").touch()
    monkeypatch.setattr(paths.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)

    with pytest.raises(StoreError, match="not a regular file of this user"):
        open_private(tmp_path / "theirs", os.O_RDONLY)
    with pytest.raises(StoreError, match="belongs to another user"):
        private_directory(tmp_path)


def test_a_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="Cannot use the directory"):
            private_directory(path)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Opening a named pipe waits for a process at its other end; kvchat would have hung."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(StoreError):
        open_private(tmp_path / "pipe", os.O_RDONLY)
    with pytest.raises(StoreError):
        open_private(tmp_path / "pipe", CREATE)


def test_a_relative_path_holds_in_other_directories(tmp_path, monkeypatch):
    """`-m ../model` was kept with the conversation: elsewhere, /model ../model found nothing."""
    (tmp_path / "model").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert from_anywhere("../model") == from_anywhere("~/model") == str(tmp_path / "model")
    for name in ("org/model", "demo", "a\0b", "../model:Q4_0"):
        assert from_anywhere(name) == name


def test_own_directories_are_closed_to_others_and_links_are_left_alone(tmp_path: Path) -> None:
    """The cache of compiled kernels made ~/.cache/kvchat for all to read."""
    own, elsewhere = tmp_path / "kvchat", tmp_path / "shared"
    for directory in (own, elsewhere):
        directory.mkdir()
        directory.chmod(0o777)
    (tmp_path / "link").symlink_to(elsewhere)

    for path in (own, tmp_path / "link", tmp_path / "missing"):
        close_to_others(path)

    assert (mode(own), mode(elsewhere)) == (0o700, 0o777)


@pytest.mark.parametrize("home", [None, "", "relative/home"])
def test_home_is_that_of_the_users_entry_where_none_is_set(home: str | None) -> None:
    """Every command ended in a traceback."""
    environment = {"HOME": home} if home is not None else {}

    settle_home(environment)

    assert environment["HOME"] == pwd.getpwuid(os.getuid()).pw_dir


def test_a_user_without_any_home_is_told_so_when_something_is_saved(monkeypatch):
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    def refuse(path: Path, mode: int = 0, exist_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(Path, "mkdir", refuse)
    environment: dict[str, str] = {}

    settle_home(environment)

    with pytest.raises(StoreError, match=r"no home directory\. Set HOME"):
        private_directory(Path(environment["HOME"]) / ".cache" / "kvchat")


def test_a_home_that_is_set_stays(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}

    settle_home(environment)

    assert environment == {"HOME": str(tmp_path)}


def test_threads_of_one_process_replace_a_file_without_losing_it(tmp_path: Path) -> None:
    """They shared the temporary name: the second found its file gone, and raised."""
    path = tmp_path / "memory.json"
    begun = threading.Barrier(8)

    def replace(number: int) -> None:
        begun.wait()
        for _ in range(20):
            replace_private(path, bytes([number]) * 4096)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(replace, range(8)))

    assert len(set(path.read_bytes())) == 1
    assert os.listdir(tmp_path) == ["memory.json"]
    assert mode(path) == 0o600


def test_a_file_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch):
    path = tmp_path / "memory.json"
    replace_private(path, b"old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        replace_private(path, b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["memory.json"]


def test_what_a_killed_process_left_of_a_file_is_deleted(tmp_path: Path) -> None:
    """It may hold text that the user has deleted since."""
    left, recent = tmp_path / "history.7.8", tmp_path / "history.9.9"
    for path in (left, recent):
        path.write_text("secret")
    os.utime(left, (1, 1))

    replace_private(tmp_path / "history", b"new")

    assert sorted(os.listdir(tmp_path)) == ["history", "history.9.9"]
