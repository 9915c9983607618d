"""Reads what a store holds, for all identities, without a model and without changing anything.

The packs' rows give the shape of the blocks. Reading must not change a table's modification time,
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.model_dirs import DATABASE, file_bytes, last_used, list_model_dirs
from kvchat.cache.disk.pack_rows import PackRow, Pin
from kvchat.cache.disk.payload_files import is_coded, is_pack_file
from kvchat.cache.disk.table import SCHEMA_VERSION, PackRows, is_busy
from kvchat.cache.keys import TOKEN_BYTES, chain_keys, encode_ids, root_key
from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.errors import StoreError
from kvchat.core.stats import StoredPack
from kvchat.core.types import TokenIds

_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ModelDir:
    """The packs of one identity. `trouble` says in a few words why they cannot be read; `is_locked`
    says that another process has locked the table, which is temporary.

    Packs whose rows are damaged are left out; `layout` is that of the others.
    """

    path: Path
    layout: Layout
    packs: tuple[PackRow, ...] = ()
    pins: tuple[Pin, ...] = ()
    trouble: str = ""
    is_locked: bool = False


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
    """Read the rows of a model directory; never raises, whatever is in its place."""
    any_layout = Layout(bytes.fromhex(path.name), 1, 1)
    try:
        with reading(path) as packs:
            rows = [row for _, row in packs.rows() if row is not None] if packs is not None else []
            pins = packs.pins() if packs is not None else []
    except (sqlite3.Error, OSError, StoreError) as error:
        return ModelDir(path, any_layout, trouble=str(error).rstrip("."), is_locked=is_busy(error))
    if not rows:
        return ModelDir(path, any_layout)
    [(layout, _)] = Counter(row.layout for row in rows).most_common(1)
    return ModelDir(
        path,
        layout,
        tuple(row for row in rows if row.layout == layout),
        tuple(pin for pin in pins if pin.until_s > time.time()),
    )


@contextmanager
def reading(model_dir: Path) -> Iterator[PackRows | None]:
    """Open the table of a model directory to read from it; None without one, and for one that is
    not finished, and so has no packs.

    If the table has no log, no process is writing, and SQLite opens it without making a log that
    would remain. A process that starts to write meanwhile can make the table look damaged once.
    """
    table = model_dir / DATABASE
    if not os.path.lexists(table):
        yield None
        return
    # SQLite opens table and log with the first statement, and would wait for a pipe's other end.
    if not model_dirs.has_only_files(model_dir):
        raise StoreError("its table, or its log, is no file")
    mode = "mode=ro" if file_bytes(table.with_name(f"{table.name}-wal")) else "immutable=1"
    uri = f"{table.absolute().as_uri()}?{mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE_S)) as connection:
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        if not version and _is_unfinished(connection, table):
            yield None
            return
        if version != SCHEMA_VERSION:
            raise StoreError(f"{table} is of another version of kvchat.")
        yield PackRows(bytes.fromhex(model_dir.name), connection)


def _is_unfinished(connection: sqlite3.Connection, table: Path) -> bool:
    """Whether a process that makes the table is not done, or ended before it was.

    Only then does SQLite have a journal beside it: a finished table has a log.
    """
    if file_bytes(table.with_name(f"{table.name}-journal")):
        return True
    [(num_tables,)] = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
    return not num_tables


def pack_tree(model_dir: ModelDir, named: Sequence[tuple[str, TokenIds]] = ()) -> list[StoredPack]:
    """Return the packs of a model directory, each after the one it continues, depth first.

    `named` are contexts by their names, which the packs get that hold a part of them.
    """
    layout = model_dir.layout
    names = _names_of_blocks(layout, named)
    owners = {
        key: number
        for number, stored in enumerate(model_dir.packs)
        for key in stored.head.keys(layout)
    }
    children: dict[int | None, list[int]] = {}
    for number, stored in enumerate(model_dir.packs):
        children.setdefault(owners.get(stored.head.parent), []).append(number)
    root = root_key(layout.identity)
    pinned = {key for pin in model_dir.pins for key in pin.keys}
    packs: list[StoredPack] = []
    pending: list[tuple[int | None, int]] = [
        (None, number) for number in _last_first(children, None)
    ]
    while pending:
        parent, number = pending.pop()
        stored = model_dir.packs[number]
        num_blocks = stored.head.num_blocks(layout)
        is_orphan = parent is None and stored.head.parent != root
        pending += [(len(packs), child) for child in _last_first(children, number)]
        packs.append(
            StoredPack(
                parent=parent,
                num_tokens=stored.head.num_tokens(layout),
                num_bytes=num_blocks * layout.block_bytes,
                last_used_s=max(0.0, stored.use.last_s),
                is_orphan=is_orphan,
                is_pinned=not pinned.isdisjoint(stored.head.keys(layout)),
                names=tuple(names.get(stored.key, ())),
            )
        )
    return packs


def saved_bytes(model_dir: Path, pack: PackRow) -> int:
    """Return how much longer a pack's file would be if its payload were not coded."""
    if not is_pack_file(pack.file) or not is_coded(str(pack.file)):
        return 0
    num_bytes = pack.head.num_blocks(pack.layout) * pack.layout.block_bytes
    return max(0, num_bytes - file_bytes(model_dir / str(pack.file)))


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

    Never raises: a pack that cannot be read now is read later, or is a miss.
    """
    encoded = encode_ids(token_ids)
    try:
        for model_dir in stored_model_dirs(directory):
            if packs := _leading(model_dir, encoded, block_size):
                return sum(
                    _read(model_dir / str(pack.file))
                    for pack, _ in packs
                    if is_pack_file(pack.file)
                )
    except (StoreError, OSError, sqlite3.Error) as error:
        _log.info("nothing prefetched: %s", error)
    return 0


def num_stored_blocks(model_dir: Path, encoded: bytes, block_size: int) -> int:
    """Return how many leading blocks of a context of encoded token ids a model directory has.

    KV of a draft model does not count. Never raises: a directory that cannot be looked into, as
    while another process makes it, has nothing.
    """
    try:
        packs = _leading(model_dir, encoded, block_size)
    except (StoreError, OSError, ValueError, sqlite3.Error) as error:
        _log.info("cannot look into %s: %s", model_dir.name, error)
        return 0
    return sum(num_blocks for pack, num_blocks in packs if not pack.head.is_draft)


def _leading(model_dir: Path, encoded: bytes, block_size: int) -> list[tuple[PackRow, int]]:
    """Return the packs that a model directory has of a context, as `PackRows.leading` does."""
    keys = chain_keys(root_key(bytes.fromhex(model_dir.name)), encoded, block_size * TOKEN_BYTES)
    with reading(model_dir) as table:
        packs: list[tuple[PackRow, int]] = []
        with suppress(DamagedRecord):  # the packs before it are whole
            packs.extend(table.leading(keys, encoded, block_size) if table is not None else ())
        return packs


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
