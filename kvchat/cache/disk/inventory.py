"""Reads what a store holds, for all identities, without a model and without changing anything.

The packs' heads give the shape of the blocks. Reading must not change a table's modification time,
because that time tells when a directory was last used.

`prefetch_pages` reads a conversation's packs into the page cache while the weights load. The
identity is not known yet, so it takes the identity used last of those that have the context. A
wrong guess costs only the reading.
"""

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.format import Pin, decode_head, decode_pin, layout_of
from kvchat.cache.disk.model_dirs import DATABASE, file_bytes, last_used, list_model_dirs
from kvchat.cache.disk.table import SCHEMA_VERSION, bytes_of, is_busy, is_pack_file
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids, root_key
from kvchat.cache.tier import DamagedRecord, Layout, PackHead
from kvchat.core.errors import StoreError
from kvchat.core.stats import KeptPack
from kvchat.core.types import TokenIds

_PATIENCE_S = 1.0
_HEADS = "SELECT key, head, last_s FROM Pack ORDER BY rowid"
_PACK = "SELECT head, file FROM Pack WHERE key = ?"
_PINS = "SELECT record FROM Pin ORDER BY rowid"


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A pack's name, its head, and when it was last used, in seconds since the epoch."""

    key: bytes
    head: PackHead
    last_used_s: float


@dataclass(frozen=True, slots=True)
class ModelDir:
    """The packs of one identity. `trouble` says in a few words why they cannot be read; `is_held`
    says that another process has locked the table, which is temporary.

    Heads that are damaged are left out; `layout` is that of the others.
    """

    path: Path
    layout: Layout
    heads: tuple[StoredHead, ...] = ()
    pins: tuple[Pin, ...] = ()
    trouble: str = ""
    is_held: bool = False


