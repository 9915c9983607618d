"""Fused decoder layers: one by one, as a TorchScript, and all layers of a model in one script.

On a CPU a step of few rows is a thousand small operations, and calling them from Python costs as
much as they do. TorchScript runs the same operations in the same order: nothing is compiled, and
the numbers are the same to the bit. One script runs any number of layers that are built alike. A
whole model's step is then embedding, layers, norm and head in four calls, which saves a tenth of a
small model's step and half of a tiny one's; its first steps run both ways and are compared.

torch announces that TorchScript will go some day; without it layers run as `FusedLayer` has them.
Whether a layer is of one of the two orders known here, Llama's and Gemma's, is checked in
`fuse_search`.
"""

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Protocol

import torch
from torch import nn

from kvchat.model.batch import ForwardBatch
from kvchat.model.fused_parts import (
    FusedAttention,
    GatedMlp,
    HalfProduct,
    MergedProduct,
    Product,
    RmsNorm,
    rotated,
    rotation,
    rounded_norm,
    takes_kernels,
)
from kvchat.model.hf_adapter import LayerBinding, binding_of, pools_of
from kvchat.model.spec import LayerSpec, ModelSpec
from kvchat_kernels.cpu_products import linear_of_few_sizes
from kvchat_kernels.paged_attention import PagedSequences
from kvchat_kernels.paged_attention.cpu import FusedStep, attend_gathered, columns_of
from kvchat_kernels.paged_attention.cpu_fused import attend_fused

_log = logging.getLogger(__name__)

# Activations by the names of their classes, torch's own and transformers'.
_SILU, _GELU, _GELU_TANH = range(3)
_ACTIVATIONS = {
    "SiLU": _SILU,
    "SiLUActivation": _SILU,
    "GELUActivation": _GELU,
    "GELUTanh": _GELU_TANH,
    "PytorchGELUTanh": _GELU_TANH,
}
_IN_A_SCRIPT = "The following operation failed in the TorchScript interpreter."
_REASON = "\nRuntimeError: "
# TorchScript keeps what it has compiled where all threads see it, and locks nothing.
_ONE_AT_A_TIME = Lock()


class LayerParts(Protocol):
    """What `script_of` reads of a fused layer."""

    @property
    def attention(self) -> Any: ...
    @property
    def mlp(self) -> Any: ...
    @property
    def before_attention(self) -> RmsNorm: ...
    @property
    def after_attention(self) -> RmsNorm | None: ...
    @property
    def before_mlp(self) -> RmsNorm: ...
    @property
    def after_mlp(self) -> RmsNorm | None: ...


@dataclass(frozen=True, slots=True)
class LayerScript:
    """What layers do before their attention, after it, and all of it where FusedStep says how one
    sequence is attended. cos, sin [num_tokens, 1, dim], the sines' first half negated; `index`
    counts the layers of the script.

    before   (x, cos, sin, keys, index) -> Q and K as one, [num_tokens, num_heads + num_kv_heads,
             key_dim], and V, [num_tokens, num_kv_heads, value_dim], in the dtype of `keys`
    after    (attended [num_tokens, num_heads, value_dim], x, index) -> the stream after the layer
    run      (x, cos, sin, pools, slots, runs, masks, key rooms, value rooms, places, numbers of
             keys, first index, 0 unless given) -> the stream after so many layers from there as
             there are pools; slots are where in the pools the new tokens go, none being -1; what
             follows x, but them, are lists over these layers: angles, pairs of pools, and what
             FusedStep holds
    """

    before: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    after: Callable[..., torch.Tensor]
    run: Callable[..., torch.Tensor]


def script_of(layers: Sequence[LayerParts]) -> LayerScript | None:
    """Return the script of layers that follow each other.

    None where their parts are not of the kind, where they are not built alike, or torch refuses.
    """
    forms = {form_of(layer) for layer in layers}
    if len(forms) > 1 or None in forms:
        return None
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            script = torch.jit.script(_Layers(layers))
    except (AttributeError, RuntimeError, OSError) as error:
        _log.info("not run as a script: %s", error)
        return None
    return LayerScript(script.before, script.after, script.forward)


def reason_of(error: RuntimeError) -> str:
    """Return what went wrong in a script, as Python would have said it; "" for any other error.

    TorchScript says where it was first, and people are told an error's first line.
    """
    message = str(error)
    return message.partition(_REASON)[2] if message.startswith(_IN_A_SCRIPT) else ""


