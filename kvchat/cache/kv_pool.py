"""KvPool: the device memory of all layers' KV, and copies of whole blocks across the layers.

A KvFormat defines how the KV of a layer is stored as bytes; KvGeometry gives the shapes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch

from kvchat.cache.device_copies import CudaCopyStream, ImageCopies, Images
from kvchat.cache.page_memory import fresh_memory
from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks, scatter_blocks
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.key_rotation import KeyRotation
from kvchat_kernels.kv_code import SCALE_BYTES, KvCode, NumberCode, group_size
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.launch import on_device

_SMALLEST_SQUARE = 1e-30
# Bytes of images that `num_finite` copies and checks together.
_LOOKED_AT_BYTES = 32 << 20


class PlainImages(NamedTuple):
    """Images in plain memory of their own."""

    memory: memoryview

    def read(self) -> memoryview:
        return self.memory

    def release(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shape of one layer's KV: heads, and the dimensions of a key and of a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def token_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KvFormat(Protocol):
    """How the KV of a layer is stored, and how the images of blocks are read.

    The image of a block is its rows of `KvLayer.tensors`, layer after layer.
    """

    @property
    def name(self) -> str:
        """Part of the identity of stored KV: a format with other bytes needs another name."""

    @property
    def setting(self) -> str:
        """The value of the setting `kv_dtype` that asks for this format; "" if a dtype does."""

    def precision(self, geometry: "KvGeometry") -> torch.dtype:
        """Return the dtype of the stored numbers, which bounds how equal KV computed twice is."""

    def block_bytes(self, layer: LayerGeometry, geometry: "KvGeometry") -> int:
        """Return the size in bytes of one block of `layer`."""

    def new_layer(
        self, layer: LayerGeometry, geometry: "KvGeometry", num_blocks: int, device: torch.device
    ) -> KvLayer:
        """Return a layer of `num_blocks` blocks on `device`, all zeros."""

    def read(self, images: torch.Tensor, geometry: "KvGeometry") -> list[torch.Tensor]:
        """Return the numbers in images, [num_blocks, geometry.block_bytes] uint8.

        The result is floating tensors [num_blocks, num_parts, block_size, width]. Every part holds
        the keys, or the values, of one layer. They are views of `images` if possible.
        """


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Keys and values as they are, in the geometry's dtype."""

    name: str = "plain"
    setting: str = ""

    def precision(self, geometry: "KvGeometry") -> torch.dtype:
        return geometry.dtype

    def block_bytes(self, layer: LayerGeometry, geometry: "KvGeometry") -> int:
        return layer.token_elements * geometry.block_size * geometry.dtype.itemsize

    def new_layer(
        self, layer: LayerGeometry, geometry: "KvGeometry", num_blocks: int, device: torch.device
    ) -> KvLayer:
        shape = (num_blocks, geometry.block_size, layer.num_kv_heads)
        return PlainKv(
            zeroed((*shape, layer.key_dim), geometry.dtype, device),
            zeroed((*shape, layer.value_dim), geometry.dtype, device),
        )

    def read(self, images: torch.Tensor, geometry: "KvGeometry") -> list[torch.Tensor]:
        widths = [
            layer.num_kv_heads * dim
            for layer in geometry.layers
            for dim in (layer.key_dim, layer.value_dim)
        ]
        size, numbers = geometry.block_size, images.view(geometry.dtype)
        if len(set(widths)) == 1:  # all at once
            return [numbers.view(len(images), len(widths), size, widths[0])]
        parts = numbers.split([size * width for width in widths], dim=1)
        return [p.view(len(images), 1, size, w) for p, w in zip(parts, widths, strict=True)]


