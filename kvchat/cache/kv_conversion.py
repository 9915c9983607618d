"""KV of more bits for a chat of fewer: images of blocks in another format, and the tier of them.

A chat whose KV has few bits may begin with what the disk has of its context in more bits, and not
the other way round: bits that are gone do not come back. What was converted is then written under
the chat's own identity, so that it is converted once. Snapshots of recurrent state have the same
bytes beside KV of any bits, in blocks of other sizes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvchat.cache.keys import TOKEN_BYTES
from kvchat.cache.kv_pool import CodedFormat, KvGeometry, LayerGeometry
from kvchat.cache.state_manager import num_state_blocks_of, state_blocks
from kvchat.cache.tier import BlockRun, Image, Tier
from kvchat.core.stats import TierStatus
from kvchat.core.types import MissReason
from kvchat_kernels.kv_code import NumberCode

# What a windowed pool has in the place of a layer that a block lacks.
_ABSENT = 0xFF
# For so many numbers torch takes one thread. With more it waits for others that are busy: a second
# for 4 MiB, and 0.1 s like this (two busy cores of an Intel Xeon).
_ALONE = 1 << 15


def convert(images: torch.Tensor, source: KvGeometry, target: KvGeometry) -> torch.Tensor:
    """Return images [num_blocks, source.block_bytes] uint8 in the format of `target`, which has the
    same layers in a code.

    What both have in the same code keeps its bytes.
    """
    layers = source.layers
    if len(set(layers)) > 1:
        sizes = [source.format.block_bytes(layer, source) for layer in layers]
        parts = zip(layers, images.split(sizes, dim=1), strict=True)
        one = [(part.contiguous(), (layer,)) for layer, part in parts]
        return torch.cat(
            [convert(p, replace(source, layers=x), replace(target, layers=x)) for p, x in one], 1
        )
    # Layers as if each were a block, several at once.
    rows = images.reshape(len(images) * len(layers), -1)
    count = max(1, _ALONE // (layers[0].token_elements * source.block_size))
    own = torch.cat([_converted(x, layers[0], source, target) for x in rows.split(count)])
    own[(rows == _ABSENT).all(dim=1)] = _ABSENT
    return own.view(len(images), -1)


def _converted(
    images: torch.Tensor, layer: LayerGeometry, source: KvGeometry, target: KvGeometry
) -> torch.Tensor:
    """Return images of blocks of one layer in the format of `target`."""
    source = replace(source, layers=(layer,))
    assert isinstance(target.format, CodedFormat)
    own = target.format.code
    sides = zip((own.keys, own.values), (layer.key_dim, layer.value_dim), strict=True)
    if isinstance(source.format, CodedFormat):
        was = source.format.code
        stored = source.format.stored(images, source)
        found = [
            _recoded(*parts, code, *side)
            for parts, code, side in zip(stored, (was.keys, was.values), sides, strict=True)
        ]
    else:
        parts = [part for both in source.format.read(images, source) for part in both.unbind(1)]
        heads = [part.unflatten(-1, (layer.num_kv_heads, -1)) for part in parts]
        found = [code.quantised(x) for x, (code, _) in zip(heads, sides, strict=True)]
    each = [part.flatten(1).view(torch.uint8) for both in found for part in both]
    return torch.cat(each, dim=1)


def _recoded(
    numbers: torch.Tensor, scales: torch.Tensor, was: NumberCode, code: NumberCode, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and scales of heads in another code."""
    if was == code:
        return numbers, scales
    if was.turns(dim) and code.turns(dim):  # they stay turned
        return replace(code, turned=False).quantised(was.restored(numbers, scales))
    return code.quantised(was.plain(numbers, scales))


@dataclass(frozen=True, slots=True)
class _SnapshotRun(BlockRun):
    """The blocks of a snapshot, and those before them in its first pack. `parts` are its packs."""

    parts: tuple[BlockRun, ...] = ()


