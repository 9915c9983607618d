"""Parts of a decoder layer as few operations: linear layers, norms, gated MLPs, attention.

On a GPU a part takes one kernel for several operations. On a CPU linear layers that share an input
are one product, with weights laid out for few rows, and oneDNN sees few shapes: it compiles a
product for every shape it meets, keeps 1,024 of them, and so grew by a gigabyte over a chat.

Each part is made from modules recognised by what they hold. Whether it was recognised rightly is
checked in `fuse_search`, by running both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from kvchat.model.batch import ForwardBatch
from kvchat.model.hf.gates import gate_of
from kvchat.model.hf.module_adapter import KvBinding, LayerBinding
from kvchat.model.spec import LayerSpec
from kvchat_kernels.cpu_products import linear_of_few_sizes
from kvchat_kernels.one_row_linear import one_row_linear
from kvchat_kernels.rms_norm import add_rms_norm, rms_norm
from kvchat_kernels.rope_kv_write import HeadNorms, Rotation, StepKv, rope_kv_write


def takes_kernels(x: torch.Tensor) -> bool:
    """Tell whether operations on `x` go through kernels of kvchat_kernels."""
    return x.is_cuda


class Product(Protocol):
    """x [num_rows, in_features] -> [num_rows, out_features], both in the dtype it was made for."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class MergedProduct:
    """One product with the weights of several layers, for any number of rows.

    The layers' parameters become views of the merged ones on `adopt`, so that nothing is held
    twice; until then the layers are untouched. On a GPU one row is multiplied by kvchat's kernel.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = tuple(layers)
        if len(layers) == 1:
            self._weight, self._bias = layers[0].weight.data, _joined_bias(layers, False)
        else:
            self._weight = torch.cat([layer.weight.data for layer in layers])
            self._bias = _joined_bias(layers, False)

    def adopt(self) -> None:
        """Let the layers' parameters be views of the merged ones."""
        if len(self._layers) == 1:
            return
        start = 0
        for layer in self._layers:
            end = start + layer.out_features
            layer.weight.data = self._weight[start:end]
            if layer.bias is not None and self._bias is not None:
                layer.bias.data = self._bias[start:end]
            start = end

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # By the shape alone, which is the same at every replay of a captured step.
        if takes_kernels(x) and x.numel() == x.shape[-1] and self._weight.is_contiguous():
            row = one_row_linear(x.reshape(1, -1), self._weight, self._bias)
            return row.view(*x.shape[:-1], -1)
        if takes_kernels(x):
            return linear(x, self._weight, self._bias)
        return linear_of_few_sizes(x, self._weight, self._bias)


def plain_linears(*modules: Any) -> list[nn.Linear] | None:
    """Return the modules if they are torch's linear layers with an input in common, else None."""
    if not all(type(module) is nn.Linear for module in modules):
        return None
    layers: list[nn.Linear] = list(modules)
    if len({layer.in_features for layer in layers}) > 1:
        return None
    return layers


def _joined_bias(layers: Sequence[nn.Linear], as_float: bool = True) -> torch.Tensor | None:
    """Return the layers' biases in one tensor, zeros where only some layers have one."""
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    joined = torch.cat(parts)
    return joined.float() if as_float else joined


_EPSILON_NAMES = ("variance_epsilon", "eps", "norm_eps")