@dataclass(frozen=True, slots=True)
class CodedFormat:
    """Keys and values in few bits, with a scale for each group of a head; see `CodedKv`."""

    code: KvCode

    @property
    def name(self) -> str:
        return self.code.stored_name

    @property
    def setting(self) -> str:
        return self.code.name

    def precision(self, geometry: "KvGeometry") -> torch.dtype:
        return self.code.values.dtype  # never more bits than keys have

    def block_bytes(self, layer: LayerGeometry, geometry: "KvGeometry") -> int:
        token_bytes = self.code.num_bytes(layer.key_dim, layer.value_dim) * layer.num_kv_heads
        return token_bytes * geometry.block_size

    def new_layer(
        self, layer: LayerGeometry, geometry: "KvGeometry", num_blocks: int, device: torch.device
    ) -> KvLayer:
        shape = (num_blocks, geometry.block_size, layer.num_kv_heads)
        keys, key_scales, values, value_scales = (
            zeroed((*shape, width), dtype, device)
            for dim, code in self._sides(layer)
            for width, dtype in (
                (code.width(dim), code.dtype),
                (dim // group_size(dim), torch.bfloat16),
            )
        )
        return CodedKv(keys, key_scales, values, value_scales, self.code)

    def _sides(self, layer: LayerGeometry) -> tuple[tuple[int, NumberCode], ...]:
        return (layer.key_dim, self.code.keys), (layer.value_dim, self.code.values)

    def read(self, images: torch.Tensor, geometry: "KvGeometry") -> list[torch.Tensor]:
        codes = [code for layer in geometry.layers for _, code in self._sides(layer)]
        stored = zip(codes, self.stored(images, geometry), strict=True)
        return [code.restored(*parts).flatten(2)[:, None] for code, parts in stored]

    def stored(
        self, images: torch.Tensor, geometry: "KvGeometry"
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the numbers and scales of each layer's keys, and of its values, as a `CodedKv` has
        them.
        """
        start = 0
        for layer in geometry.layers:
            for dim, code in self._sides(layer):
                shape = (len(images), geometry.block_size, layer.num_kv_heads)
                num_heads, num_groups = math.prod(shape[1:]), dim // group_size(dim)
                middle = start + num_heads * code.width(dim)
                end = middle + num_heads * num_groups * SCALE_BYTES
                numbers = images[:, start:middle].contiguous().view(code.dtype)
                scales = images[:, middle:end].contiguous().view(torch.bfloat16)
                yield numbers.view(*shape, -1), scales.view(*shape, num_groups)
                start = end


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU the kernel zeroes a page at the first write to it, so that unused
    pages take no memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = fresh_memory(math.prod(shape) * dtype.itemsize, is_for_all=False)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a model's KV: the layers that store KV, the dtype, tokens per block, and the format.

    `dtype` is the dtype of keys and values before `format` stores them.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype
    block_size: int
    format: KvFormat = PlainFormat()

    @property
    def token_bytes(self) -> int:
        """Bytes per token, rounded up if a block's bytes do not divide evenly."""
        return -(-self.block_bytes // self.block_size)

    def dtype_beside(self, dtype: torch.dtype) -> str:
        """Return the dtype of the stored numbers as the settings spell it, "" if it is `dtype`."""
        if self.format.setting:
            return self.format.setting
        return str(self.dtype).removeprefix("torch.") if self.dtype != dtype else ""

    @property
    def block_bytes(self) -> int:
        return sum(self.format.block_bytes(layer, self) for layer in self.layers)


def image_copies(geometry: KvGeometry, device: torch.device) -> ImageCopies | None:
    """Return the copies of images to and from a CUDA device; None for a CPU."""
    if device.type != "cuda":
        return None
    return ImageCopies(CudaCopyStream(device), CudaCopyStream(device), geometry.block_bytes)


class KvPool:
    """Device memory for `num_blocks` blocks, zeroed at first so that an unwritten slot has no NaN.

    `layers[i]` is the KV of the i-th layer that stores KV; the pool owns it. `copies` moves images
    to and from host memory; None makes those of a CUDA device. A CPU needs none.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        num_blocks: int,
        device: torch.device,
        copies: ImageCopies | None = None,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.device = device
        self.layers: tuple[KvLayer, ...] = tuple(
            geometry.format.new_layer(layer, geometry, num_blocks, device)
            for layer in geometry.layers
        )
        self._tensors = PoolTensors([tensor for layer in self.layers for tensor in layer.tensors])
        assert self._tensors.image_bytes == geometry.block_bytes
        self._copies = copies or image_copies(geometry, device)

    def warm_up(self) -> None:
        """Run every kind of block copy once, of a block onto itself.

        A GPU kernel is compiled at its first run. That takes longer than the deadline of a restore
        or promotion.
        """
        self.copy_block(0, 0)
        self.unstage([0], self.stage([0]))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer, for copy-on-write."""
        copy_blocks(self._tensors, [source], [target])

    def move_slots(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        rotations: Sequence[KeyRotation] = (),
        num_back: int = 0,
    ) -> None:
        """Copy the KV of slots to others, for tokens that stand `num_back` positions earlier there.

        `rotations` has one for each layer, where positions change. No slot is in both.
        """
        places = on_device([list(sources), list(targets)], torch.int64, self.device)
        assert not num_back or len(rotations) == len(self.layers)
        for index, layer in enumerate(self.layers):
            change = partial(rotations[index].moved, num_back=num_back) if num_back else None
            of_layer, to = self._in_layer(places, index)
            layer.copy_slots(of_layer, to, change)

    def _in_layer(self, places: torch.Tensor, index: int) -> torch.Tensor:
        """Return pairs of slots, [2, num_slots], as those of the `index`-th layer that stores KV;
        pairs of which it lacks one are left out.
        """
        return places

    def kv_error(self, block: int, other: int, slot: int) -> torch.Tensor:
        """Compare slot `slot` of block `other` with the same slot of `block`.

        Returns float32 [num_tensors, 3] on the CPU. With x the key or value in `block` and d the
        difference, a row is d.d, d.x and x.x, all divided by the mean square length of a token's
        key or value in `block`. The mean, not the token's own length: some tokens have values near
        zero, whose rounding errors come from larger terms.
        """
        images = torch.frombuffer(self.gather([block, other]), dtype=torch.uint8).view(2, -1)
        parts = self.geometry.format.read(images, self.geometry)
        return torch.cat([_kv_error(p[0].float(), p[1, :, slot].float(), slot) for p in parts])

    def zero(self, block: int, first_slot: int) -> None:
        """Zero a block from slot `first_slot` on."""
        for layer in self.layers:
            for tensor in layer.tensors:
                tensor[block, first_slot:] = 0

    def num_finite(self, blocks: list[int]) -> int:
        """Return how many leading blocks have no NaN or infinity in any slot.

        Images of many blocks are checked together: one check per tensor and block would be a
        hundred thousand synchronisations with a GPU for a long context.
        """
        size = max(1, _LOOKED_AT_BYTES // self.geometry.block_bytes)
        for start in range(0, len(blocks), size):
            parts = self._read(blocks[start : start + size])
            found = [part.isfinite().flatten(1).all(dim=1) for part in parts]
            are_finite: list[bool] = torch.stack(found).all(dim=0).tolist()
            if not all(are_finite):
                return start + are_finite.index(False)
        return len(blocks)

    def is_finite(self, block: int, num_slots: int) -> bool:
        """Whether the first `num_slots` slots of a block have no NaN or infinity."""
        return all(bool(p[:, :, :num_slots].isfinite().all()) for p in self._read([block]))

    def _read(self, blocks: list[int]) -> list[torch.Tensor]:
        return self.geometry.format.read(self.stage(blocks), self.geometry)

    def gather(self, blocks: list[int]) -> memoryview:
        """Return the images of `blocks`, one after another, in new memory that the caller owns.

        An image is a block's bytes: layer after layer, tensor after tensor. On a CUDA device it
        waits for the computation.
        """
        image = bytearray(len(blocks) * self.geometry.block_bytes)
        if blocks:
            rows = torch.frombuffer(image, dtype=torch.uint8).view(len(blocks), -1)
            if rows.device == self.device:
                self.stage(blocks, rows)
            else:
                rows.copy_(self.stage(blocks))
        return memoryview(image)

    @property
    def max_waiting_bytes(self) -> int | None:
        """The bytes of exported images, by `export_bytes`, that may wait; None for no limit."""
        return self._copies.waiting_bytes if self._copies is not None else None

    def export_bytes(self, num_blocks: int) -> int:
        """Return the host memory that `export` of so many blocks takes."""
        if self._copies is not None:
            return self._copies.downwards.slot_bytes
        return num_blocks * self.geometry.block_bytes

    def export(self, blocks: list[int]) -> Images | None:
        """Return the images of a pack's `blocks` as they are now, as `gather` does.

        On a CUDA device the copy is only queued, and any thread may read the result. It is None
        where too many earlier images are not released yet.
        """
        if self._copies is None:
            return PlainImages(self.gather(blocks))
        return self._copies.downwards.down(self.stage(blocks))

    def scatter(self, blocks: list[int], image: bytearray | memoryview) -> None:
        """Fill `blocks` with images that `gather` made; `image` must be writable memory.

        On a CUDA device the copies are only queued; the caller may reuse `image` at once.
        """
        assert len(image) == len(blocks) * self.geometry.block_bytes
        if not blocks:
            return
        self.upload(blocks, torch.frombuffer(image, dtype=torch.uint8).view(len(blocks), -1))

    def upload(self, blocks: list[int], images: torch.Tensor) -> None:
        """Fill `blocks` with images [len(blocks), block_bytes] in host memory, as `scatter`."""
        if self._copies is None:
            self.unstage(blocks, images)
            return
        size = self._copies.slot_blocks
        for start in range(0, len(blocks), size):
            there = self._copies.upwards.up(images[start : start + size])
            self.unstage(blocks[start : start + size], there)

    def stage(self, blocks: list[int], staging: torch.Tensor | None = None) -> torch.Tensor:
        """Return the images of `blocks` on the device: [len(blocks), block_bytes] uint8, in
        `staging` if given.

        On a CUDA device the copy is only queued, before any later computation. So the caller may
        reuse the blocks at once.
        """
        if staging is None:
            shape = (len(blocks), self.geometry.block_bytes)
            staging = torch.empty(shape, dtype=torch.uint8, device=self.device)
        gather_blocks(self._tensors, blocks, staging)
        return staging

    def unstage(self, blocks: list[int], staging: torch.Tensor) -> None:
        """Fill `blocks` with images on the device that `stage` made."""
        assert staging.shape == (len(blocks), self.geometry.block_bytes)
        self._scatter(blocks, staging)
        if staging.is_cuda:  # or the stream that allocated it could reuse its memory too early
            staging.record_stream(torch.cuda.current_stream(staging.device))

    def _scatter(self, blocks: list[int], staging: torch.Tensor) -> None:
        scatter_blocks(self._tensors, blocks, staging)


def _kv_error(known: torch.Tensor, token: torch.Tensor, slot: int) -> torch.Tensor:
    """Return the error of each tensor, [num_tensors, 3]. `known` is [num_tensors, block_size,
    width], `token` is [num_tensors, width].
    """
    usual = known.square().sum(dim=2).mean(dim=1, keepdim=True).clamp_min(_SMALLEST_SQUARE)
    own = known[:, slot]
    off = token - own
    products = (off * off, off * own, own * own)
    return torch.stack([product.sum(dim=1) for product in products], dim=1) / usual
