"""What a store holds, of all identities, read without a model and without changing anything.

The packs' heads say what shape they have. Even looking must leave no trace: a table's time of
change is how a generation that nobody uses any more is told. Knows tables and heads.
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvchat.cache import own_directory
from kvchat.cache.block_key import root_key
from kvchat.cache.codec import DamagedRecord, Layout, PackHead, decode_head, layout_of
from kvchat.cache.generations import file_bytes, generations, last_used
from kvchat.cache.own_directory import DATABASE
from kvchat.cache.pin_record import Pin, decode_pin
from kvchat.cache.raw_disk import RawDisk, is_busy
from kvchat.core.errors import StoreError
from kvchat.core.stats import KeptPack

_PATIENCE_S = 1.0
_HEADS = (
    "SELECT substr(key, 2), mode, filename, value, store_time FROM Cache"
    " WHERE key >= x'68' AND key < x'69' ORDER BY rowid"
)
_PINS = _HEADS.replace("x'68'", "x'6e'").replace("x'69'", "x'6f'")


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A pack's name, its head, and when it was last used, in seconds since the epoch."""

    key: bytes
    head: PackHead
    last_used_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The packs of one identity. `trouble` says in a few words why they cannot be read; where
    somebody else has the table all to himself, `is_held`, that passes.

    Heads that are damaged are left out; `layout` is that of the others.
    """

    path: Path
    layout: Layout
    heads: tuple[StoredHead, ...] = ()
    pins: tuple[Pin, ...] = ()
    trouble: str = ""
    is_held: bool = False


def stored_generations(directory: Path) -> list[Path]:
    """Return the generations of a store, the one used last first; none where there is no store.

    Raises StoreError where the directory cannot be read.
    """
    try:
        if directory.is_symlink():
            raise StoreError(f"{directory} is a symbolic link.", "Remove it.")
        with os.scandir(directory):
            return sorted(generations(directory), key=last_used, reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"Cannot use the directory {directory}: {error.strerror}.",
            "Check its permissions or choose another directory.",
        ) from error


def read_generation(path: Path) -> Generation:
    """Read the heads of a generation; never raises, whatever is in its place."""
    any_layout = Layout(bytes.fromhex(path.name), 1, 1)
    table = path / DATABASE
    if not table.exists() and not table.is_symlink():
        return Generation(path, any_layout)
    if not table.is_file() or table.is_symlink():  # to open a pipe would wait for its other end
        return Generation(path, any_layout, trouble="its table is no file")
    try:
        rows, pin_rows = _rows(table, _HEADS), _rows(table, _PINS)
    except (sqlite3.Error, OSError, StoreError) as error:
        return Generation(path, any_layout, trouble=str(error), is_held=is_busy(error))
    heads, layouts = [], Counter[Layout]()
    for key, data, used_s in rows:
        try:
            layout = layout_of(data)
            heads.append((layout, StoredHead(key, decode_head(data, layout), used_s)))
            layouts[layout] += 1
        except DamagedRecord:
            continue
    if not layouts:
        return Generation(path, any_layout)
    [(common, _)] = layouts.most_common(1)
    pins = (decode_pin(data) for _, data, _ in pin_rows)
    return Generation(
        path,
        common,
        tuple(head for layout, head in heads if layout == common),
        tuple(pin for pin in pins if pin is not None),
    )


def _rows(table: Path, query: str) -> list[tuple[bytes, bytes, float]]:
    """Return key, value and last use of every row of a kind."""
    disk = RawDisk(str(table.parent))
    with closing(connection_to(table)) as connection:
        rows = connection.execute(query).fetchall()
    return list(_as_bytes(disk, rows))


def _as_bytes(
    disk: RawDisk, rows: list[tuple[object, ...]]
) -> Iterator[tuple[bytes, bytes, float]]:
    """Give each row the types it should have; a damaged table holds anything."""
    for key, mode, filename, value, used_s in rows:
        if not isinstance(key, bytes) or not isinstance(mode, int):
            continue
        if not isinstance(filename, str | None):
            continue
        try:
            data = bytes(disk.fetch(mode, filename, value, False))
        except OSError:
            continue
        yield key, data, max(0.0, float(used_s) if isinstance(used_s, int | float) else 0.0)


def connection_to(table: Path) -> sqlite3.Connection:
    """Open a table to read from it.

    Without a log nobody is writing: only then may SQLite do without one of its own, which would
    stay there. Whoever begins to write meanwhile can make the table look damaged for this once.
    """
    log = table.with_name(f"{table.name}-wal")
    mode = "mode=ro" if file_bytes(log) else "immutable=1"
    uri = f"{table.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S)
    try:
        # SQLite opens them with the first statement, and would wait for a pipe's other end.
        if not own_directory.has_only_files(table.parent):
            raise StoreError(f"{table}, or its log, is no file.")
        connection.execute("PRAGMA data_version")
    except BaseException:
        connection.close()
        raise
    return connection


def pack_tree(generation: Generation) -> list[KeptPack]:
    """Return the packs of a generation, each after the one it continues, depth first."""
    layout = generation.layout
    owners = {
        key: number
        for number, stored in enumerate(generation.heads)
        for key in stored.head.keys(layout)
    }
    children: dict[int | None, list[int]] = {}
    for number, stored in enumerate(generation.heads):
        children.setdefault(owners.get(stored.head.parent), []).append(number)
    root = root_key(layout.identity)
    pinned = {key for pin in generation.pins for key in pin.keys}
    packs: list[KeptPack] = []
    pending: list[tuple[int | None, int]] = [
        (None, number) for number in _last_first(children, None)
    ]
    while pending:
        parent, number = pending.pop()
        stored = generation.heads[number]
        num_blocks = stored.head.num_blocks(layout)
        is_orphan = parent is None and stored.head.parent != root
        pending += [(len(packs), child) for child in _last_first(children, number)]
        packs.append(
            KeptPack(
                parent=parent,
                num_tokens=num_blocks * layout.block_size,
                num_bytes=num_blocks * layout.block_bytes,
                last_used_s=stored.last_used_s,
                is_orphan=is_orphan,
                is_pinned=not pinned.isdisjoint(stored.head.keys(layout)),
            )
        )
    return packs


def _last_first(children: dict[int | None, list[int]], number: int | None) -> list[int]:
    return children.get(number, [])[::-1]
