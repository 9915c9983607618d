"""A whole attention forward: one product for Q, K and V, norms, RoPE, KV write, paged attention.

Knows the forms attention takes in Llama's family. Whether a form was rightly guessed is for `fuse`
to find out, by running both.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.attention import LayerBinding
from kvchat.model.batch import ForwardBatch
from kvchat.model.fuse_kernels import takes_kernels
from kvchat.model.fuse_linear import Product, plain_linears
from kvchat.model.fuse_parts import RmsNorm, rotated
from kvchat.model.spec import LayerSpec
from kvchat_kernels.kv_write import kv_write
from kvchat_kernels.paged_attention import paged_attention
from kvchat_kernels.paged_attention.cpu_step import FusedStep, fused_step
from kvchat_kernels.rope_kv_write import HeadNorms, Rotation, StepKv, rope_kv_write


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention computing in the dtype of its input.

    scale     what scores are multiplied with
    norm      normalises the heads of Q and K, one weight a head; None where there is none
    rotates   false for layers without position encoding
    """

    qkv: Product
    out: Product
    layer: LayerSpec
    scale: float
    norm: RmsNorm | None
    rotates: bool

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: LayerBinding,
    ) -> torch.Tensor:
        """Attend x, [num_tokens, hidden_size], after writing its KV to the running step's slots.

        cos, sin   [1, num_tokens, key_dim], as transformers hands them to its layers
        """
        batch = binding.context.batch
        assert batch is not None, "attention outside of a step"
        qkv = self.qkv(x)
        if takes_kernels(x) and self.rotates:
            query = self._write_at_once(qkv, Rotation(*_halves(cos, sin)), binding, batch)
        else:
            query = self._write(qkv, cos, sin, binding, batch)
        return self.out(self._attended(query, binding, batch).flatten(1).to(x.dtype))

    def fused_step(self, binding: LayerBinding, batch: ForwardBatch) -> FusedStep | None:
        """Return how the running step's tokens are reached by one script, None if they are not."""
        pools, count = (binding.keys, binding.values), self.layer.num_heads
        return fused_step(batch.sequences, *pools, batch.slot_mapping, count, binding.layer.span)

    def attend(
        self, heads: torch.Tensor, value: torch.Tensor, binding: LayerBinding
    ) -> torch.Tensor:
        """Write KV and attend: [num_tokens, num_heads, value_dim].

        heads   Q and then K as they are written, [num_tokens, num_heads + num_kv_heads, key_dim]
        value   [num_tokens, num_kv_heads, value_dim]
        """
        batch = binding.context.batch
        assert batch is not None, "attention outside of a step"
        count = self.layer.num_heads
        kv_write(heads[:, count:], value, binding.keys, binding.values, batch.slot_mapping)
        return self._attended(heads[:, :count], binding, batch)

    def _attended(
        self, query: torch.Tensor, binding: LayerBinding, batch: ForwardBatch
    ) -> torch.Tensor:
        return paged_attention(
            query if query.dtype == binding.keys.dtype else query.to(binding.keys.dtype),
            binding.keys,
            binding.values,
            batch.sequences,
            span=binding.layer.span,
            scale=self.scale,
        )

    def _write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: LayerBinding,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Norm and rotate Q and K and write K and V; return Q, [num_tokens, num_heads, key_dim]."""
        layer, num_tokens = self.layer, qkv.shape[0]
        num_heads = layer.num_heads
        qk_width = (num_heads + layer.num_kv_heads) * layer.key_dim
        heads = qkv[:, :qk_width].view(num_tokens, -1, layer.key_dim)
        if self.norm is not None:
            heads = self.norm(heads)
        if self.rotates:
            heads = rotated(heads, *rotation(cos, sin, qkv.dtype, binding.context.memo))
        # One cast for Q and K: attention runs in the dtype of the pools.
        heads = heads.to(binding.keys.dtype)
        value = qkv[:, qk_width:].view(num_tokens, layer.num_kv_heads, layer.value_dim)
        kv_write(heads[:, num_heads:], value, binding.keys, binding.values, batch.slot_mapping)
        return heads[:, :num_heads]

    def _write_at_once(
        self, qkv: torch.Tensor, rotation: Rotation, binding: LayerBinding, batch: ForwardBatch
    ) -> torch.Tensor:
        """The same as one kernel."""
        layer, num_tokens = self.layer, qkv.shape[0]
        query_width, key_width = (
            count * layer.key_dim for count in (layer.num_heads, layer.num_kv_heads)
        )
        query, key, value = qkv.tensor_split((query_width, query_width + key_width), dim=1)
        return rope_kv_write(
            query.view(num_tokens, layer.num_heads, layer.key_dim),
            key.view(num_tokens, layer.num_kv_heads, layer.key_dim),
            value.view(num_tokens, layer.num_kv_heads, layer.value_dim),
            rotation,
            StepKv(binding.keys, binding.values, batch.slot_mapping),
            self._head_norms(),
        )

    def _head_norms(self) -> HeadNorms | None:
        if self.norm is None:
            return None
        assert self.norm.weight is not None
        weights = self.norm.weight[0], self.norm.weight[self.layer.num_heads]
        return HeadNorms(*weights, self.norm.epsilon)


def _halves(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each angle's cosine and sine once: transformers' tables hold them twice."""
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def rotation(
    cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, memo: dict[int, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as [num_tokens, 1, dim], the first half of the sines negated; once a step.

    With them, rotating x by halves is x * cos + swapped(x) * sin.
    """
    known = memo.get(id(cos))
    if known is None:
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        # Holding cos keeps its id from becoming another tensor's.
        known = memo[id(cos)] = (cos[0, :, None].to(dtype), signed[:, None].to(dtype), cos)
    return known[0], known[1]


def attention_linears(module: Any) -> tuple[list[nn.Linear], list[nn.Linear]] | None:
    """Return the layers of Q, K and V, and that of the output; None where they are not so."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "scaling")
    if not all(hasattr(module, name) for name in names):
        return None
    qkv = plain_linears(module.q_proj, module.k_proj, module.v_proj)
    out = plain_linears(module.o_proj)
    return (qkv, out) if qkv is not None and out is not None else None


def joined_head_norm(
    query_norm: RmsNorm, key_norm: RmsNorm, num_heads: int, num_kv_heads: int
) -> RmsNorm | None:
    """Return one norm for the heads of Q and of K, if the two differ in their weights only."""
    if query_norm.width != key_norm.width or query_norm.epsilon != key_norm.epsilon:
        return None
    if query_norm.rounded_to != key_norm.rounded_to:
        return None
    if query_norm.weight is None or key_norm.weight is None:
        return None
    weight = torch.cat(
        [
            query_norm.weight.expand(num_heads, -1),
            key_norm.weight.expand(num_kv_heads, -1),
        ]
    )
    return RmsNorm(weight, query_norm.width, query_norm.epsilon, query_norm.rounded_to)
