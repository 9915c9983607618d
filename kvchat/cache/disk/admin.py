"""StoreAdmin: status, verify, gc, unpin, forget and clear of a store, without loading a model.

It works on all identities; other processes may use the store meanwhile. A DiskTier makes all
changes inside a model directory, except `clear`.
"""

import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from kvchat.cache.disk.db import LOCK_NAME, StoreBusy, StoreLock, StoreLocked
from kvchat.cache.disk.inventory import (
    ModelDir,
    pack_tree,
    read_model_dir,
    saved_bytes,
    stored_model_dirs,
)
from kvchat.cache.disk.lookup import KnownModel, KnownModels, KvSettings, StoreLookup
from kvchat.cache.disk.model_dirs import (
    DATABASE,
    drop,
    last_used,
    mark_name,
    set_last_used,
    sizes,
    strangers,
    tree_bytes,
)
from kvchat.cache.disk.quota import disk_budget, why_nothing_fits
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.disk.weight_files import WeightFiles, weight_directory
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.cache.tier import Layout
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.paths import open_private
from kvchat.core.stats import (
    ModelDirStatus,
    StoredPack,
    StoredPin,
    StoreStatus,
    TierStatus,
    Verified,
)
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, Memory, TokenIds
from kvchat_kernels.cpu.object_cache import object_cache

T = TypeVar("T")

_NO_LIMIT = 1 << 62
_LOCK_PATIENCE_S = 5.0
_CLEARED_NAME = "kvchat.cleared"


class ForgetfulStore(Protocol):
    """What forgets contexts of one layout in a store of other machines too."""

    @property
    def trouble(self) -> str:
        """Why it could not, in a few words; "" if it could."""

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> object:
        """Forget blocks, as `Tier.forget` does."""

    def forget_names(self, names: Iterable[str]) -> None:
        """Forget which contexts have these names."""

    def close(self) -> None:
        """Close it."""


