"""Files of others, in a store and beside it, of which none may change: names like ours, links out.

A test that uses the store afterwards compares `digest` with what it was.
"""

import hashlib
import os
import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_HEX = ("d41d8cd98f00b204e9800998ecf8427e", "0cc175b9c0f1b6a831c399e269772661")
_EMPTY = "92eb5ffee6ae2fec3ad71c777531578f"
_LINK = "4a8a08f09d37b73795649038408b5f33"
PACK_NAME = "0123456789abcdef0123456789abcdef.kv"


@dataclass(frozen=True, slots=True)
class CanaryTree:
    """What is planted in `store`, and what lies `outside` of it."""

    store: Path
    outside: Path

    def digest(self) -> str:
        """Return what stands for all of it: names, kinds, modes, contents and where links lead."""
        inside = [self.store / name for name in (*_HEX, _EMPTY, _LINK, "lock", ".git")]
        return digest([self.outside, *inside])

    def link_into(self, own: Path) -> None:
        """Lead out of a generation of the store's by every kind of link, and put files into it."""
        (own / "ab").symlink_to(self.outside)
        (own / "notes.txt").write_text("of the user")
        (own / "ee").mkdir()
        (own / "ee" / PACK_NAME).write_bytes(b"of another program")
        (own / PACK_NAME).symlink_to(self.outside / "letter.txt")
        for name in ("fates", "cache.db-journal"):
            (own / name).unlink(missing_ok=True)
            os.link(self.outside / "letter.txt", own / name)


def plant(store: Path, outside: Path) -> CanaryTree:
    """Make the files of others. The directories may be there already."""
    outside.mkdir(parents=True, exist_ok=True)
    _like_ours(outside)
    store.mkdir(parents=True, exist_ok=True)
    for name in _HEX:
        _like_ours(store / name)
    (store / _EMPTY).mkdir()
    (store / _LINK).symlink_to(outside)
    (store / "lock").write_text("4711\n")
    (store / ".git" / "objects" / "ab").mkdir(parents=True)
    (store / ".git" / "objects" / "ab" / ("c" * 38)).write_bytes(b"a commit")
    return CanaryTree(store, outside)


def _like_ours(directory: Path) -> None:
    """Another program's data, under every name that a store gives."""
    (directory / "ab").mkdir(parents=True)
    (directory / "ab" / ("0" * 30 + ".kv")).write_bytes(b"key and value")
    (directory / "letter.txt").write_text("dear")
    for name in (PACK_NAME, "fates", "pinned", "cache.db-wal", "cache.db-shm"):
        (directory / name).write_bytes(b"of another program")
    with closing(sqlite3.connect(directory / "other.db")) as table, table:
        table.execute("CREATE TABLE Cache (key BLOB, value BLOB)")
    (directory / "other.db").rename(directory / "cache.db")


def digest(paths: list[Path]) -> str:
    """Return what stands for files and all below them; a link stands for itself."""
    total = hashlib.blake2b()
    for path in paths:
        _take_in(total, path, path.name)
    return total.hexdigest()


def _take_in(total: "hashlib.blake2b", path: Path, name: str) -> None:
    info = path.lstat()
    total.update(f"{name} {info.st_mode}\n".encode())
    if stat.S_ISLNK(info.st_mode):
        total.update(os.fsencode(os.readlink(path)))
    elif stat.S_ISREG(info.st_mode):
        total.update(path.read_bytes())
    elif stat.S_ISDIR(info.st_mode):
        for child in sorted(path.iterdir()):
            _take_in(total, child, f"{name}/{child.name}")
