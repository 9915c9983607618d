"""Decoder layers' operations, run by TorchScript instead of Python.

On a CPU a step of few rows is a thousand small operations, and calling them from Python costs as
much as they do; calling the packed product, whose weights are no tensor, more than a small one
takes. TorchScript runs the same operations in the same order: nothing is compiled, and the numbers
are the same to the bit. One script runs any number of layers that are built alike: what differs
between them is in lists, so that it is made once and not layer by layer. torch announces that
TorchScript will go some day; without it layers run as they are written in `fuse_layer.py`. Knows
the order of operations there; proves nothing.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Protocol

import torch
from torch import nn

from kvchat.model.fuse_linear import HalfProduct, MergedProduct, Product
from kvchat.model.fuse_parts import RmsNorm, rotated, rounded_norm
from kvchat_kernels.few_sizes import linear_of_few_sizes
from kvchat_kernels.paged_attention.cpu_gathered import attend_gathered
from kvchat_kernels.paged_attention.torch_cpu import attend_fused

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
    if None in kinds or activation is None:
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