class StoreAdmin(StoreLookup):
    """Administers the store in `directory`, which need not exist and is never made.

    `size` is what the user allows it to hold, None the default. `memory` has what is known of its
    models. `locate` and `why` look for KV of the `settings`, by default the defaults. `forget` has
    what `open_shared` opens for a layout forget too. Everything
    raises StoreError where the directory cannot be used, and where an identity's part of it cannot
    once all others are done. May be used from any thread.
    """

    def __init__(
        self,
        directory: Path,
        size: Size | None = None,
        memory: Memory = NO_MEMORY,
        settings: KvSettings | None = None,
        open_shared: Callable[[Layout], ForgetfulStore] | None = None,
    ) -> None:
        super().__init__(directory, memory, settings or KvSettings())
        self._size = size
        self._open_shared = open_shared

    def status(self) -> StoreStatus:
        """Return what the store holds. Reads all rows, changes nothing."""
        known = KnownModels(self._memory).read()
        paths = stored_model_dirs(self.directory)
        found = [_status_of(read_model_dir(path), known) for path in paths]
        limit = self._limit_bytes
        why_nothing = why_nothing_fits(self._size, self.directory) if not limit else ""
        return StoreStatus(
            self.directory,
            limit,
            tuple(found),
            tuple(strangers(self.directory)),
            why_nothing,
            self._weights(limit).num_bytes(),
            object_cache().num_bytes(),
        )

    def _weights(self, limit: int) -> WeightFiles:
        return WeightFiles(weight_directory(self.directory), limit)

    def num_bytes(self) -> int:
        """Return the bytes that the store takes at most: as `status` does, but quicker."""
        return sum(map(_bytes_in, stored_model_dirs(self.directory)))

    def tree(
        self, named: Sequence[tuple[str, TokenIds]] = ()
    ) -> list[tuple[ModelDirStatus, list[StoredPack]]]:
        """Return every model directory and its packs, each after the one it continues.

        `named` are contexts, by the names that their packs get.
        """
        known = KnownModels(self._memory).read()
        found = [read_model_dir(path) for path in stored_model_dirs(self.directory)]
        return [(_status_of(each, known), pack_tree(each, named)) for each in found]

    def verify(self, goes_on: Callable[[], bool] = lambda: True) -> Verified:
        """Read every pack and remove damaged ones. Ends early once `goes_on` returns false."""
        found = self._in_each(lambda path: self._verify_in(path, goes_on))
        return Verified(
            num_sound=sum(each.num_sound for each in found),
            num_damaged=sum(each.num_damaged for each in found),
            num_tables=sum(each.num_tables for each in found),
        )

    def _verify_in(self, path: Path, goes_on: Callable[[], bool]) -> Verified:
        if not goes_on():
            return Verified()
        # No limit and no expiry: verifying must not evict packs.
        with self._opened(path, _NO_LIMIT, lambda: -math.inf) as (tier, _):
            sound, damaged = tier.verify(goes_on)
            trouble = tier.status().trouble
        if not (sound or damaged or tier.is_begun_anew):
            _require_no(trouble)
        return Verified(sound, damaged, int(tier.is_begun_anew))

    def gc(self) -> int:
        """Remove expired packs and payloads without a head, and enforce the limit.

        On packed weights too. Returns the number of bytes freed.
        """
        before, freed = self.num_bytes(), self._weights(self._limit_bytes).collect()
        self._in_each(self._collect_in)
        return freed + max(0, before - self.num_bytes())

    def _collect_in(self, path: Path) -> None:
        if not path.is_dir():  # it was too old, and went when the first was opened
            return
        with self._opened(path, self._limit_bytes, time.time) as (tier, _):
            tier.gc()
            status = tier.status()
        if not tier.is_begun_anew and not status.num_damaged:
            _require_no(status.trouble)

    def unpin(self, label: str) -> int:
        """Remove the pins of a label; return how many there were, one for each identity."""
        return sum(self._in_each(lambda path: self._unpin_in(path, label)))

    def _unpin_in(self, path: Path, label: str) -> int:
        with self._opened(path, _NO_LIMIT, lambda: -math.inf) as (tier, found):
            tier.unpin(label)
        return sum(pin.label == label for pin in found.pins)

    def forget(
        self,
        contexts: Iterable[Sequence[int]],
        shared: Iterable[Sequence[int]],
        labels: Collection[str] = (),
    ) -> int:
        """Remove the KV of contexts, given by their token ids, except what is `shared` with others.

        Of all identities. Pins of these labels go first; what other pins hold stays. Returns how
        many blocks went.
        """
        encoded, others = [encode_ids(ids) for ids in contexts], [encode_ids(ids) for ids in shared]
        return sum(self._in_each(lambda path: self._forget_in(path, encoded, others, labels)))

    def _forget_in(
        self, path: Path, encoded: list[bytes], others: list[bytes], labels: Collection[str]
    ) -> int:
        """Forget contexts of one identity, except what `others` share; return how many blocks."""
        with self._opened(path, _NO_LIMIT, lambda: -math.inf) as (tier, model_dir):
            layout = model_dir.layout
            stays = _keys(layout, others)
            stays.update(key for p in model_dir.pins if p.label not in labels for key in p.keys)
            for label in labels:
                tier.unpin(label)
            gone = _keys(layout, encoded)
            gone.update(_continued(model_dir, encoded))
            num_blocks = tier.forget(gone - stays)
            self._forget_shared(layout, gone - stays, gone & stays, labels)
            left = read_model_dir(path)
        if model_dir.trouble and not tier.is_begun_anew:
            error = StoreLocked if model_dir.is_locked else StoreError
            raise error(f"{path} cannot be read: {model_dir.trouble}.")
        if left.packs and left.layout != model_dir.layout:
            raise _busy()  # it was empty when its packs' shape was looked for
        return num_blocks

    def _forget_shared(
        self, layout: Layout, gone: set[bytes], stays: set[bytes], labels: Collection[str]
    ) -> None:
        """Have a shared store forget blocks too, beside those that stay, and names of contexts."""
        if self._open_shared is None or not (gone or labels):
            return
        try:
            opened = self._open_shared(layout)
        except UsageError as error:  # what the disk has is gone all the same
            raise StoreError(error.message, error.hint) from error
        with closing(opened) as shared:
            shared.forget([*gone], [*stays])
            shared.forget_names(labels)
            if shared.trouble:
                raise StoreError(
                    f"The shared cache cannot be used: {shared.trouble}.",
                    "What it still has is believed here no more, and nowhere after 30 days.",
                )

    def clear(self) -> int:
        """Delete all packs of all identities and all packed weights; return the bytes freed."""
        freed = self._weights(0).clear()
        found = stored_model_dirs(self.directory)
        if not found:
            return freed
        lock = StoreLock(self.directory / LOCK_NAME, _LOCK_PATIENCE_S)
        with lock.hold(), self._looking():
            before = _files(found)
            num_bytes = sum(drop(path) for path in found)
            after = _files(found)
            self._mark_cleared()
        # A file that another process has made meanwhile is not among those to delete.
        if before & after:
            raise StoreError(f"Not all of {self.directory} can be deleted.", "Check who owns it.")
        return freed + num_bytes

    def cleared_s(self) -> float:
        """Return when the store was cleared last, in seconds since the epoch; 0 if never."""
        with suppress(OSError):
            return (self.directory / _CLEARED_NAME).lstat().st_mtime
        return 0.0

    def _mark_cleared(self) -> None:
        """Leave an empty file, whose time says when: so that later misses have their reason."""
        with suppress(StoreError):
            path = self.directory / _CLEARED_NAME
            os.close(open_private(path, os.O_WRONLY | os.O_CREAT))
            os.utime(path, follow_symlinks=False)

    def _in_each(self, deed: Callable[[Path], T]) -> list[T]:
        """Run `deed` in every model directory; return the results.

        If one directory cannot be used, the others are still processed; then the last error is
        raised.
        """
        outcomes, failure = [], None
        for path in stored_model_dirs(self.directory):
            try:
                outcomes.append(deed(path))
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure
        return outcomes

    @property
    def _limit_bytes(self) -> int:
        with self._looking():
            return disk_budget(self._size, self.directory)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Raise StoreError where the directory cannot be read."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"Cannot use the directory {self.directory}: {error.strerror}."
            ) from error

    @contextmanager
    def _opened(
        self, path: Path, limit_bytes: int, clock: Callable[[], float]
    ) -> Iterator[tuple[DiskTier, ModelDir]]:
        """Open a model directory as it was read, without that counting as a use of it; yields both.

        Raises StoreError where something was not done because others held the store.
        """
        with self._looking():
            used_s = last_used(path)
        found = read_model_dir(path)
        try:
            tier = DiskTier(self.directory, found.layout, limit_bytes, clock=clock)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"Cannot use {path}: {error}.") from error
        held_up = tier.status().num_held_up
        try:
            yield tier, found
            _require_done(tier.status(), held_up)
        finally:
            tier.close()
            # A log remains only if another process has the table open.
            if used_s and not (path / f"{DATABASE}-wal").exists():
                set_last_used(path, used_s)


