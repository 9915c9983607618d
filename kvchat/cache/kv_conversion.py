"""KV of more bits for a chat of fewer: images of blocks in another format, and the tier of them.

A chat whose KV has few bits may begin with what the disk has of its context in more bits, and not
the other way round: bits that are gone do not come back. What was converted is then written under
the chat's own identity, so that it is converted once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvchat.cache.kv_pool import CodedFormat, KvGeometry, LayerGeometry
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


class ConvertingTier(Tier):
    """What `stored` has of the same model's KV in more bits: each block is converted as it is read.

    Nothing is written to `stored`, and nothing removed but what it finds damaged. Contexts are
    forgotten there by the administrator of all stores.
    """

    has_admin = True

    def __init__(self, stored: Tier, source: KvGeometry, target: KvGeometry) -> None:
        self._stored = stored
        self._source = source
        self._target = target
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
        found = self._stored.find(keys, encoded, is_one_shot)
        return [replace(run, fingerprint=None) for run in found]

    def read(self, run: BlockRun) -> Image:
        """Return the images of the blocks found, converted; raises as every tier does."""
        image = self._stored.read(run)
        assert not isinstance(image, torch.Tensor)
        self._bytes_read += len(image)
        writable = bytearray(image) if memoryview(image).readonly else image
        rows = torch.frombuffer(writable, dtype=torch.uint8).view(-1, self._source.block_bytes)
        own = convert(rows, self._source, self._target)
        return memoryview(own.numpy().data).cast("B")

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
