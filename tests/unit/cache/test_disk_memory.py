"""DiskMemory: facts come back, and a memory that cannot be used is an empty one."""

import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.memory import DiskMemory
from kvchat.core.types import NO_MEMORY, Fact

FACTS: list[Fact] = [{"prefill": 512.5, "read": [1, 2]}, "ä☃", 1, 2.5, True, [], {}]


def table_of(state: Path) -> Path:
    return state / "memory" / "cache.db"


def modes_below(state: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_mode & 0o777 for path in (state / "memory").rglob("*")}


def test_facts_are_there_in_the_next_process(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path / "state")
    for number, fact in enumerate(FACTS):
        memory.set("kind", str(number), fact)
    memory.update("kind", "0", lambda known: {**dict(known), "new": 1})  # type: ignore[call-overload]

    again = DiskMemory(tmp_path / "state")

    assert again.get("kind", "0") == {"prefill": 512.5, "read": [1, 2], "new": 1}
    assert [again.get("kind", str(number)) for number in range(1, len(FACTS))] == FACTS[1:]
    assert again.get("kind", "none") is None
    assert again.get("another kind", "0") is None


@pytest.mark.parametrize("umask", [0o000, 0o022], ids=oct)
def test_a_memory_is_the_users_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        DiskMemory(tmp_path / "state").set("kind", "key", 1)
    finally:
        os.umask(before)

    assert (tmp_path / "state" / "memory").stat().st_mode & 0o777 == 0o700
    assert {"cache.db", "cache.db-wal", "cache.db-shm"} <= modes_below(tmp_path / "state").keys()
    assert set(modes_below(tmp_path / "state").values()) == {0o600}


def test_a_directory_that_was_opened_to_others_is_closed_again(tmp_path: Path) -> None:
    DiskMemory(tmp_path).set("kind", "key", 1)
    (tmp_path / "memory").chmod(0o777)
    table_of(tmp_path).chmod(0o666)

    assert DiskMemory(tmp_path).get("kind", "key") == 1
    assert (tmp_path / "memory").stat().st_mode & 0o777 == 0o700
    assert set(modes_below(tmp_path).values()) == {0o600}


def test_who_only_asks_makes_nothing(tmp_path: Path) -> None:
    assert DiskMemory(tmp_path / "state").get("kind", "key") is None
    assert NO_MEMORY.get("kind", "key") is None
    NO_MEMORY.set("kind", "key", 1)
    NO_MEMORY.update("kind", "key", lambda _: 1)

    assert list(tmp_path.iterdir()) == []


# What stands in the place of a memory and cannot be used, and what is then left of it.


def link(state: Path) -> None:
    (state / "elsewhere").mkdir()
    (state / "memory").symlink_to("elsewhere")


def directory_of_others(state: Path) -> None:
    (state / "memory").mkdir()
    (state / "memory" / "letter").write_text("dear")


def table_of_others(state: Path) -> None:
    (state / "memory").mkdir()
    with sqlite3.connect(table_of(state)) as connection:
        connection.execute("CREATE TABLE Letter (text)")
    connection.close()


def foreign_table_in_our_directory(state: Path) -> None:
    DiskMemory(state).set("kind", "key", 1)
    for end in ("", "-wal", "-shm"):
        Path(f"{table_of(state)}{end}").unlink()
    with sqlite3.connect(table_of(state)) as connection:
        connection.execute("CREATE TABLE Letter (text)")
    connection.close()
    table_of(state).chmod(0o600)


def plain_file(state: Path) -> None:
    (state / "memory").write_text("dear")


@pytest.mark.parametrize(
    "prepare",
    [link, directory_of_others, table_of_others, foreign_table_in_our_directory, plain_file],
    ids=lambda prepare: prepare.__name__,
)
def test_what_others_put_there_is_left_alone(prepare, tmp_path):
    prepare(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert_empty(DiskMemory(tmp_path))

    own = {"kvchat.lock", "cache.db-shm", "cache.db-wal"}
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in after if path.name not in own} == {
        path: before[path] for path in before if path.name not in own
    }


def assert_empty(memory: DiskMemory) -> None:
    memory.set("kind", "key", 2)
    memory.update("kind", "other", lambda _: 3)
    assert memory.get("kind", "key") is None
    assert memory.get("kind", "other") is None


