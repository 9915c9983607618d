"""A file of packed weights is complete or absent; the files are bounded and belong to the user."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvchat.cache.disk import quota, weight_files
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.weight_files import NewFile, WeightFiles, weight_directory
from kvchat.core.text import Size

KEYS = [f"{number:032x}" for number in range(4)]
HEADER = b"header of 16 bytes"
SIZE = 1000


def keep(files: WeightFiles, key: str, content: bytes = HEADER) -> None:
    new = files.begin(key, SIZE)
    assert new is not None
    new.write(0, memoryview(content))
    assert new.memory[: len(content)] == content
    assert new.finish()


def begun(files: WeightFiles, key: str) -> NewFile:
    new = files.begin(key, SIZE)
    assert new is not None
    new.memory[: len(HEADER)] = HEADER
    return new


def stored(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path / "weights", 3 * SIZE)


def test_a_file_is_found_once_it_is_complete(files: WeightFiles) -> None:
    new = files.begin(KEYS[0], SIZE)
    assert new is not None
    new.memory[: len(HEADER)] = HEADER
    assert files.find(KEYS[0], HEADER, SIZE) is None
    new.finish()

    memory = files.find(KEYS[0], HEADER, SIZE)

    assert memory is not None
    assert memory[:] == HEADER.ljust(SIZE, b"\0")
    path = files.directory / f"{KEYS[0]}.safetensors"
    assert (path.stat().st_mode & 0o777, files.directory.stat().st_mode & 0o777) == (0o600, 0o700)


def test_what_is_written_to_a_found_file_stays_in_memory(files: WeightFiles) -> None:
    keep(files, KEYS[0])
    memory = files.find(KEYS[0], HEADER, SIZE)
    assert memory is not None
    memory[500] = 7

    again = files.find(KEYS[0], HEADER, SIZE)

    assert again is not None
    assert again[500] == 0


def test_a_file_of_others_is_none(files: WeightFiles, tmp_path: Path) -> None:
    """By another header or size, a link, a second name, and a directory in its place."""
    keep(files, KEYS[0])
    path = files.directory / f"{KEYS[0]}.safetensors"
    assert files.find(KEYS[0], HEADER[::-1], SIZE) is None
    assert files.find(KEYS[0], HEADER, SIZE + 1) is None
    (tmp_path / "other name").hardlink_to(path)
    assert files.find(KEYS[0], HEADER, SIZE) is None
    (files.directory / f"{KEYS[1]}.safetensors").symlink_to(tmp_path / "other name")
    assert files.find(KEYS[1], HEADER, SIZE) is None
    (files.directory / f"{KEYS[2]}.safetensors").mkdir()
    assert files.find(KEYS[2], HEADER, SIZE) is None


def test_links_are_not_followed_when_a_file_is_made_or_deleted(files, tmp_path):
    files.directory.mkdir()
    target = tmp_path / "target"
    target.write_text("mine")
    (files.directory / f"{KEYS[0]}.part").symlink_to(target)
    (files.directory / f"{KEYS[1]}.safetensors").symlink_to(target)
    (files.directory / "notes.txt").write_text("mine too")

    assert files.begin(KEYS[0], SIZE) is None
    assert files.clear() == 0

    assert target.read_text() == "mine"
    assert (files.directory / "notes.txt").exists()


def test_a_directory_that_is_a_link_is_left_alone(files: WeightFiles, tmp_path: Path) -> None:
    keep(files, KEYS[0])
    other = WeightFiles(tmp_path / "link", SIZE)
    other.directory.symlink_to(files.directory)

    assert (other.num_bytes(), other.clear()) == (0, 0)
    assert files.num_bytes() == SIZE


def test_a_directory_that_is_a_link_takes_no_file(files: WeightFiles, tmp_path: Path) -> None:
    """Files went through the link, and no limit, status, gc or clear ever saw them."""
    keep(files, KEYS[0])
    other = WeightFiles(tmp_path / "link", 3 * SIZE)
    other.directory.symlink_to(files.directory)

    assert other.find(KEYS[0], HEADER, SIZE) is None
    assert other.begin(KEYS[1], SIZE) is None
    assert stored(files.directory) == [f"{KEYS[0]}.safetensors"]


def test_what_was_used_longest_ago_makes_room(files: WeightFiles) -> None:
    for age, key in enumerate(KEYS[:3]):
        keep(files, key)
        os.utime(files.directory / f"{key}.safetensors", (100 + age, 100 + age))
    assert files.find(KEYS[0], HEADER, SIZE) is not None  # and so it is used now

    keep(files, KEYS[3])

    assert stored(files.directory) == [f"{KEYS[number]}.safetensors" for number in (0, 2, 3)]


def test_what_is_larger_than_the_limit_deletes_nothing(files: WeightFiles) -> None:
    keep(files, KEYS[0])

    assert files.begin(KEYS[1], 3 * SIZE + 1) is None
    assert WeightFiles(files.directory, 0).begin(KEYS[1], SIZE) is None
    assert files.num_bytes() == SIZE


@pytest.mark.parametrize("call", ["posix_fallocate", "ftruncate"])
def test_a_full_disk_leaves_no_file(files, call, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)

    assert files.begin(KEYS[0], SIZE) is None
    assert stored(files.directory) == []


def test_a_system_without_posix_fallocate_keeps_files_too(files, monkeypatch):
    """macOS has none."""
    monkeypatch.delattr(os, "posix_fallocate")

    keep(files, KEYS[0])

    assert files.num_bytes() == SIZE


def test_a_nearly_full_disk_takes_none(files: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "leaves_free", lambda *_: False)

    assert files.begin(KEYS[0], SIZE) is None


def test_a_file_is_made_by_one_process_and_taken_over_from_one_that_ended(files):
    program = f"""