def stored_model_dirs(directory: Path) -> list[Path]:
    """Return the model directories of a store, the one used last first; none where there is no
    store.

    Raises StoreError where the directory cannot be read.
    """
    try:
        if directory.is_symlink():
            raise StoreError(f"{directory} is a symbolic link.", "Remove it.")
        with os.scandir(directory):
            return sorted(list_model_dirs(directory), key=last_used, reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(
            f"Cannot use the directory {directory}: {error.strerror}.",
            "Check its permissions or choose another directory.",
        ) from error


def read_model_dir(path: Path) -> ModelDir:
    """Read the heads of a model directory; never raises, whatever is in its place."""
    any_layout = Layout(bytes.fromhex(path.name), 1, 1)
    table = path / DATABASE
    if not table.exists() and not table.is_symlink():
        return ModelDir(path, any_layout)
    if not table.is_file() or table.is_symlink():  # to open a pipe would wait for its other end
        return ModelDir(path, any_layout, trouble="its table is no file")
    try:
        if (opened := connection_to(table)) is None:
            return ModelDir(path, any_layout)
        with closing(opened) as connection:
            rows = connection.execute(_HEADS).fetchall()
            records = connection.execute(_PINS).fetchall()
    except (sqlite3.Error, OSError, StoreError) as error:
        return ModelDir(path, any_layout, trouble=str(error).rstrip("."), is_held=is_busy(error))
    heads, layouts = [], Counter[Layout]()
    for key, stored, used in rows:
        data, used_s = bytes_of(stored), used if isinstance(used, int | float) else 0.0
        try:
            layout = layout_of(data)
            head = StoredHead(bytes_of(key), decode_head(data, layout), max(0.0, used_s))
            heads.append((layout, head))
            layouts[layout] += 1
        except DamagedRecord:
            continue
    if not layouts:
        return ModelDir(path, any_layout)
    [(common, _)] = layouts.most_common(1)
    pins = (decode_pin(bytes_of(record)) for (record,) in records)
    return ModelDir(
        path,
        common,
        tuple(head for layout, head in heads if layout == common),
        tuple(pin for pin in pins if pin is not None and pin.until_s > time.time()),
    )


def connection_to(table: Path) -> sqlite3.Connection | None:
    """Open a table to read from it; None for one that is not finished, and so has no packs.

    If the table has no log, no process is writing, and SQLite opens it without making a log that
    would remain. A process that starts to write meanwhile can make the table look damaged once.
    """
    log = table.with_name(f"{table.name}-wal")
    mode = "mode=ro" if file_bytes(log) else "immutable=1"
    uri = f"{table.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S)
    try:
        # SQLite opens them with the first statement, and would wait for a pipe's other end.
        if not model_dirs.has_only_files(table.parent):
            raise StoreError(f"{table}, or its log, is no file.")
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        if not version and _is_unfinished(connection, table):
            connection.close()
            return None
        if version != SCHEMA_VERSION:
            raise StoreError(f"{table} is of another version of kvchat.")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_unfinished(connection: sqlite3.Connection, table: Path) -> bool:
    """Whether a process that makes the table is not done, or ended before it was.

    Only then does SQLite have a journal beside it: a finished table has a log.
    """
    if file_bytes(table.with_name(f"{table.name}-journal")):
        return True
    [(num_tables,)] = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
    return not num_tables


def pack_tree(model_dir: ModelDir, named: Sequence[tuple[str, TokenIds]] = ()) -> list[KeptPack]:
    """Return the packs of a model directory, each after the one it continues, depth first.

    `named` are contexts by their names, which the packs get that hold a part of them.
    """
    layout = model_dir.layout
    names = _names_of_blocks(layout, named)
    owners = {
        key: number
        for number, stored in enumerate(model_dir.heads)
        for key in stored.head.keys(layout)
    }
    children: dict[int | None, list[int]] = {}
    for number, stored in enumerate(model_dir.heads):
        children.setdefault(owners.get(stored.head.parent), []).append(number)
    root = root_key(layout.identity)
    pinned = {key for pin in model_dir.pins for key in pin.keys}
    packs: list[KeptPack] = []
    pending: list[tuple[int | None, int]] = [
        (None, number) for number in _last_first(children, None)
    ]
    while pending:
        parent, number = pending.pop()
        stored = model_dir.heads[number]
        num_blocks = stored.head.num_blocks(layout)
        is_orphan = parent is None and stored.head.parent != root
        pending += [(len(packs), child) for child in _last_first(children, number)]
        packs.append(
            KeptPack(
                parent=parent,
                num_tokens=stored.head.num_tokens(layout),
                num_bytes=num_blocks * layout.block_bytes,
                last_used_s=stored.last_used_s,
                is_orphan=is_orphan,
                is_pinned=not pinned.isdisjoint(stored.head.keys(layout)),
                names=tuple(names.get(stored.key, ())),
            )
        )
    return packs


def _names_of_blocks(
    layout: Layout, named: Sequence[tuple[str, TokenIds]]
) -> dict[bytes, list[str]]:
    """Return the names of the contexts that have a block, by the block's key."""
    names: dict[bytes, list[str]] = {}
    root = root_key(layout.identity)
    for name, token_ids in named:
        for key in chain_keys(root, encode_ids(token_ids), layout.ids_bytes):
            known = names.setdefault(key, [])
            if name not in known:
                known.append(name)
    return names


def _last_first(children: dict[int | None, list[int]], number: int | None) -> list[int]:
    return children.get(number, [])[::-1]


_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def prefetch_pages(directory: Path, token_ids: TokenIds, block_size: int) -> int:
    """Read a context's stored packs into the page cache; return how many bytes that are.

    Never raises: what cannot be read now is read later, or is a miss.
    """
    encoded = encode_ids(token_ids)
    try:
        for model_dir in stored_model_dirs(directory):
            packs = list(_packs(model_dir, encoded, block_size))
            if packs:
                return sum(_read(file) for _, file in packs if file is not None)
    except (StoreError, OSError, sqlite3.Error) as error:
        _log.info("nothing prefetched: %s", error)
    return 0


def holds_answers(model_dir: Path, encoded: bytes, block_size: int) -> bool:
    """Whether a model directory has the beginning of a context of encoded token ids, stored by a
    model that answered. KV of a draft model does not count.

    Never raises: one that cannot be looked into, as while another process makes it, has nothing.
    """
    try:
        return any(not head.is_draft for head, _ in _packs(model_dir, encoded, block_size))
    except (StoreError, OSError, ValueError, sqlite3.Error) as error:
        _log.info("cannot look into %s: %s", model_dir.name, error)
        return False


def num_kept_blocks(model_dir: Path, encoded: bytes, block_size: int) -> int:
    """Return how many leading blocks of a context of encoded token ids a model directory has.

    KV of a draft model does not count. Raises what SQLite and the file system raise.
    """
    heads = [head for head, _ in _packs(model_dir, encoded, block_size) if not head.is_draft]
    num_blocks, size = 0, block_size * TOKEN_BYTES
    for head in heads:
        layout = Layout(bytes.fromhex(model_dir.name), block_size, 1)
        num_blocks += head.num_shared(encoded, num_blocks, layout)
    return min(num_blocks, len(encoded) // size)


def _packs(
    model_dir: Path, encoded: bytes, block_size: int
) -> Iterator[tuple[PackHead, Path | None]]:
    """Yield the packs that a model directory has of a context, in order: head and file, if any."""
    table = model_dir / DATABASE
    if not table.is_file() or table.is_symlink():
        return
    root = root_key(bytes.fromhex(model_dir.name))
    keys = chain_keys(root, encoded, block_size * TOKEN_BYTES)
    if (opened := connection_to(table)) is None:
        return
    with closing(opened) as connection:
        block = 0
        while block < len(keys):
            row = connection.execute(_PACK, (keys[block],)).fetchone()
            if row is None:
                return
            data, file = bytes_of(row[0]), row[1]
            try:
                layout = layout_of(data)
                head = decode_head(data, layout)
            except DamagedRecord:
                return
            shared = head.num_shared(encoded, block, layout)
            if not shared:
                return
            yield head, model_dir / file if is_pack_file(file) else None
            block += shared


def _read(file: Path) -> int:
    """Have the kernel read a file, or read it where the kernel cannot be asked to."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)
            else:
                while os.read(descriptor, _CHUNK_BYTES):
                    pass
            return size
        finally:
            os.close(descriptor)
    return 0
