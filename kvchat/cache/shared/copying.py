"""Copies whole contexts between the disk and a shared store, without a loaded model.

What the other side has already is not copied again, so a copy that was ended goes on where it was.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from kvchat.cache.disk.inventory import (
    ModelDir,
    num_stored_blocks,
    read_model_dir,
    stored_model_dirs,
)
from kvchat.cache.disk.lookup import KnownModels
from kvchat.cache.disk.pack_rows import Pin
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.planner import RateMemory, from_tier
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.tier import BlockRun, Layout, PackHead, Tier
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.types import Memory, TokenIds


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a context: the tokens that the source has of it and those that the target has.

    num_bytes   what is left to copy, at the end what was copied
    seconds     what that will take, None if that is not known yet; at the end what it took
    """

    num_tokens: int
    num_there: int
    num_bytes: int
    seconds: float | None = None


Tell = Callable[[Copy], bool]


class ContextCopier:
    """Copies contexts of any model between the store in `directory` and a shared one.

    `limit_bytes` is what the directory may hold, and `memory` has what is known of models.
    `open_shared` opens the shared tier of a layout. Raises StoreError where a store cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        memory: Memory,
        open_shared: Callable[[Layout], SharedTier],
    ) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._open_shared = open_shared

    def push(self, name: str, ids: TokenIds | None, goes_on: Tell) -> Copy:
        """Copy what the disk has of a context to the shared store, under a name too.

        Without `ids` it is the context of the pin of that name. `goes_on` is asked before each pack
        with what is left; false ends the copy. Raises UsageError if the disk has nothing of it.
        """
        layout, encoded = self._on_disk(name, ids)
        with self._both(layout) as (disk, shared):
            copied = _copy(disk, shared, layout, encoded, goes_on)
            num_blocks = copied.num_there // layout.block_size
            shared.put_name(name, encoded[: num_blocks * layout.ids_bytes])
            return copied

    def pull(self, name: str, ids: TokenIds | None, model: str, goes_on: Tell) -> Copy:
        """Copy what the shared store has of a context to the disk; as `push`, the other way round.

        Without `ids` it is the context that was pushed under that name. Of the identities that are
        known of a `model`, "" for any, it is the one of which there is most.
        """
        known = KnownModels(self._memory).read()
        layouts = [
            Layout(bytes.fromhex(identity), each.block_size, each.block_bytes)
            for identity, each in reversed(known.items())
            if not each.is_draft and model in ("", each.name)
        ]
        rates = {key: RateMemory(self._memory, each.rates).read() for key, each in known.items()}
        for layout in layouts:
            rate = rates[layout.identity.hex()].get(from_tier("shared"))
            with self._both(layout) as (disk, shared):
                encoded = encode_ids(ids) if ids is not None else shared.named(name)
                if encoded and shared.peek(_keys(layout, encoded), encoded):
                    return _copy(shared, disk, layout, encoded, goes_on, rate)
        raise UsageError(
            f"The shared cache has nothing of {name} for a model that was used here.",
            "`kvchat cache push` puts it there; use its model here once, so that it is known.",
        )

    def _on_disk(self, name: str, ids: TokenIds | None) -> tuple[Layout, bytes]:
        """Return the layout under which the disk has most of a context, and its encoded ids."""
        paths = stored_model_dirs(self._directory)
        if ids is None:
            for path in paths:
                found = read_model_dir(path)
                for pin in found.pins:
                    if pin.label == name:
                        return found.layout, _ids_of(found, pin)
            raise UsageError(f"There is no pin called {name}.", "/pin list shows them.")
        encoded = encode_ids(ids)
        layouts = [read_model_dir(path).layout for path in paths]
        most = [
            num_stored_blocks(path, encoded, layout.block_size) * layout.block_size
            for path, layout in zip(paths, layouts, strict=True)
        ]
        if not any(most):
            raise UsageError(f"Nothing of {name} is on the disk.", "`kvchat cache` shows what is.")
        return layouts[most.index(max(most))], encoded

    @contextmanager
    def _both(self, layout: Layout) -> Iterator[tuple[DiskTier, SharedTier]]:
        disk = DiskTier(self._directory, layout, self._limit_bytes)
        with closing(disk), closing(self._open_shared(layout)) as shared:
            if trouble := shared.trouble:
                raise StoreError(f"The shared cache cannot be used: {trouble}.")
            yield disk, shared


def _ids_of(model_dir: ModelDir, pin: Pin) -> bytes:
    """Return the encoded token ids of a pinned context, as far as its packs are there."""
    layout = model_dir.layout
    ids: dict[bytes, bytes] = {}
    for pack in model_dir.packs:
        for number, key in enumerate(pack.head.keys(layout)):
            ids[key] = pack.head.ids[number * layout.ids_bytes : (number + 1) * layout.ids_bytes]
    return b"".join(ids[key] for key in takewhile(ids.__contains__, pin.keys))


def _copy(
    source: Tier,
    target: Tier,
    layout: Layout,
    encoded: bytes,
    goes_on: Tell,
    rate: float | None = None,
) -> Copy:
    """Copy the packs of a context that the target lacks; return what was copied. `rate` is what is
    known of bytes a second.
    """
    keys = _keys(layout, encoded)
    runs, num_there = source.find(keys, encoded), target.peek(keys, encoded)
    num_found = sum(run.num_blocks for run in runs)
    size, began_s, num_bytes = layout.block_size, time.perf_counter(), 0
    seconds = 0.0
    for run in (run for run in runs if run.end_block > num_there):
        num_left = (num_found - max(run.start_block, num_there)) * layout.block_bytes
        rate = num_bytes / seconds if num_bytes and seconds else rate
        rest_s = num_left / rate if rate else None
        if not goes_on(Copy(num_found * size, num_there * size, num_left, rest_s)):
            break
        num_bytes += _copy_run(source, target, layout, encoded, run, num_there)
        num_there, seconds = run.end_block, time.perf_counter() - began_s
    return Copy(num_found * size, num_there * size, num_bytes, seconds)


def _copy_run(
    source: Tier, target: Tier, layout: Layout, encoded: bytes, run: BlockRun, num_there: int
) -> int:
    """Copy a pack without the blocks that are there; return its bytes."""
    start, keys = max(run.start_block, num_there), _keys(layout, encoded)
    image = source.read(run)
    assert not isinstance(image, torch.Tensor)
    view = memoryview(image)[(start - run.start_block) * layout.block_bytes :].cast("B")
    parent = keys[start - 1] if start else root_key(layout.identity)
    ids = encoded[start * layout.ids_bytes : run.end_block * layout.ids_bytes]
    if not target.write(PackHead(parent, ids, fingerprint=run.fingerprint), view):
        raise StoreError(target.status().trouble or "It could not be written.")
    return len(view)


def _keys(layout: Layout, encoded: bytes) -> list[bytes]:
    return chain_keys(root_key(layout.identity), encoded, layout.ids_bytes)