@pytest.mark.parametrize("name", ["link", "hard link", "pipe", "directory"])
def test_what_stands_in_the_place_of_a_file_is_taken_away(name: str, tmp_path: Path) -> None:
    DiskMemory(tmp_path).set("kind", "key", 1)
    for end in ("", "-wal", "-shm"):
        Path(f"{table_of(tmp_path)}{end}").unlink()
    with sqlite3.connect(tmp_path / "another program's") as connection:
        connection.execute("CREATE TABLE Letter (text)")
    connection.close()
    before = (tmp_path / "another program's").read_bytes()
    match name:
        case "link":
            table_of(tmp_path).symlink_to(tmp_path / "another program's")
        case "hard link":
            table_of(tmp_path).hardlink_to(tmp_path / "another program's")
        case "pipe":
            os.mkfifo(table_of(tmp_path))
        case _:
            table_of(tmp_path).mkdir()

    DiskMemory(tmp_path).set("kind", "key", 2)

    assert DiskMemory(tmp_path).get("kind", "key") == 2
    assert (tmp_path / "another program's").read_bytes() == before


def overwritten(table: Path) -> None:
    content = table.read_bytes()
    table.write_bytes(b"no table at all " * (len(content) // 16))


def cut(table: Path) -> None:
    os.truncate(table, 5000)


def without_rows(table: Path) -> None:
    with sqlite3.connect(table) as connection:
        connection.execute("DROP TABLE Cache")
    connection.close()


@pytest.mark.parametrize("damage", [overwritten, cut, without_rows], ids=lambda d: d.__name__)
def test_a_damaged_memory_begins_anew(damage: Callable[[Path], None], tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    for number in range(200):
        memory.set("kind", str(number), "fact" * 50)
    copied_into_the_table(tmp_path)
    damage(table_of(tmp_path))

    for _ in range(3):  # deep damage is seen at a use, and the next process begins anew
        again = DiskMemory(tmp_path)
        assert again.get("kind", "0") in (None, "fact" * 50)
        again.set("kind", "new", 1)

    assert DiskMemory(tmp_path).get("kind", "new") == 1


def copied_into_the_table(state: Path) -> None:
    with sqlite3.connect(table_of(state)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.putenv, ("a", "pickle was loaded")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("raw", "mode", "filename", "value"),
    [
        (1, 4, None, pickle.dumps(Bomb())),
        (1, 4, "bomb.val", None),
        (0, 4, None, pickle.dumps(Bomb())),
        (1, 1, None, b"bytes"),
        (1, 1, None, "no JSON"),
        (1, 1, None, "[" * 100_000),
        (1, 1, None, 5),
        (1, 3, "../text", None),
        (1, 2, "../text", None),
    ],
)
def test_only_rows_of_json_are_read(raw, mode, filename, value, tmp_path, monkeypatch):
    """diskcache loads pickles, and deletes the files that rows name."""
    (tmp_path / "text").write_text('"read from a file"')
    DiskMemory(tmp_path).set("kind", "key", 1)
    (tmp_path / "memory" / "bomb.val").write_bytes(pickle.dumps(Bomb()))
    loaded: list[object] = []
    monkeypatch.setattr(pickle, "load", loaded.append)
    with sqlite3.connect(table_of(tmp_path)) as connection:
        connection.execute(
            "UPDATE Cache SET raw = ?, mode = ?, filename = ?, value = ?",
            (raw, mode, filename, value),
        )
    connection.close()

    assert DiskMemory(tmp_path).get("kind", "key") is None
    DiskMemory(tmp_path).set("kind", "key", 2)
    assert DiskMemory(tmp_path).get("kind", "key") == 2
    assert loaded == []
    assert (tmp_path / "text").exists()
    assert (tmp_path / "memory" / "bomb.val").exists()


def test_no_row_is_a_pickle(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    for number, fact in enumerate(FACTS):
        memory.set("kind", str(number), fact)

    with sqlite3.connect(table_of(tmp_path)) as connection:
        rows = connection.execute("SELECT key, raw, filename, value FROM Cache").fetchall()
    connection.close()

    assert [json.loads(value) for *_, value in rows] == FACTS
    assert all(raw and filename is None and type(key) is str for key, raw, filename, _ in rows)


@pytest.mark.parametrize("fact", ["long" * (1 << 19), {1, 2}, float], ids=["long", "set", "type"])
def test_a_fact_that_cannot_be_stored_is_lost_alone(fact: Fact, tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    memory.set("kind", "key", fact)
    memory.update("kind", "key", lambda _: fact)
    memory.set("kind", "other", 1)

    assert memory.get("kind", "key") is None
    assert memory.get("kind", "other") == 1


@pytest.fixture
def held(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    DiskMemory(tmp_path).set("kind", "key", 1)
    connection = sqlite3.connect(table_of(tmp_path), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def test_a_memory_that_another_process_holds_is_empty(held, tmp_path):
    """diskcache waits a minute for a process that was stopped while it wrote."""
    memory = DiskMemory(tmp_path, patience_s=0.05)
    assert_empty(memory)
    held.execute("ROLLBACK")

    assert DiskMemory(tmp_path).get("kind", "key") == 1


def test_a_memory_that_another_process_takes_meanwhile_is_empty(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path, patience_s=0.05)
    memory.set("kind", "key", 1)
    with sqlite3.connect(table_of(tmp_path), isolation_level=None) as connection:
        connection.execute("BEGIN IMMEDIATE")
        assert memory.get("kind", "key") == 1  # who writes keeps no reader away
        memory.set("kind", "other", 1)
        assert_empty(memory)
    connection.close()


class FullDisk(sqlite3.Connection):
    """SQLite refuses to make the table longer, with the error that it has for a full disk."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA max_page_count = 12")


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_full_disk_is_no_reason_to_fail(is_used_before, tmp_path, monkeypatch):
    memory, connect = DiskMemory(tmp_path), sqlite3.connect
    if is_used_before:
        memory.set("kind", "key", 1)

    def fill() -> None:
        for number in range(20):
            memory.set("kind", f"number {number}", "fact" * 10_000)

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=FullDisk))
    thread = threading.Thread(target=fill)  # a thread has a connection of its own
    thread.start()
    thread.join()
    monkeypatch.undo()

    assert memory.get("kind", "number 19") is None
    again = DiskMemory(tmp_path)
    again.set("kind", "number 19", 2)
    assert again.get("kind", "number 19") == 2
    assert again.get("kind", "key") == (1 if is_used_before else None)


def test_a_directory_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert_empty(DiskMemory(tmp_path / "file" / "state"))
    assert_empty(DiskMemory(Path("/proc/nowhere")))


def test_a_variable_in_the_name_of_the_directory_leads_nowhere_else(tmp_path, monkeypatch):
    """diskcache expands variables in the name of a directory."""
    monkeypatch.setenv("ELSEWHERE", "elsewhere")

    assert_empty(DiskMemory(tmp_path / "$ELSEWHERE"))

    assert list(tmp_path.iterdir()) == []


def test_threads_lose_nothing_of_each_others(tmp_path: Path) -> None:
    """Two digests that were stored at once had one temporary name; one of them was lost."""
    memory = DiskMemory(tmp_path)

    def write(name: str) -> None:
        for number in range(25):
            memory.set("kind", f"{name} {number}", number)
            memory.update("kind", "count", lambda known: int(known or 0) + 1)  # type: ignore[call-overload]

    threads = [threading.Thread(target=write, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    again = DiskMemory(tmp_path)
    assert all(again.get("kind", f"{n} {number}") == number for n in range(4) for number in (0, 24))
    assert again.get("kind", "count") == 100


_WRITER = """
import sys
from pathlib import Path
from kvchat.cache.disk.memory import DiskMemory
memory = DiskMemory(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    memory.set("kind", f"{sys.argv[2]} {number}", "fact" * 100)
    memory.update("kind", "count", lambda known: (known or 0) + 1)
    print(number, flush=True)
"""


def start_writer(state: Path, name: str, count: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(state), name, str(count)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_writers_that_are_killed_lose_nothing_that_they_and_others_stored(tmp_path: Path) -> None:
    writers = [
        start_writer(tmp_path, str(number), 40 if number % 2 else 10**6) for number in range(4)
    ]
    stored = []
    for number, writer in enumerate(writers):
        assert writer.stdout is not None
        if number % 2 == 0:
            for _ in range(5 + number):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            stored += [f"{number} {each}" for each in range(last + 1)]
    for number, writer in enumerate(writers):
        writer.communicate()
        if number % 2:
            assert writer.returncode == 0
            stored += [f"{number} {each}" for each in range(40)]

    memory = DiskMemory(tmp_path)
    assert [name for name in stored if memory.get("kind", name) != "fact" * 100] == []
    assert int(memory.get("kind", "count") or 0) >= len(stored)  # type: ignore[call-overload]


def test_old_facts_make_room_for_new_ones(tmp_path: Path) -> None:
    memory = DiskMemory(tmp_path)
    for number in range(40):
        memory.set("kind", str(number), "x" * 900_000)

    assert memory.get("kind", "0") is None
    assert memory.get("kind", "39") == "x" * 900_000
    assert sum(path.stat().st_size for path in (tmp_path / "memory").iterdir()) < 40 << 20