def form_of(layer: LayerParts) -> tuple[object, ...] | None:
    """Return what layers of one script have in common, None for a layer that is in none."""
    attention, mlp = layer.attention, layer.mlp
    products = attention.qkv, attention.out, mlp.gate_up, mlp.down
    kinds = tuple(_kind(product) for product in products)
    activation = _ACTIVATIONS.get(type(mlp.act).__name__)
    if None in kinds or activation is None or not attention.is_plain:
        return None
    own = attention.layer
    shape = own.num_heads, own.num_kv_heads, own.key_dim, own.value_dim, mlp.width
    has_norms = (
        norm is not None for norm in (attention.norm, layer.after_attention, layer.after_mlp)
    )
    return (*kinds, activation, *shape, *has_norms)


def _kind(product: Product) -> type[nn.Module] | None:
    """Return what holds such products in a script, None where nothing does."""
    if isinstance(product, HalfProduct):
        return _Halves if len(product.packs) == 1 else None
    if isinstance(product, MergedProduct) and product.operands.weight.device.type == "cpu":
        return _Plain
    return None


# What follows TorchScript compiles: types are written out, and nothing is left to guess. The type
# of packed weights is known once torch's quantized operators are.


class _Halves(nn.Module):
    """HalfProducts' packs."""

    packs: list[torch.classes.quantized.LinearPackedParamsBase]  # type: ignore[name-defined]

    def __init__(self, products: Sequence[HalfProduct]) -> None:
        super().__init__()
        self.packs = [product.packs[0] for product in products]

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packs[index])
        return out.to(x.dtype)


