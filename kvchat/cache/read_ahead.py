"""Reading ahead: a conversation's packs come into the page cache while the weights still load.

Whose KV will be wanted is only known for certain when the model is there; of the generations that
have the context, the one used last is the likeliest, and a wrong guess costs reading. Knows tables
and files; holds nothing, changes nothing, and leaves no trace.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvchat.cache.block_key import chain_keys, root_key
from kvchat.cache.codec import DamagedRecord, Layout, PackHead, decode_head, layout_of
from kvchat.cache.inventory import connection_to, stored_generations
from kvchat.cache.own_directory import DATABASE
from kvchat.cache.pack_table import HEAD, PAYLOAD
from kvchat.cache.radix_node import TOKEN_BYTES, pack
from kvchat.cache.raw_disk import RawDisk, is_pack_file
from kvchat.core.errors import StoreError
from kvchat.core.types import TokenIds

_CHUNK_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def read_ahead(directory: Path, token_ids: TokenIds, block_size: int) -> int:
    """Bring what a store has of a context into the page cache; return how many bytes that are.

    Never raises: what cannot be read now is read later, or is a miss.
    """
    packed = pack(token_ids)
    try:
        for generation in stored_generations(directory):
            packs = list(_packs(generation, packed, block_size))
            if packs:
                return sum(_read(file) for _, file in packs if file is not None)
    except (StoreError, OSError, sqlite3.Error) as error:
        _log.info("nothing read ahead: %s", error)
    return 0


def holds_answers(generation: Path, packed: bytes, block_size: int) -> bool:
    """Whether a generation has the beginning of a context of packed token ids, stored by a model
    that answered. KV of a draft model does not count.

    Never raises: one that cannot be looked into, as while another process makes it, has nothing.
    """
    try:
        return any(not head.is_draft for head, _ in _packs(generation, packed, block_size))
    except (StoreError, OSError, ValueError, sqlite3.Error) as error:
        _log.info("cannot look into %s: %s", generation.name, error)
        return False


def _packs(
    generation: Path, packed: bytes, block_size: int
) -> Iterator[tuple[PackHead, Path | None]]:
    """Yield the packs that a generation has of a context, in order: head and file, if any."""
    table = generation / DATABASE
    if not table.is_file() or table.is_symlink():
        return
    root = root_key(bytes.fromhex(generation.name))
    keys = chain_keys(root, packed, block_size * TOKEN_BYTES)
    disk = RawDisk(str(generation))
    with closing(connection_to(table)) as connection:
        block = 0
        while block < len(keys):
            found = _head(connection, disk, keys[block])
            shared = found[0].num_shared(packed, block, found[1]) if found is not None else 0
            if found is None or not shared:
                return
            row = _row(connection, PAYLOAD + keys[block])
            is_file = row is not None and is_pack_file(row[1])
            yield found[0], generation / str(row[1]) if row is not None and is_file else None
            block += shared


def _head(
    connection: sqlite3.Connection, disk: RawDisk, key: bytes
) -> tuple[PackHead, Layout] | None:
    row = _row(connection, HEAD + key)
    if row is None:
        return None
    try:
        data = bytes(disk.fetch(row[0], row[1], row[2], False))
        layout = layout_of(data)
        return decode_head(data, layout), layout
    except (DamagedRecord, TypeError):
        return None


def _row(connection: sqlite3.Connection, key: bytes) -> tuple[Any, ...] | None:
    query = "SELECT mode, filename, value FROM Cache WHERE key = ? AND raw = 1"
    row: tuple[Any, ...] | None = connection.execute(query, (sqlite3.Binary(key),)).fetchone()
    return row


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
