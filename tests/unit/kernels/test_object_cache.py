"""Compiled kernels are read from the disk only where they are ours and whole."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from kvchat_kernels.cpu import code
from kvchat_kernels.cpu.object_cache import ObjectCache, file_name, save_nothing


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


def test_an_incognito_process_reads_and_saves_nothing(kept, monkeypatch):
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


OWN, OTHER = "0" * 16, "1" * 16
DAY_S = 86400.0


def name_of(number: int, version: str = OWN) -> str:
    return f"{file_name(version, 'head gate', f'{number:032x}')}.o"


def age(cache: ObjectCache, name: str, days: float) -> None:
    then_s = time.time() - days * DAY_S
    os.utime(cache.directory / name, (then_s, then_s))


def names_in(cache: ObjectCache) -> set[str]:
    return {path.name for path in cache.directory.iterdir()}


@pytest.fixture
def old(tmp_path: Path) -> ObjectCache:
    """A cache of two files, one of another version, that were not used for 31 days."""
    cache = ObjectCache(tmp_path)
    for name in (name_of(1), name_of(1, OTHER)):
        cache.save(name, b"code")
        age(cache, name, 31)
    return cache


def test_files_that_are_not_used_for_a_month_go(old: ObjectCache, tmp_path: Path) -> None:
    """Nothing was ever deleted: every update left hundreds of files behind."""
    former = f"head-gate-{2:032x}.o"  # as earlier versions named them
    for name, days in (
        (name_of(3), 29),
        (name_of(3, OTHER), 1),
        (name_of(4, OTHER), 3),
        (former, 3),
    ):
        old.save(name, b"code")
        age(old, name, days)

    ObjectCache(tmp_path).save(name_of(5), b"code")

    assert names_in(old) == {name_of(3), name_of(3, OTHER), name_of(5)}


def test_a_file_that_is_used_stays(old, tmp_path, monkeypatch):
    assert old.load(name_of(1)) == b"code"
    with monkeypatch.context() as incognito:
        incognito.setattr("os.environ", dict(os.environ))
        save_nothing()
        assert old.load(name_of(1, OTHER)) == b"code"

    ObjectCache(tmp_path).save(name_of(2), b"code")

    assert names_in(old) == {name_of(1), name_of(2)}


def test_only_files_that_are_ours_go(old: ObjectCache, tmp_path: Path) -> None:
    """The user may have named a directory in which a compiler keeps its own."""
    theirs = [f"parser-{7:032x}.o", name_of(8), "notes", ".kvchat-link"]
    for name in theirs[:3]:
        (tmp_path / name).write_bytes(b"of another compiler, without a digest of ours")
    (tmp_path / theirs[3]).symlink_to("notes")
    (tmp_path / name_of(9)).mkdir()
    (tmp_path / ".kvchat-killed").write_bytes(b"half")
    for name in (*theirs[:3], ".kvchat-killed", name_of(9)):
        age(old, name, 400)

    ObjectCache(tmp_path).save(name_of(2), b"code")

    assert names_in(old) == {*theirs, name_of(9), name_of(2)}


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX], ids=["saves", "deletes"])
def test_nothing_goes_while_another_process_saves_and_the_reverse(kind, old, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, kind)
    before = names_in(old)

    ObjectCache(tmp_path).save(name_of(2), b"code")
    os.close(descriptor)

    saved = {name_of(2)} if kind == fcntl.LOCK_SH else set()
    assert names_in(old) == before | saved


def test_all_files_are_counted(old: ObjectCache, tmp_path: Path) -> None:
    assert old.num_bytes() == 2 * (32 + 4)
    (tmp_path / "notes").write_text("of others")
    assert old.num_bytes() == 2 * (32 + 4)
    assert ObjectCache(tmp_path / "none").num_bytes() == 0


def test_names_of_other_sources_begin_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same = code.file_name_of("head gate", (1,)), code.file_name_of("norm", (1,))
    version = code._version()
    monkeypatch.setattr(code, "_version", lambda: (*version, "changed"))
    other = code.file_name_of("head gate", (1,))

    assert one[:16] == same[:16] != other[:16]
    assert len({one, same, other}) == 3