class _Plain(nn.Module):
    """MergedProducts' weights, which stay their own."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]

    def __init__(self, products: Sequence[MergedProduct]) -> None:
        super().__init__()
        self.weights = [product.operands.weight for product in products]
        self.biases = [product.operands.bias for product in products]

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return linear_of_few_sizes(x, self.weights[index], self.biases[index])


class _Norms(nn.Module):
    """RmsNorms in the dtype of what they norm; any that is not there is not asked for."""

    scales: list[torch.Tensor]
    floors: list[torch.Tensor]
    lasts: list[torch.Tensor | None]

    def __init__(self, norms: Sequence[RmsNorm | None]) -> None:
        super().__init__()
        self.scales = [norm.scale for norm in norms if norm is not None]
        self.floors = [norm.floor for norm in norms if norm is not None]
        self.lasts = [norm.last for norm in norms if norm is not None]

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return rounded_norm(x, self.scales[index], self.floors[index], self.lasts[index])


class _Layers(nn.Module):
    """Layers built alike."""

    num_heads: Final[int]
    key_dim: Final[int]
    value_dim: Final[int]
    qk_width: Final[int]
    width: Final[int]
    activation: Final[int]
    has_head_norm: Final[bool]
    norms_attention: Final[bool]
    norms_mlp: Final[bool]
    rotates: list[bool]
    scales: list[float]

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        super().__init__()
        first, attentions = layers[0], [layer.attention for layer in layers]
        own = attentions[0].layer
        self.num_heads = own.num_heads
        self.key_dim = own.key_dim
        self.value_dim = own.value_dim
        self.qk_width = (own.num_heads + own.num_kv_heads) * own.key_dim
        self.width = first.mlp.width
        self.activation = _ACTIVATIONS[type(first.mlp.act).__name__]
        self.rotates = [attention.rotates for attention in attentions]
        self.scales = [attention.scale for attention in attentions]
        self.has_head_norm = attentions[0].norm is not None
        self.norms_attention = first.after_attention is not None
        self.norms_mlp = first.after_mlp is not None
        self.head_norms = _Norms([attention.norm for attention in attentions])
        self.before_attention = _Norms([layer.before_attention for layer in layers])
        self.after_attention = _Norms([layer.after_attention for layer in layers])
        self.before_mlp = _Norms([layer.before_mlp for layer in layers])
        self.after_mlp = _Norms([layer.after_mlp for layer in layers])
        self.qkv = _products([attention.qkv for attention in attentions])
        self.out = _products([attention.out for attention in attentions])
        self.gate_up = _products([layer.mlp.gate_up for layer in layers])
        self.down = _products([layer.mlp.down for layer in layers])

    @torch.jit.export
    def before(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, the product for Q, K and V, norms of heads, rotation."""
        num_tokens = x.shape[0]
        qkv = self.qkv(self.before_attention(x, index), index)
        heads = qkv[:, : self.qk_width].view(num_tokens, -1, self.key_dim)
        value = qkv[:, self.qk_width :].view(num_tokens, -1, self.value_dim)
        if self.has_head_norm:
            heads = self.head_norms(heads, index)
        if self.rotates[index]:
            heads = rotated(heads, cos, sin)
        return heads.to(keys.dtype), value.to(keys.dtype)

    @torch.jit.export
    def after(self, attended: torch.Tensor, x: torch.Tensor, index: int) -> torch.Tensor:
        """The product behind attention, the residual stream, norms, and the gated MLP."""
        rows = attended.flatten(1).to(x.dtype)
        stream = self.out(rows, index)
        if self.norms_attention:
            stream = self.after_attention(stream, index)
        stream = stream.add_(x)
        both = self.gate_up(self.before_mlp(stream, index), index)
        gate, up = both[..., : self.width], both[..., self.width :]
        if self.activation == 0:
            gate = nn.functional.silu(gate)
        elif self.activation == 1:
            gate = nn.functional.gelu(gate)
        else:
            gate = nn.functional.gelu(gate, approximate="tanh")
        out = self.down(gate.mul_(up), index)
        if self.norms_mlp:
            out = self.after_mlp(out, index)
        return out.add_(stream)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        runs: list[tuple[int, int]],
        mask: torch.Tensor | None,
        key_room: torch.Tensor,
        value_room: torch.Tensor,
        places: torch.Tensor | None,
        num_keys: int,
        scale: float,
    ) -> torch.Tensor:
        """The kernel or the products, over one sequence's tokens."""
        if places is not None:
            room = key_room, value_room
            return attend_gathered(query, keys, values, places, num_keys, *room, scale, None)
        keys, values = _joined(keys, runs, key_room), _joined(values, runs, value_room)
        return attend_fused(query, keys, values, mask, scale, None)

    def forward(
        self,
        x: torch.Tensor,
        cos: list[torch.Tensor],
        sin: list[torch.Tensor],
        pools: list[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        runs: list[list[tuple[int, int]]],
        masks: list[torch.Tensor | None],
        key_rooms: list[torch.Tensor],
        value_rooms: list[torch.Tensor],
        places: list[torch.Tensor | None],
        num_keys: list[int],
        first: int = 0,
    ) -> torch.Tensor:
        for place in range(len(pools)):
            index = first + place
            keys, values = pools[place]
            heads, value = self.before(x, cos[place], sin[place], keys, index)
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            keys.index_copy_(0, slots, heads[:, self.num_heads :])
            values.index_copy_(0, slots, value)
            attended = self.attend(
                heads[:, : self.num_heads],
                keys,
                values,
                runs[place],
                masks[place],
                key_rooms[place],
                value_rooms[place],
                places[place],
                num_keys[place],
                self.scales[index],
            )
            x = self.after(attended, x, index)
        return x


def _products(products: Sequence[Any]) -> nn.Module:
    kind: Any = _kind(products[0])
    made: nn.Module = kind(products)
    return made


def _joined(tokens: torch.Tensor, runs: list[tuple[int, int]], room: torch.Tensor) -> torch.Tensor:
    if room.shape[0] == 0:
        return tokens[runs[0][0] : runs[0][1]]
    return torch.cat([tokens[run[0] : run[1]] for run in runs], out=room)


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """x + attention(norm x), then x + mlp(norm x); Gemma norms what is added as well.

    `script` does the same without Python between the operations, where there is one; in it the
    layer is that of `index`.
    """

    attention: FusedAttention
    mlp: GatedMlp
    before_attention: RmsNorm
    after_attention: RmsNorm | None
    before_mlp: RmsNorm
    after_mlp: RmsNorm | None
    script: LayerScript | None = None
    index: int = 0

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, binding: LayerBinding
    ) -> torch.Tensor:
        """Return the stream after this layer: [num_tokens, hidden_size] in x's dtype."""
        if self.script is not None and not takes_kernels(x):
            try:
                return self._run(self.script, x, cos, sin, binding)
            except RuntimeError as error:
                if reason := reason_of(error):
                    raise RuntimeError(reason) from error
                raise
        attended = self.attention(self.before_attention(x), cos, sin, binding)
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        normed, x = self.before_mlp.of_sum(attended, x)
        out = self.mlp(normed)
        if self.after_mlp is not None:
            out = self.after_mlp(out)
        return out.add_(x)

    def _run(
        self,
        script: LayerScript,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: LayerBinding,
    ) -> torch.Tensor:
        batch, memo, keys = binding.context.batch, binding.context.memo, binding.keys
        assert batch is not None, "attention outside of a step"
        cos, sin = rotation(cos, sin, x.dtype, memo)
        step = self.attention.fused_step(binding, batch)
        if step is None:
            # Nothing holds on to Q, K and V: of many rows the MLP wants the memory itself.
            attended = self.attention.attend(*script.before(x, cos, sin, keys, self.index), binding)
            return script.after(attended, x, self.index)
        pools, slots = [(keys, binding.values)], batch.slot_mapping
        return script.run(x, [cos], [sin], pools, slots, *columns_of([step]), self.index)


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