class ConvertingTier(Tier):
    """What `stored` has of the same model's KV in more bits: each block is converted as it is read.

    A snapshot takes `state_bytes`, 0 without recurrent state. It is found and read as a whole.

    Nothing is written to `stored`, and nothing removed but what it finds damaged. Contexts are
    forgotten there by the administrator of all stores.
    """

    has_admin = True

    def __init__(
        self, stored: Tier, source: KvGeometry, target: KvGeometry, state_bytes: int = 0
    ) -> None:
        self._stored = stored
        self._source = source
        self._target = target
        self._state_bytes = state_bytes
        self._num_stored = state_blocks(source, state_bytes)
        self._num_own = state_blocks(target, state_bytes)
        self._wrong: set[bytes] = set()
        self._bytes_read = 0

    @property
    def root(self) -> bytes:
        return self._stored.root

    def find(
        self, keys: Sequence[bytes], encoded: bytes, is_one_shot: bool = False
    ) -> list[BlockRun]:
        """Return the packs that hold a prompt's leading blocks.

        Their fingerprints are left out: they are those of logits over other KV.
        """
        if not self._wrong.isdisjoint(keys):
            return []
        end = len(keys)
        if of_state := self._num_of_state(encoded):
            assert of_state == self._num_own, "a part of a snapshot"
            end += self._num_stored - of_state
        ids = encoded[: end * self._source.block_size * TOKEN_BYTES]
        found = self._stored.find(keys[:end], ids, is_one_shot)
        if of_state:
            return self._with_snapshot(found, len(keys) - of_state)
        return [replace(run, fingerprint=None) for run in found]

    def peek(self, keys: Sequence[bytes], encoded: bytes) -> int:
        """Return how many leading blocks `stored` has, also of a part of a snapshot."""
        return self._stored.peek(keys, encoded) if self._wrong.isdisjoint(keys) else 0

    def _num_of_state(self, encoded: bytes) -> int:
        """Return how many blocks of a snapshot end a context."""
        return num_state_blocks_of(array("i", encoded[-TOKEN_BYTES:])[0]) if encoded else 0

    def _with_snapshot(self, found: Sequence[BlockRun], num_context: int) -> list[BlockRun]:
        """Return packs of a context, and its snapshot as one if all of it was found."""
        parts = tuple(run for run in found if run.end_block > num_context)
        runs = [replace(run, fingerprint=None) for run in found[: len(found) - len(parts)]]
        if parts and parts[-1].end_block == num_context + self._num_stored:
            first = parts[0]
            count = num_context + self._num_own - first.start_block
            runs.append(
                _SnapshotRun(first.key, first.start_block, count, first.checksum, parts=parts)
            )
        return runs

    def read(self, run: BlockRun) -> Image:
        """Return the images of the blocks found, converted; raises as every tier does."""
        if not isinstance(run, _SnapshotRun):
            return _image_of(convert(self._rows(run), self._source, self._target))
        rows = torch.cat([self._rows(part) for part in run.parts])
        context, state = rows.split([len(rows) - self._num_stored, self._num_stored])
        own = torch.zeros(run.num_blocks, self._target.block_bytes, dtype=torch.uint8)
        if len(context):
            own[: len(context)] = convert(context, self._source, self._target)
        own[len(context) :].view(-1)[: self._state_bytes] = state.view(-1)[: self._state_bytes]
        return _image_of(own)

    def _rows(self, run: BlockRun) -> torch.Tensor:
        """Return the images of a pack as `stored` has them, [num_blocks, block_bytes] uint8."""
        image = self._stored.read(run)
        assert not isinstance(image, torch.Tensor)
        self._bytes_read += len(image)
        writable = bytearray(image) if memoryview(image).readonly else image
        return torch.frombuffer(writable, dtype=torch.uint8).view(-1, self._source.block_bytes)

    def why(self, key: bytes, encoded: bytes, num_found: int) -> MissReason:
        return self._stored.why(key, encoded, num_found)

    def forget(self, keys: Sequence[bytes], before: Sequence[bytes] = ()) -> None:
        self._stored.forget(keys, before)

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Never return these blocks again to this process: in more bits they may be right."""
        self._wrong.update(keys)

    def status(self) -> TierStatus:
        """Return what was read here; all else of the directory is in the disk's status."""
        of = self._stored.status()
        return TierStatus(
            bytes_read=self._bytes_read, num_damaged=of.num_damaged, trouble=of.trouble
        )

    def close(self) -> None:
        self._stored.close()


def _image_of(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.numpy().data).cast("B")
