"""MemoryTier: the disk tier's naive twin. It keeps every block by itself in a dict.

Packs, files, checksums and limits are what it does not have; what a prompt finds in it is what a
tier has to find. Tests can spoil what it keeps, make it fail, or make it wait.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvchat.cache.keys import chain_keys, root_key
from kvchat.cache.tier import BlockRun, GoneRecord, LogitFingerprint, PackHead, Tier
from kvchat.core.stats import TierStatus


class MemoryTier(Tier):
    """Blocks of `image_bytes` bytes by chain key. `before_read` and `before_write` may raise.

    Several engines may use it at the same time.

    `max_found` bounds the blocks of one find. `one_shots` says of each write whether it was one's;
    `declined` has the first keys of what was not offered.
    """

    def __init__(self, block_size: int, image_bytes: int, root: bytes = root_key(b"test")) -> None:
        self._root = root
        self.blocks: dict[bytes, bytes] = {}
        self.fingerprints: dict[bytes, LogitFingerprint] = {}
        self.num_read = 0
        self.num_written = 0
        self.num_quarantined = 0
        self.one_shots: list[bool] = []
        self.declined: list[bytes] = []
        self._parents: dict[bytes, bytes] = {}
        self._runs: dict[tuple[bytes, bytes], Sequence[bytes]] = {}
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None
        self.is_closed = False
        self.max_found = 1 << 30
        self._key_bytes = block_size * 4
        self._image_bytes = image_bytes

    def held(self) -> threading.Event:
        """Let reads wait until the event that is returned is set, a minute at most."""
        may_read = threading.Event()
        self.before_read = lambda: may_read.wait(60.0) and None
        return may_read

    @property
    def root(self) -> bytes:
        return self._root

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        count = 0
        while count < len(keys) and keys[count] in self.blocks:
            count += 1
        # Two finds where there is more than a block, as a branch inside a pack gives.
        step = min(self.max_found, max(1, -(-count // 2)))
        cuts = [*range(0, count, step), count]
        parts = [(start, end) for start, end in pairwise(cuts) if end > start]
        # Named by both ends: another engine's find changes none of them.
        self._runs |= {(keys[start], keys[end - 1]): keys[start:end] for start, end in parts}
        return [
            BlockRun(
                keys[start], start, end - start, keys[end - 1], self.fingerprints.get(keys[end - 1])
            )
            for start, end in parts
        ]

    def read(self, run: BlockRun) -> bytes:
        self.before_read()
        keys = self._runs[run.key, run.checksum]
        if not all(key in self.blocks for key in keys):
            raise GoneRecord("gone")
        self.num_read += len(keys)
        return b"".join(self.blocks[key] for key in keys)

    def write(self, head: PackHead, image: bytes | memoryview, is_one_shot: bool = False) -> bool:
        self.before_write()
        self.one_shots.append(is_one_shot)
        keys = chain_keys(head.parent, head.ids, self._key_bytes)
        assert len(image) == len(keys) * self._image_bytes
        assert head.parent == self.root or head.parent in self.blocks, "a pack without its parent"
        for number, key in enumerate(keys):
            assert key not in self.blocks, "written twice"
            start = number * self._image_bytes
            self.blocks[key] = bytes(image[start : start + self._image_bytes])
            self._parents[key] = keys[number - 1] if number else head.parent
        if head.fingerprint is not None:
            self.fingerprints[keys[-1]] = head.fingerprint
        self.num_written += len(keys)
        return True

    def note_declined(self, keys: Sequence[bytes], encoded: bytes) -> None:
        self.declined.append(keys[0])

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> None:
        gone = {key for key in keys if key in self.blocks}
        while more := {k for k, parent in self._parents.items() if parent in gone} - gone:
            gone |= more
        for key in gone:
            del self.blocks[key], self._parents[key]
            self.fingerprints.pop(key, None)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        before = len(self.blocks)
        self.forget(keys)
        self.num_quarantined += before - len(self.blocks)

    def status(self) -> TierStatus:
        return TierStatus(num_packs=len(self.blocks))

    def close(self) -> None:
        self.is_closed = True
