"""Rows of the table: a round trip, and refusal of a pack of which any part is another."""

import math
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.eviction import Use
from kvchat.cache.disk.pack_rows import PackRow, Pin, checksum_of, require_whole
from kvchat.cache.disk.table import PackTable
from kvchat.cache.keys import KEY_BYTES, chain_keys, encode_ids, root_key
from kvchat.cache.page_memory import ReadBuffers
from kvchat.cache.tier import DamagedRecord, Layout, LogitFingerprint, PackHead

LAYOUT = Layout(identity=b"i" * 16, block_size=4, block_bytes=64)
IMAGE = bytes(range(128))
USE = Use(12.5, 3.25, 2, 1)
FINGERPRINT = LogitFingerprint((7, 3, 39), (12.5, 0.25, -3.0))


def row_of(fingerprint: LogitFingerprint | None = FINGERPRINT, is_draft: bool = False) -> PackRow:
    ids = encode_ids(range(8))
    head = PackHead(root_key(LAYOUT.identity), ids, fingerprint=fingerprint, is_draft=is_draft)
    key = head.keys(LAYOUT)[0]
    whole = PackHead(
        head.parent, head.ids, checksum_of(key, head, IMAGE), head.fingerprint, is_draft
    )
    return PackRow(key, LAYOUT, whole, USE, None)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[PackTable]:
    directory = tmp_path / LAYOUT.identity.hex()
    directory.mkdir()
    made = PackTable(directory, 1.0)
    yield made
    made.close()


def image_in(table: PackTable, row: PackRow) -> memoryview:
    return table.image(row, ReadBuffers(1))


@pytest.mark.parametrize("row", [row_of(), row_of(None), row_of(is_draft=True)])
def test_a_pack_is_read_as_it_was_written(table: PackTable, row: PackRow) -> None:
    table.keep(row, memoryview(IMAGE))

    assert table.row(row.key) == row
    assert list(table.rows()) == [(row.key, row)]
    assert image_in(table, row) == IMAGE
    require_whole(row, image_in(table, row))


@pytest.mark.parametrize("column", ["key", "parent", "ids", "fingerprint", "checksum", "payload"])
def test_a_flipped_bit_of_a_pack_is_noticed(table: PackTable, column: str) -> None:
    table.keep(row_of(), memoryview(IMAGE))
    [(data,)] = table._execute(f"SELECT {column} FROM Pack")
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        table._execute(f"UPDATE Pack SET {column} = ?", (bytes(flipped),))
        [(_, row)] = table.rows()
        assert row is not None
        with pytest.raises(DamagedRecord):
            require_whole(row, image_in(table, row))


@pytest.mark.parametrize("column", ["key", "parent", "ids", "fingerprint", "checksum", "payload"])
def test_a_column_cut_anywhere_is_refused(table: PackTable, column: str) -> None:
    table.keep(row_of(), memoryview(IMAGE))
    [(data,)] = table._execute(f"SELECT {column} FROM Pack")
    for length in range(len(data)):
        table._execute(f"UPDATE Pack SET {column} = ?", (data[:length],))
        [(_, row)] = table.rows()
        if row is not None:
            with pytest.raises(DamagedRecord):
                require_whole(row, image_in(table, row))


def test_anything_in_any_column_is_a_row_or_none(table: PackTable) -> None:
    rng = random.Random(0)
    columns = [name for _, name, *_ in table._execute("PRAGMA table_info(Pack)")]
    for _ in range(300):
        table.remove(*[key for key, _ in table.rows()])
        table.keep(row_of(), memoryview(IMAGE))
        strange: list[Any] = ["text", -7, 0, 2.5, 1 << 40, b"", rng.randbytes(rng.randrange(40))]
        column, value = rng.choice(columns), rng.choice(strange)
        table._execute(f"UPDATE Pack SET {column} = ?", (value,))
        for _, row in table.rows():
            assert row is None or row.head.keys(row.layout)


def test_a_pack_under_another_ones_key_is_refused(table: PackTable) -> None:
    """Snapshots of state have the same ids at every position: only their keys tell them apart."""
    table.keep(row_of(), memoryview(IMAGE))
    table._execute("UPDATE Pack SET key = ?", (b"k" * KEY_BYTES,))

    row = table.row(b"k" * KEY_BYTES)

    assert row is not None
    with pytest.raises(DamagedRecord, match="checksum"):
        require_whole(row, image_in(table, row))


@pytest.mark.parametrize("until_s", [math.inf, 12.5])
def test_a_pin_is_read_as_it_was_written(table: PackTable, until_s: float) -> None:
    pin = Pin("a label", (b"k" * KEY_BYTES, b"l" * KEY_BYTES), 1.5, until_s)

    table.pin(pin)

    assert table.pins() == [pin]
    for change in ("label = 'text'", "made_s = 'soon'", "until_s = x'00'", "keys = x'00'"):
        table._execute(f"UPDATE Pin SET {change}")
        assert table.pins() == []


def test_a_table_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / LAYOUT.identity.hex()
    directory.mkdir()
    with sqlite3.connect(directory / "cache.db") as earlier:
        earlier.execute("CREATE TABLE Pack (key BLOB PRIMARY KEY, head BLOB)")
        earlier.execute("PRAGMA user_version = 1")
    earlier.close()

    with pytest.raises(sqlite3.DatabaseError, match="another version of kvchat"):
        PackTable(directory, 1.0)


def test_a_key_says_all_that_came_before() -> None:
    ids = encode_ids([1, 2, 3, 4, 5, 6, 7, 8])
    keys = chain_keys(b"r" * 16, ids, 16)

    assert len({*keys, *chain_keys(b"s" * 16, ids, 16), *chain_keys(b"r" * 16, ids[16:], 16)}) == 5
    assert chain_keys(keys[0], ids[16:], 16) == keys[1:]
    assert chain_keys(b"r" * 16, ids[:-1], 16) == keys[:1]
