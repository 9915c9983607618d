"""Parts of a decoder layer on a GPU, each as few kernels: linear layers, norms, MLPs, attention.

`part_builder.py` makes them from the description of a layer. On a CPU, where only tests run them,
kernels are replaced by their references in torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from kvchat.model.batch import ForwardBatch, WindowSlots
from kvchat.model.hf.module_adapter import KvBinding, LayerBinding
from kvchat.model.spec import LayerSpec
from kvchat_kernels.kv_write import HeadNorms, Rotation, StepKv, rope_kv_write
from kvchat_kernels.paged_attention import Scoring
from kvchat_kernels.row_operations import add_rms_norm, one_row_linear, rms_norm


class Product(Protocol):
    """x [num_rows, in_features] -> [num_rows, out_features], both in the dtype it was made for."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class MergedProduct:
    """One product with the weights of several layers, for any number of rows.

    The layers' parameters become views of the merged ones, so that nothing is held twice. One row
    is multiplied by kvchat's kernel.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._bias = _joined_bias(layers)
        if len(layers) == 1:
            self._weight = layers[0].weight.data
            return
        self._weight = torch.cat([layer.weight.data for layer in layers])
        start = 0
        for layer in layers:
            end = start + layer.out_features
            layer.weight.data = self._weight[start:end]
            if layer.bias is not None and self._bias is not None:
                layer.bias.data = self._bias[start:end]
            start = end

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # By the shape alone, which is the same at every replay of a captured step.
        if x.numel() == x.shape[-1] and self._weight.is_contiguous():
            row = one_row_linear(x.reshape(1, -1), self._weight, self._bias)
            return row.view(*x.shape[:-1], -1)
        return linear(x, self._weight, self._bias)


def _joined_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Return the layers' biases in one tensor, zeros where only some layers have one."""
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / rms(x) * weight, over the last dimension, in the dtype of x; `weight` is float32."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def of_sum(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum of both, and the sum."""
        return add_rms_norm(x, stream, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(gated(gate(x), up(x))), with gate and up as one product of twice `width` columns.

    gated   the activation of its first argument, times the second
    """

    gate_up: Product
    down: Product
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    width: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        return self.down(self.gated(both[..., : self.width], both[..., self.width :]))


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention computing in the dtype of its input.

    scale     what scores are multiplied with
    norms     of the heads of Q and K; None where there are none
    rotates   false for layers without position encoding
    softcap, sinks   as of `paged_attention`
    has_half_angles  the angles come once each, as gpt-oss has them, and not twice in a row
    """

    qkv: Product
    out: Product
    layer: LayerSpec
    scale: float
    norms: HeadNorms | None
    rotates: bool
    softcap: float | None
    sinks: torch.Tensor | None
    has_half_angles: bool

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, binding: KvBinding
    ) -> torch.Tensor:
        """Attend x, [num_tokens, hidden_size], after writing its KV to the running step's slots.

        cos, sin   [1, num_tokens, key_dim], as transformers hands them to its layers; half of that
                   if the layer `has_half_angles`
        """
        assert binding.context.batch is not None, "attention outside of a step"
        slots = binding.slots_of(binding.context.batch)
        query, key, value = self._heads(self.qkv(x))
        if self.rotates:
            halves = (cos[0], sin[0]) if self.has_half_angles else _halves(cos, sin)
            query = self._write_at_once(query, key, value, Rotation(*halves), binding, slots)
        else:
            query = self._write(query, key, value, binding, slots)
        return self.out(self._attended(query, binding, slots).flatten(1).to(x.dtype))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the heads of Q, K and V as views, [num_tokens, heads, dim]."""
        layer, num_tokens = self.layer, qkv.shape[0]
        query_width, key_width = (
            count * layer.key_dim for count in (layer.num_heads, layer.num_kv_heads)
        )
        query, key, value = qkv.tensor_split((query_width, query_width + key_width), dim=1)
        return (
            query.view(num_tokens, layer.num_heads, layer.key_dim),
            key.view(num_tokens, layer.num_kv_heads, layer.key_dim),
            value.view(num_tokens, layer.num_kv_heads, layer.value_dim),
        )

    def _attended(
        self, query: torch.Tensor, binding: KvBinding, slots: ForwardBatch | WindowSlots
    ) -> torch.Tensor:
        scoring = Scoring(
            scale=self.scale,
            span=binding.layer.span,
            softcap=self.softcap if binding.layer.has_softcap else None,
            sinks=self.sinks if binding.layer.has_sinks else None,
        )
        return binding.kv.attend(query, slots.sequences, scoring)

    def _write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        binding: KvBinding,
        slots: ForwardBatch | WindowSlots,
    ) -> torch.Tensor:
        """Norm Q and K and write K and V; return Q."""
        if self.norms is not None:
            query = rms_norm(query, self.norms.query_weight, self.norms.eps)
            key = rms_norm(key, self.norms.key_weight, self.norms.eps)
        binding.kv.write(key, value, slots.slot_mapping)
        return query

    def _write_at_once(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        binding: KvBinding,
        slots: ForwardBatch | WindowSlots,
    ) -> torch.Tensor:
        """Norm and rotate Q and K and write K and V as one kernel; return Q.

        Two kernels where KV is not plain: the first then rotates the step's keys into memory of
        their own, from where the KV layer stores them in its form.
        """
        if isinstance(binding, LayerBinding):
            target = StepKv(binding.keys, binding.values, slots.slot_mapping)
        else:
            num_tokens = query.shape[0]
            target = StepKv(  # a block of one slot for each token
                query.new_empty(num_tokens, 1, *key.shape[1:]),
                query.new_empty(num_tokens, 1, *value.shape[1:]),
                _row_numbers(num_tokens, query.device, binding.context.memo),
            )
        rotated_query = rope_kv_write(query, key, value, rotation, target, self.norms)
        if not isinstance(binding, LayerBinding):
            keys, values = target.key_pool[:, 0], target.value_pool[:, 0]
            binding.kv.write(keys, values, slots.slot_mapping)
        return rotated_query


# A key of a step's memo that is the id of no tensor.
_ROW_NUMBERS = -1


def _row_numbers(count: int, device: torch.device, memo: dict[int, Any]) -> torch.Tensor:
    """Return 0 to count - 1, int64; made once a step."""
    known: torch.Tensor | None = memo.get(_ROW_NUMBERS)
    if known is None:
        known = memo[_ROW_NUMBERS] = torch.arange(count, device=device)
    return known


def _halves(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each angle's cosine and sine once: transformers' tables hold them twice."""
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """x + attention(norm x), then x + mlp(norm x); Gemma norms what is added as well."""

    attention: FusedAttention
    mlp: GatedMlp
    before_attention: RmsNorm
    after_attention: RmsNorm | None
    before_mlp: RmsNorm
    after_mlp: RmsNorm | None

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, binding: KvBinding
    ) -> torch.Tensor:
        """Return the stream after this layer: [num_tokens, hidden_size] in x's dtype."""
        attended = self.attention(self.before_attention(x), cos, sin, binding)
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        normed, x = self.before_mlp.of_sum(attended, x)
        out = self.mlp(normed)
        if self.after_mlp is not None:
            out = self.after_mlp(out)
        return out.add_(x)
