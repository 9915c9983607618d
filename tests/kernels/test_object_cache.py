"""Compiled kernels are read from the disk only where they are ours and whole."""

import os
from pathlib import Path

import pytest

from kvchat_kernels.cpu.object_cache import ObjectCache, save_nothing


@pytest.fixture
def kept(tmp_path: Path) -> ObjectCache:
    cache = ObjectCache(tmp_path / "kernels")
    cache.save("one.o", b"code")
    return cache


def test_what_was_saved_is_read(kept: ObjectCache, tmp_path: Path) -> None:
    assert kept.load("one.o") == b"code"
    assert kept.load("other.o") is None
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kernels/one.o").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_a_miss(kept: ObjectCache, tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "kernels/one.o"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content) if damage is None else damage)

    assert kept.load("one.o") is None
    kept.save("one.o", b"code")
    assert kept.load("one.o") == b"code"


def test_a_link_is_not_followed(kept: ObjectCache, tmp_path: Path) -> None:
    os.rename(tmp_path / "kernels/one.o", tmp_path / "elsewhere")
    (tmp_path / "kernels/one.o").symlink_to(tmp_path / "elsewhere")

    assert kept.load("one.o") is None


@pytest.mark.parametrize("name", ["kernels", "kernels/one.o"])
def test_what_others_may_write_is_not_run(kept: ObjectCache, tmp_path: Path, name: str) -> None:
    (tmp_path / name).chmod(0o777)

    assert kept.load("one.o") is None


def test_an_incognito_process_reads_and_saves_nothing(
    kept: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))
    save_nothing()

    kept.save("other.o", b"code")

    assert kept.load("other.o") is None
    assert kept.load("one.o") == b"code"


def test_without_a_place_nothing_is_saved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ObjectCache(tmp_path / "file/kernels")

    cache.save("one.o", b"code")

    assert cache.load("one.o") is None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277], ids=oct)
def test_all_directories_on_the_way_are_closed_to_others(tmp_path: Path, umask: int) -> None:
    """~/.cache/kvchat was made for all to read, and with a umask of 0 for all to write."""
    before = os.umask(umask)
    try:
        ObjectCache(tmp_path / "kvchat" / "kernels").save("one.o", b"code")
    finally:
        os.umask(before)

    modes = {(tmp_path / part).stat().st_mode & 0o777 for part in ("kvchat", "kvchat/kernels")}
    assert modes == {0o700}
