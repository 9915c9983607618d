"""SharedTier: packs of KV in a store that several machines reach.

The store is not trusted, and it may be slow or gone. A record that does not open with the team's
key, under its own name, is a miss; so is one that is expired or was forgotten here. After a failure
the store is left alone for a time.
"""

import hashlib
import logging
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvchat.cache.breaker import Breaker
from kvchat.cache.device_copies import PACK_BYTES
from kvchat.cache.disk.pack_rows import checksum_of
from kvchat.cache.keys import KEY_BYTES, root_key
from kvchat.cache.page_memory import ReadBuffers
from kvchat.cache.planner import averaged
from kvchat.cache.shared.record import RecordHead
from kvchat.cache.shared.store import SharedStore, StoreTrouble
from kvchat.cache.shared.team_key import SEAL_BYTES, TeamKey
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import (
    BlockRun,
    BusyRecord,
    DamagedRecord,
    GoneRecord,
    Layout,
    PackHead,
    Tier,
)
from kvchat.core.stats import TierStatus

T = TypeVar("T")

_log = logging.getLogger(__name__)

_HEAD, _PAYLOAD, _NAME = b"head", b"kv", b"name"
# When a name was given, in seconds since the epoch, before the token ids.
_WRITTEN = struct.Struct("<d")
# Clocks of machines may differ by so much, in seconds.
_CLOCKS_S = 300.0
# Heads of the records found last, to read their payloads without asking again.
_MOST_HEADS = 1 << 14
# Buffers for images that were read and are not yet on the device.
_MAX_BUFFERS, _WARM_BUFFERS = 8, 4