def _status_of(model_dir: ModelDir, known: Mapping[str, KnownModel]) -> ModelDirStatus:
    layout = model_dir.layout
    model = known.get(model_dir.path.name)
    heads = [stored.head for stored in model_dir.packs]
    of_state = {key for head in heads if not head.num_tokens(layout) for key in head.keys(layout)}
    return ModelDirStatus(
        identity=model_dir.path.name,
        num_packs=len(model_dir.packs),
        num_tokens=sum(head.num_tokens(layout) for head in heads),
        num_bytes=_bytes_in(model_dir.path),
        last_used_s=_last_used(model_dir.path),
        trouble=model_dir.trouble,
        pins=tuple(
            StoredPin(
                pin.label,
                len(set(pin.keys) - of_state) * layout.block_size,
                pin.made_s,
                pin.until_s,
            )
            for pin in model_dir.pins
        ),
        model=model.name if model is not None else "",
        kv_dtype=model.kv_dtype if model is not None else "",
        dtype=model.dtype if model is not None else "",
        weights=model.weights if model is not None else "",
        block_size=model.block_size if model is not None else 0,
        saved_bytes=sum(saved_bytes(model_dir.path, row) for row in model_dir.packs),
    )


def _bytes_in(path: Path) -> int:
    """Return the bytes that a model directory takes, 0 if it cannot be read."""
    with suppress(OSError):
        return tree_bytes(path)
    return 0


def _last_used(path: Path) -> float:
    with suppress(OSError):
        return last_used(path)
    return 0.0


def _keys(layout: Layout, contexts: Iterable[bytes]) -> set[bytes]:
    """Return the chain keys of all full blocks of contexts."""
    return {key for encoded in contexts for key in _chain(layout, encoded)}


def _chain(layout: Layout, encoded: bytes) -> list[bytes]:
    return chain_keys(root_key(layout.identity), encoded, layout.ids_bytes)


def _continued(model_dir: ModelDir, contexts: Iterable[bytes]) -> set[bytes]:
    """Return the keys of blocks that begin with the incomplete last block of contexts.

    Such a block has a token more than a context is known to have, as a killed process leaves it.
    """
    layout = model_dir.layout
    ends: dict[bytes, list[bytes]] = {}
    for encoded in contexts:
        if end := encoded[len(encoded) // layout.ids_bytes * layout.ids_bytes :]:
            keys = [root_key(layout.identity), *_chain(layout, encoded)]
            ends.setdefault(keys[-1], []).append(end)
    found = set()
    for stored in model_dir.packs:
        keys = stored.head.keys(layout)
        for number, (before, key) in enumerate(
            zip([stored.head.parent, *keys], keys, strict=False)
        ):
            start = number * layout.ids_bytes
            if any(stored.head.ids.startswith(end, start) for end in ends.get(before, ())):
                found.add(key)
    return found


def _files(directories: list[Path]) -> set[tuple[str, int, int, int]]:
    """Return what tells each file of ours in the directories from any other, of the same name
    too. Their marks are not among them: where others have put files, the directory stays ours.
    """
    found = set()
    for path in directories:
        for name in sizes(path).keys() - {mark_name(path)}:
            with suppress(OSError):
                info = (path / name).lstat()
                found.add((f"{path}/{name}", info.st_ino, info.st_size, info.st_mtime_ns))
    return found


def _require_done(status: TierStatus, num_held_up_before: int) -> None:
    if status.num_held_up > num_held_up_before:
        raise StoreLocked(_sentence(status.trouble)) if status.trouble else _busy()


def _busy() -> StoreBusy:
    return StoreBusy("Other processes are busy with the disk cache.", "Try again in a moment.")


def _require_no(trouble: str) -> None:
    if trouble:
        raise StoreError(_sentence(trouble))


def _sentence(trouble: str) -> str:
    return trouble[:1].upper() + trouble[1:]