def with_scripts(layers: Sequence[FusedLayer]) -> list[FusedLayer]:
    """Return the layers, in one script those that are built alike, where torch makes one of them.

    A script a layer would take twenty times as long to make, for a model of twenty: it is parsed
    anew for each.
    """
    made = list(layers)
    alike: dict[object, list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        alike[form_of(layer)].append(place)
    for places in alike.values():
        script = script_of([layers[place] for place in places])
        for index, place in enumerate(places):
            made[place] = replace(layers[place], script=script, index=index)
    return made


Forward = Callable[[ForwardBatch], torch.Tensor]

# In each form that TorchScript gives a script: as it is run first, and from then on. That a model
# is more than its parts does not hang on the number of rows.
_NUM_CHECKS = 2
_FIRST_ANGLES = 1024
_MOST_ANGLES = 1 << 14


class Angles:
    """Cosines and sines of positions, as `rotation` gives them, made once for many positions.

    `rotary` is transformers' module, its frequencies fixed; `like` a tensor in the dtype that its
    output is to have; `kinds` names the kind of layer, where a module has angles for several. They
    are handed on in `dtype`.
    """

    def __init__(self, rotary: Any, like: torch.Tensor, dtype: torch.dtype, *kinds: str) -> None:
        """Raises ValueError where the module gives anything but cosines and sines."""
        self._rotary, self._like, self._dtype, self._kinds = rotary, like, dtype, kinds
        self._cos, self._sin = self._made(torch.arange(_FIRST_ANGLES))

    def at(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both for `positions`, [num_tokens] and all below `end`: [num_tokens, 1, dim]."""
        if end > _MOST_ANGLES:
            return self._made(positions)
        if end > self._cos.shape[0]:
            self._cos, self._sin = self._made(torch.arange(min(2 * end, _MOST_ANGLES)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _made(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self._rotary(self._like, positions[None], *self._kinds)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ValueError("angles of another kind")
        return rotation(*made, self._dtype, {})


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """A decoder layer, the attention module its binding is tied to, and its angles."""

    fused: FusedLayer
    attention: nn.Module
    angles: Angles


class WholeModel:
    """Runs steps of one sequence whose layers all are scripts, once its first steps were checked.

    What it is made of belongs to the model.
    """

    def __init__(
        self,
        embedding: nn.Module,
        layers: Sequence[BoundLayer],
        script: LayerScript,
        norm: RmsNorm,
        head: Product,
        compute_dtype: torch.dtype,
        max_rows: int,
    ) -> None:
        self._embedding = embedding
        self._layers = tuple(layers)
        self._angles = tuple(dict.fromkeys(layer.angles for layer in layers))
        # Layers of a kind reach a step's tokens in one way, which is asked for once.
        kinds = [_attention_kind(layer.fused.attention.layer) for layer in layers]
        self._kinds = tuple(kinds.index(kind) for kind in kinds)
        self._script = script
        self._norm = norm
        self._head = head
        self._compute_dtype = compute_dtype
        self._max_rows = max_rows
        self._num_checks = 0
        self._is_refuted = False

    @property
    def is_checked(self) -> bool:
        """Whether no step runs both ways any more."""
        return self._is_refuted or self._num_checks >= _NUM_CHECKS

    def logits(self, batch: ForwardBatch, own: Forward) -> torch.Tensor:
        """Run a step as `own` does, which runs where this cannot, or is not checked yet.

        Returns [num_rows, vocab_size] float32, owned by the caller.
        """
        num_rows = batch.token_ids.shape[0]
        if self._is_refuted or num_rows > self._max_rows:
            return own(batch)
        if not self.is_checked and not batch.logit_rows.shape[0]:
            return own(batch)
        steps = self._steps(batch)
        if steps is None:
            return own(batch)
        return (
            self._run(batch, steps) if self.is_checked else self._run_both_ways(batch, steps, own)
        )

    def _steps(self, batch: ForwardBatch) -> list[FusedStep] | None:
        """Return how each layer reaches the step's tokens; None where one takes another way."""
        steps: dict[int, FusedStep] = {}
        for kind in dict.fromkeys(self._kinds):
            layer = self._layers[kind]
            step = layer.fused.attention.fused_step(binding_of(layer.attention), batch)
            if step is None:
                return None
            steps[kind] = step
        return [steps[kind] for kind in self._kinds]

    def _run(self, batch: ForwardBatch, steps: Sequence[FusedStep]) -> torch.Tensor:
        assert isinstance(batch.sequences, PagedSequences)
        (end,) = batch.sequences.context_lens
        x = self._embedding(batch.token_ids[None])[0].to(self._compute_dtype)
        made = {angles: angles.at(batch.positions, end) for angles in self._angles}
        cos, sin = zip(*(made[layer.angles] for layer in self._layers), strict=True)
        pools = pools_of([layer.attention for layer in self._layers])
        where = list(cos), list(sin), pools, batch.slot_mapping
        try:
            x = self._script.run(x, *where, *columns_of(steps))
        except RuntimeError as error:
            if reason := reason_of(error):
                raise RuntimeError(reason) from error
            raise
        if x.shape[0] > 1 or not batch.logit_rows.shape[0]:
            x = x.index_select(0, batch.logit_rows)
        return self._head(self._norm(x)).float()

    def _run_both_ways(
        self, batch: ForwardBatch, steps: Sequence[FusedStep], own: Forward
    ) -> torch.Tensor:
        """Run a step both ways and compare; `own` goes last, so that the KV is its own.

        Nothing may differ, for the operations are the same. What is no number shows nothing, and
        no more do logits that are all alike.
        """
        try:
            logits = self._run(batch, steps)
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            _log.warning("not run as a whole: %s", error)
            logits = None
        expected = own(batch)
        if logits is not None and torch.equal(logits, expected):
            self._num_checks += bool((expected != expected[:, :1]).any())
        elif logits is None or bool(expected.isfinite().all()):
            self._is_refuted = True
            _log.info("not run as a whole: it is more than its parts")
        return expected


def join_model(
    module: Any,
    owner: Any,
    spec: ModelSpec,
    fused: Mapping[nn.Module, FusedLayer],
    norm: RmsNorm,
    head: Product,
    compute_dtype: torch.dtype,
    max_rows: int,
) -> WholeModel | None:
    """Return a loaded model's fused parts as one, None where a layer is no script.

    owner      the module that has the list of layers, and what makes their angles
    fused      the layers by their attention modules
    max_rows   of a step whose layers run fused

    Raises whatever a model's own code does where it is not built so.
    """
    embedding = module.get_input_embeddings()
    if takes_kernels(embedding.weight):
        return None
    attentions = [module.get_submodule(layer.module_name) for layer in spec.layers]
    own = [fused[attention] for attention in attentions]
    script = own[0].script
    is_one = all(layer.script is script and layer.index == i for i, layer in enumerate(own))
    if script is None or not is_one:
        return None
    like = embedding(torch.zeros(1, 1, dtype=torch.int64))
    angles = _angles_of_layers(owner, len(own), like, compute_dtype)
    layers = [BoundLayer(*parts) for parts in zip(own, attentions, angles, strict=True)]
    return WholeModel(embedding, layers, script, norm, head, compute_dtype, max_rows)


def _attention_kind(layer: LayerSpec) -> tuple[object, ...]:
    return layer.span, layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim


def _angles_of_layers(
    owner: Any, num_layers: int, like: torch.Tensor, dtype: torch.dtype
) -> list[Angles]:
    rotary = owner.rotary_emb
    if not isinstance(rotary.rope_type, dict):
        return [Angles(rotary, like, dtype)] * num_layers
    kinds = owner.config.layer_types[:num_layers]
    made = {kind: Angles(rotary, like, dtype, kind) for kind in set(kinds)}
    return [made[kind] for kind in kinds]