import os, sys
from pathlib import Path
from kvchat.cache.disk.weight_files import WeightFiles
new = WeightFiles(Path({str(files.directory)!r}), {3 * SIZE}).begin({KEYS[0]!r}, {SIZE})
new.memory[:5] = b"other"
print(flush=True)
sys.stdin.readline()
os._exit(0)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdin is not None
    other.stdout.readline()

    assert files.begin(KEYS[0], SIZE) is None
    assert files.clear() == files.collect() == 0, "it is being made"
    other.communicate(b"\n")
    assert stored(files.directory) == [f"{KEYS[0]}.part"]
    keep(files, KEYS[0])

    memory = files.find(KEYS[0], HEADER, SIZE)
    assert memory is not None
    assert memory[:] == HEADER.ljust(SIZE, b"\0")


def test_a_file_that_gets_its_name_meanwhile_stays(files, monkeypatch):
    """The lock of a complete file is free; it was once emptied under those who had it mapped."""
    new = begun(files, KEYS[0])
    is_locked, is_deleted = weight_files._is_locked_for_us, weight_files._is_deleted

    def finish_first(descriptor: int) -> bool:
        new.finish()
        return is_locked(descriptor)

    monkeypatch.setattr(weight_files, "_is_deleted", lambda path: False)
    monkeypatch.setattr(weight_files, "_is_locked_for_us", finish_first)

    assert files.begin(KEYS[0], SIZE) is None
    assert files.find(KEYS[0], HEADER, SIZE) is not None

    monkeypatch.setattr(weight_files, "_is_deleted", is_deleted)
    monkeypatch.setattr(weight_files, "_is_locked_for_us", is_locked)
    new = begun(files, KEYS[1])
    monkeypatch.setattr(weight_files, "_is_locked_for_us", finish_first)
    assert files.collect() == 0
    assert files.find(KEYS[1], HEADER, SIZE) is not None


def test_what_ended_processes_left_goes_with_the_next_file(files: WeightFiles) -> None:
    """One whose checkpoint was not loaded again stayed, and as new as it was, evicted others."""
    keep(files, KEYS[0])
    (files.directory / f"{KEYS[1]}.part").write_bytes(bytes(SIZE))
    held = files.begin(KEYS[2], SIZE)
    assert held is not None

    keep(files, KEYS[3])

    names = [f"{KEYS[0]}.safetensors", f"{KEYS[2]}.part", f"{KEYS[3]}.safetensors"]
    assert stored(files.directory) == names
    held.abandon()


def test_a_file_that_cannot_have_its_name_is_gone(files: WeightFiles) -> None:
    """It stayed as a part beside the directory in its place, and was written at every start."""
    (files.directory / f"{KEYS[0]}.safetensors").mkdir(parents=True)
    new = files.begin(KEYS[0], SIZE)
    assert new is not None

    assert not new.finish()

    assert stored(files.directory) == [f"{KEYS[0]}.safetensors"]


def test_an_abandoned_file_is_gone_and_its_memory_is_not(files: WeightFiles) -> None:
    new = files.begin(KEYS[0], SIZE)
    assert new is not None
    new.abandon()

    new.memory[:4] = b"kept"
    assert stored(files.directory) == []


def test_a_file_that_cannot_get_its_name_is_deleted(files: WeightFiles) -> None:
    """It kept its name and lost its lock: another process would have emptied it, and this one would
    have ended at the next look at its memory."""
    new = files.begin(KEYS[0], SIZE)
    assert new is not None
    (files.directory / f"{KEYS[0]}.safetensors").mkdir()

    assert not new.finish()

    assert stored(files.directory) == [f"{KEYS[0]}.safetensors"]
    new.memory[:4] = b"kept"


@pytest.mark.parametrize("size", [None, Size(share=0.5)])
def test_a_share_of_the_disk_does_not_shrink_by_what_is_kept(size, tmp_path, monkeypatch):
    """`kvchat cache gc` then deleted the file that had just fitted."""
    files = WeightFiles(weight_directory(tmp_path), 3 * SIZE)
    free = total = 100 << 30
    monkeypatch.setattr(
        quota.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=total)
    )
    before = quota.disk_budget(size, tmp_path)
    keep(files, KEYS[0])
    free -= SIZE

    assert quota.disk_budget(size, tmp_path) == before


def test_the_commands_of_the_cache_count_and_delete_packed_weights(tmp_path: Path) -> None:
    files = WeightFiles(weight_directory(tmp_path), 3 * SIZE)
    for key in KEYS[:2]:
        keep(files, key)
    admin = StoreAdmin(tmp_path, Size(num_bytes=SIZE))

    assert admin.status().weights_bytes == 2 * SIZE
    assert admin.gc() == SIZE
    assert admin.status().weights_bytes == SIZE
    assert admin.clear() == SIZE
    assert not files.directory.exists()