class SharedTier(Tier):
    """The packs of one layout in `store`, sealed with `key`, each for `ttl_s` seconds.

    `clock` returns seconds since the epoch, `timer` seconds. One thread uses a tier; any thread may
    read `latency_s` and the status.
    """

    def __init__(
        self,
        store: SharedStore,
        key: TeamKey,
        layout: Layout,
        ttl_s: int,
        tombstones: Tombstones,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        breaker: Breaker | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._layout = layout
        self._group = layout.identity.hex()
        self._ttl_s = ttl_s
        self._tombstones = tombstones
        self._clock = clock
        self._timer = timer
        self._breaker = breaker or Breaker()
        self._root = root_key(layout.identity)
        self._heads: dict[bytes, RecordHead] = {}
        self._buffers = ReadBuffers(_MAX_BUFFERS)
        self._buffers.warm(max(PACK_BYTES, layout.block_bytes), _WARM_BUFFERS)
        self._wrong: set[bytes] = set()
        self._round_trip_s: float | None = None
        self._status = TierStatus(root=self._root.hex())
        self._try(self._store.ping, is_round_trip=True)

    @property
    def root(self) -> bytes:
        return self._root

    @property
    def latency_s(self) -> float:
        """Seconds of a round trip; infinity while the store cannot be reached."""
        if self._breaker.has_failed or self._round_trip_s is None:
            return math.inf
        return self._round_trip_s

    # Finding and reading

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Return the packs that hold a prompt's leading blocks, in order and without a gap.

        One round trip asks for the heads of all records that may be among them.
        """
        if not keys or self._breaker.is_resting:
            return []
        sealed = self._heads_of(keys)
        runs: list[BlockRun] = []
        block = 0
        while block < len(keys):
            head = self._opened(keys[block], sealed.get(self._key.name(keys[block])))
            shared = head.pack.num_shared(encoded, block, self._layout) if head is not None else 0
            if head is None or not shared:
                break
            pack = head.pack
            is_whole = shared == pack.num_blocks(self._layout)
            fingerprint = pack.fingerprint if is_whole else None
            runs.append(BlockRun(keys[block], block, shared, pack.checksum, fingerprint))
            block += shared
        return runs

    def _heads_of(self, keys: Sequence[bytes]) -> Mapping[str, bytes]:
        names = [self._key.name(key) for key in keys]
        return self._try(lambda: self._store.heads(self._group, names), is_round_trip=True) or {}

    def _opened(self, key: bytes, sealed: bytes | None) -> RecordHead | None:
        """Open and remember a head; None if there is none, or it is not to be used."""
        if sealed is None or key in self._wrong:
            return None
        try:
            head = RecordHead.of(self._key.open(_HEAD, key, sealed), self._layout)
            self._require_current(key, head.written_s)
            if head.pack.keys(self._layout)[0] != key:
                raise DamagedRecord("of another place")
        except DamagedRecord as damage:
            self._note_damage(damage)
            return None
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        self._heads[key] = head
        return head

    def _require_current(self, key: bytes, written_s: float) -> None:
        """Raise DamagedRecord for a record that is expired, from the future or forgotten here."""
        now_s = self._clock()
        if not now_s - self._ttl_s - _CLOCKS_S < written_s < now_s + _CLOCKS_S:
            raise DamagedRecord("expired")
        if self._tombstones.forgot_after(self._key.name(key), written_s):
            raise DamagedRecord("forgotten here")

    def _note_damage(self, damage: DamagedRecord) -> None:
        _log.warning("shared record refused: %s", damage)
        self._count(num_damaged=1)
        self._say(f"a record of the shared cache was refused ({damage}).")

    def read(self, run: BlockRun) -> memoryview:
        """Return the images of the blocks found, verified. Raises DamagedRecord, GoneRecord if the
        record was removed or replaced since, BusyRecord if the store does not answer.
        """
        head = self._heads.get(run.key)
        if head is None or head.pack.checksum != run.checksum:
            raise GoneRecord("gone")
        num_bytes = head.pack.num_blocks(self._layout) * self._layout.block_bytes
        name, most = self._key.name(run.key), num_bytes + SEAL_BYTES
        sealed = self._ask(lambda: self._store.payload(self._group, name, most))
        if sealed is None:
            self._heads.pop(run.key, None)
            raise GoneRecord("gone")
        try:
            image = self._key.open(_PAYLOAD, run.key, sealed, self._buffers.take)
            if len(image) != num_bytes:
                raise DamagedRecord("truncated")
            if checksum_of(run.key, head.pack, image) != head.pack.checksum:
                raise DamagedRecord("checksum")
        except DamagedRecord as damage:
            self._note_damage(damage)
            raise
        self._count(bytes_read=len(image))
        return image[: run.num_blocks * self._layout.block_bytes]

    # Writing and removing

    def write(self, head: PackHead, image: memoryview, is_one_shot: bool = False) -> bool:
        """Store a pack; false, with the reason in the status, if that is not possible now."""
        key = head.keys(self._layout)[0]
        whole = replace(head, checksum=checksum_of(key, head, image))
        record = RecordHead(whole, self._clock())
        payload = self._key.seal(_PAYLOAD, key, image)
        sealed, name = self._key.seal(_HEAD, key, record.encoded()), self._key.name(key)
        try:
            self._ask(lambda: self._store.put(self._group, name, sealed, payload, self._ttl_s))
        except BusyRecord:
            self._count(num_failed_writes=1)
            return False
        self._count(bytes_written=len(image))
        return True

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> None:
        """Remove these blocks, and the records that have them beside blocks `before`, which stay.

        What the store returns of them later is not believed, until it would have expired.
        """
        gone = set(keys)
        found = self._heads_of(before) if before else {}
        heads = {key: self._opened(key, found.get(self._key.name(key))) for key in before}
        beside = [
            key
            for key, head in heads.items()
            if head is not None and not gone.isdisjoint(head.pack.keys(self._layout))
        ]
        names = self._names([*beside, *keys])
        self._tombstones.put(names, self._clock(), self._ttl_s)
        for key in (*beside, *keys):
            self._heads.pop(key, None)
        if names:
            self._try(lambda: self._store.remove(self._group, names))

    def put_name(self, name: str, encoded: bytes) -> None:
        """Let other machines find the token ids of a context by a name. Raises BusyRecord."""
        key = _key_of(name)
        sealed = self._key.seal(_NAME, key, _WRITTEN.pack(self._clock()) + encoded)
        self._ask(
            lambda: self._store.put(self._group, self._key.name(key), sealed, b"-", self._ttl_s)
        )

    def forget_names(self, names: Iterable[str]) -> None:
        """Remove what was put under names; a store that returns it later is not believed."""
        own = self._names([_key_of(name) for name in names])
        self._tombstones.put(own, self._clock(), self._ttl_s)
        if own:
            self._try(lambda: self._store.remove(self._group, own))

    def named(self, name: str) -> bytes:
        """Return the encoded token ids that were put under a name; none if there are none."""
        key = _key_of(name)
        sealed = self._heads_of([key]).get(self._key.name(key))
        if sealed is None:
            return b""
        try:
            content = self._key.open(_NAME, key, sealed)
            if len(content) < _WRITTEN.size:
                raise DamagedRecord("truncated")
            self._require_current(key, *_WRITTEN.unpack_from(content))
            return bytes(content[_WRITTEN.size :])
        except DamagedRecord as damage:
            self._note_damage(damage)
            return b""

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._key.name(key) for key in keys]

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never return these blocks again: their KV is wrong. Others may believe them as little."""
        self._wrong.update(keys)
        self._count(num_quarantined=len(keys))
        self._try(lambda: self._store.remove(self._group, self._names(keys)))

    def tidy(self) -> bool:
        """Ask a store that failed whether it answers again."""
        if self._breaker.has_failed and not self._breaker.is_resting:
            self._try(self._store.ping, is_round_trip=True)
        return self._breaker.has_failed

    @property
    def trouble(self) -> str:
        """Why the store cannot be used now, in a few words; "" if it can."""
        return self._breaker.trouble

    def status(self) -> TierStatus:
        return self._status

    def close(self) -> None:
        self._store.close()

    # Asking the store

    def _try(self, call: Callable[[], T], is_round_trip: bool = False) -> T | None:
        """Return what a call to the store returns; None if it failed, which is noted."""
        try:
            return self._ask(call, is_round_trip)
        except BusyRecord:
            return None

    def _ask(self, call: Callable[[], T], is_round_trip: bool = False) -> T:
        """Return what a call to the store returns; time one that is no more than a round trip.

        Raises BusyRecord if it failed, or if the store rests after a failure.
        """
        if self._breaker.is_resting:
            raise BusyRecord(self._breaker.trouble)
        start_s = self._timer()
        try:
            result = call()
        except StoreTrouble as error:
            self._note_failure(str(error))
            raise BusyRecord(str(error)) from error
        self._breaker.note_success()
        if is_round_trip:
            self._round_trip_s = averaged(self._round_trip_s, self._timer() - start_s)
        return result

    def _note_failure(self, trouble: str) -> None:
        if not self._breaker.has_failed:
            _log.warning("the shared store fails: %s", trouble)
            self._say(f"the shared cache is left alone for a while: {trouble}.")
        self._breaker.note_failure(trouble)

    def _count(self, **amounts: int) -> None:
        totals = {name: getattr(self._status, name) + n for name, n in amounts.items()}
        self._status = replace(self._status, **totals)

    def _say(self, trouble: str) -> None:
        self._status = replace(self._status, trouble=trouble)


def _key_of(name: str) -> bytes:
    """Return the key of the record of a name; no block has it."""
    return hashlib.blake2b(name.encode(), digest_size=KEY_BYTES, person=b"kvchat name").digest()