class RmsNorm:
    """x / rms(x) * weight, over the last dimension, in the dtype of x.

    Models of low precision round before the weights as well, as Llama's do, or after them only, as
    Gemma's: `rounded_to` is what the former round to, None for the latter. `scale`, `floor` and
    `last` are what `rounded_norm` takes.
    """

    def __init__(
        self,
        weight: torch.Tensor | None,
        width: int,
        epsilon: float,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        """`weight` is float32, [width], or [rows, width] to give rows of x weights of their own."""
        device = weight.device if weight is not None else None
        self.width = width
        self.epsilon = epsilon
        self.weight = weight
        self.rounded_to = rounded_to
        self.last: torch.Tensor | None = None
        scale = torch.ones(width, dtype=torch.float32, device=device)
        if weight is not None and rounded_to is not None:
            self.last = weight.to(rounded_to)
        elif weight is not None:
            scale = weight
        self.scale = scale * width**0.5
        self.floor = torch.tensor((epsilon * width) ** 0.5, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if takes_kernels(x) and self.weight is not None and self.weight.dim() == 1:
            return rms_norm(x, self.weight, self.epsilon)
        return rounded_norm(x, self.scale, self.floor, self.last)

    def of_sum(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum of both, and the sum, for which `x` is given up."""
        if takes_kernels(x) and self.weight is not None and self.weight.dim() == 1:
            return add_rms_norm(x, stream, self.weight, self.epsilon)
        total = x.add_(stream)
        return self(total), total


def rounded_norm(
    x: torch.Tensor, scale: torch.Tensor, floor: torch.Tensor, last: torch.Tensor | None
) -> torch.Tensor:
    """Return `normed` in the dtype of x, multiplied by `last` after that where there is one."""
    out = normed(x.float(), scale, floor).to(x.dtype)
    return out if last is None else out.mul_(last)


def normed(x: torch.Tensor, scale: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return x, float32, divided by its root mean square over the last dimension and weighted.

    The mean of squares plus epsilon is the hypotenuse of the vector's length and a constant, the
    `floor`: four operations instead of six, which is what a norm over one row costs on a CPU.
    """
    length = torch.linalg.vector_norm(x, 2, [-1], True)
    return (x * scale).div_(torch.hypot(length, floor))


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [num_tokens, num_heads, dim] by halves, as GPT-NeoX and Llama do.

    cos, sin [num_tokens, 1, dim], the sines' first half negated; dimensions beyond those that there
    are angles for pass as they are.
    """
    width = cos.shape[-1]
    turning = heads[..., :width] if width < heads.shape[-1] else heads
    # Not by one operation for both: low precision rounds the products, as models do, then the sum.
    turned = (turning * cos).add_(turning.roll([width // 2], [-1]).mul_(sin))
    if width < heads.shape[-1]:
        turned = torch.cat((turned, heads[..., width:]), dim=-1)
    return turned


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), with gate and up as one product of twice `width` columns."""

    gate_up: Product
    down: Product
    act: Callable[[torch.Tensor], torch.Tensor]
    num_inputs: int
    width: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        gate, up = both[..., : self.width], both[..., self.width :]
        gated = gate_of(self.act) if takes_kernels(x) else None
        return self.down(self.act(gate).mul_(up) if gated is None else gated(gate, up))


def rms_norms(
    module: nn.Module, width: int, dtype: torch.dtype = torch.float32
) -> list[tuple[str, RmsNorm]]:
    """Return what a module that looks like an RMS norm may be, by how its weight is read; empty for
    any other module.

    Gemma's weights are offsets from one: both readings are candidates. For rows in a `dtype` of low
    precision so are both places to round at.
    """
    epsilon = next((getattr(module, n) for n in _EPSILON_NAMES if hasattr(module, n)), None)
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith("Norm") or not isinstance(epsilon, float):
        return []
    if not parameters:
        return [("none", RmsNorm(None, width, epsilon))]
    weight = parameters.get("weight")
    if len(parameters) > 1 or weight is None or weight.shape != (width,):
        return []
    plain = weight.detach().float()
    found = [
        ("weight", RmsNorm(plain, width, epsilon)),
        ("1 + weight", RmsNorm(1.0 + plain, width, epsilon)),
    ]
    if dtype != torch.float32:
        found.insert(0, ("weight", RmsNorm(plain, width, epsilon, rounded_to=dtype)))
    return found


def mlp_linears(module: Any) -> tuple[list[nn.Linear], list[nn.Linear]] | None:
    """Return gate and up, and down, of a gated MLP; None for any other module."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, name) for name in names):
        return None
    gate_up = plain_linears(module.gate_proj, module.up_proj)
    down = plain_linears(module.down_proj)
    return (gate_up, down) if gate_up is not None and down is not None else None


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention computing in the dtype of its input.

    scale     what scores are multiplied with
    norm      normalises the heads of Q and K, one weight a head; None where there is none
    rotates   false for layers without position encoding
    softcap, sinks   as of `paged_attention`
    has_halves       the angles come once each, as gpt-oss has them, and not twice in a row
    """

    qkv: Product
    out: Product
    layer: LayerSpec
    scale: float
    norm: RmsNorm | None
    rotates: bool
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    has_halves: bool = False

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: KvBinding,
    ) -> torch.Tensor:
        """Attend x, [num_tokens, hidden_size], after writing its KV to the running step's slots.

        cos, sin   [1, num_tokens, key_dim], as transformers hands them to its layers; half of that
                   if the layer `has_halves`
        """
        batch = binding.context.batch
        assert batch is not None, "attention outside of a step"
        qkv = self.qkv(x)
        if takes_kernels(x) and self.rotates:
            halves = (cos[0], sin[0]) if self.has_halves else _halves(cos, sin)
            query = self._write_at_once(qkv, Rotation(*halves), binding, batch)
        else:
            if self.has_halves:
                cos, sin = (torch.cat((angles, angles), dim=-1) for angles in (cos, sin))
            query = self._write(qkv, cos, sin, binding, batch)
        return self.out(self._attended(query, binding, batch).flatten(1).to(x.dtype))

    def _attended(
        self, query: torch.Tensor, binding: KvBinding, batch: ForwardBatch
    ) -> torch.Tensor:
        return binding.kv.attend(
            query,
            batch.sequences,
            span=binding.layer.span,
            scale=self.scale,
            softcap=self.softcap if binding.layer.has_softcap else None,
            sinks=self.sinks if binding.layer.has_sinks else None,
        )

    def _write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: KvBinding,
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
        if isinstance(binding, LayerBinding):
            # One cast for Q and K: attention runs in the dtype of the pools.
            heads = heads.to(binding.keys.dtype)
        value = qkv[:, qk_width:].view(num_tokens, layer.num_kv_heads, layer.value_dim)
        binding.kv.write(heads[:, num_heads:], value, batch.slot_mapping)
        return heads[:, :num_heads]

    def _write_at_once(
        self, qkv: torch.Tensor, rotation: Rotation, binding: KvBinding, batch: ForwardBatch
    ) -> torch.Tensor:
        """The same as one kernel, or two where KV is not plain: the first then rotates the step's
        keys into memory of their own, from where the KV layer stores them in its form.
        """
        layer, num_tokens = self.layer, qkv.shape[0]
        query_width, key_width = (
            count * layer.key_dim for count in (layer.num_heads, layer.num_kv_heads)
        )
        query, key, value = qkv.tensor_split((query_width, query_width + key_width), dim=1)
        if isinstance(binding, LayerBinding):
            target = StepKv(binding.keys, binding.values, batch.slot_mapping)
        else:
            shape = (num_tokens, 1, layer.num_kv_heads)  # a block of one slot for each token
            target = StepKv(
                qkv.new_empty(*shape, layer.key_dim),
                qkv.new_empty(*shape, layer.value_dim),
                _row_numbers(num_tokens, qkv.device, binding.context.memo),
            )
        rotated_query = rope_kv_write(
            query.view(num_tokens, layer.num_heads, layer.key_dim),
            key.view(num_tokens, layer.num_kv_heads, layer.key_dim),
            value.view(num_tokens, layer.num_kv_heads, layer.value_dim),
            rotation,
            target,
            self._head_norms(),
        )
        if not isinstance(binding, LayerBinding):
            keys, values = target.key_pool[:, 0], target.value_pool[:, 0]
            binding.kv.write(keys, values, batch.slot_mapping)
        return rotated_query

    def _head_norms(self) -> HeadNorms | None:
        if self.norm is None:
            return None
        assert self.norm.weight is not None
        weights = self.norm.weight[0], self.norm.weight[self.layer.num_heads]
        return HeadNorms(*weights, self.norm.epsilon)


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


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


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


def join_layer(
    attention: FusedAttention, mlp: GatedMlp, norms: Mapping[str, RmsNorm]
) -> FusedLayer | None:
    """Return the layer that norms of these names make, None where there is no such order."""
    if set(norms) == set(_GEMMA_NORMS):
        first, second, third, fourth = (norms[name] for name in _GEMMA_NORMS)
        return FusedLayer(attention, mlp, first, second, third, fourth)
    if set(norms) == set(_LLAMA_NORMS):
        first, second = (norms[name] for name in _LLAMA_NORMS)
        return FusedLayer(attention, mlp, first, None, second, None)
    return None
