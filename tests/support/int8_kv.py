"""A second way to store KV: eight bits a number, and a scale for every token and head.

Plain torch, slow and simple: it proves that nothing beside a layer's format knows how KV is stored.
"""

from dataclasses import dataclass

import torch

from kvchat.cache.kv_pool import KvGeometry, LayerGeometry, zeroed
from kvchat_kernels.kv_layer import KvLayer
from kvchat_kernels.paged_attention import AttentionSpan, Sequences, paged_attention


@dataclass(frozen=True)
class Int8Kv:
    """Numbers [num_blocks, block_size, num_kv_heads, dim] int8, and scales [..., 1] float32."""

    keys: torch.Tensor
    key_scales: torch.Tensor
    values: torch.Tensor
    value_scales: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.key_scales, self.values, self.value_scales

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        for new, numbers, scales in (
            (key, self.keys, self.key_scales),
            (value, self.values, self.value_scales),
        ):
            own = new.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
            scales.flatten(0, 1)[slot_mapping] = own
            numbers.flatten(0, 1)[slot_mapping] = (new.float() / own).round().to(torch.int8)

    def attend(
        self,
        query: torch.Tensor,
        sequences: Sequences,
        *,
        span: AttentionSpan,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys, values = self.keys * self.key_scales, self.values * self.value_scales
        return paged_attention(
            query.float(),
            keys,
            values,
            sequences,
            span=span,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )


@dataclass(frozen=True)
class Int8Format:
    """KV of layers as Int8Kv."""

    name: str = "int8, a scale per token and head"

    def block_bytes(self, layer: LayerGeometry, geometry: KvGeometry) -> int:
        token_bytes = layer.token_elements + 2 * 4 * layer.num_kv_heads
        return token_bytes * geometry.block_size

    def new_layer(
        self, layer: LayerGeometry, geometry: KvGeometry, num_blocks: int, device: torch.device
    ) -> KvLayer:
        shape = (num_blocks, geometry.block_size, layer.num_kv_heads)
        made = [
            zeroed((*shape, dim), dtype, device)
            for width in (layer.key_dim, layer.value_dim)
            for dim, dtype in ((width, torch.int8), (1, torch.float32))
        ]
        return Int8Kv(*made)

    def read(self, images: torch.Tensor, geometry: KvGeometry) -> list[torch.Tensor]:
        parts, start = [], 0
        for layer in geometry.layers:
            for dim in (layer.key_dim, layer.value_dim):
                shape = (len(images), geometry.block_size, layer.num_kv_heads)
                num_heads = geometry.block_size * layer.num_kv_heads
                middle, end = start + num_heads * dim, start + num_heads * (dim + 4)
                numbers = images[:, start:middle].view(torch.int8).view(*shape, dim)
                scales = images[:, middle:end].contiguous().view(torch.float32).view(*shape, 1)
                parts.append((numbers * scales).flatten(2)[:, None])
                start = end
        return parts
