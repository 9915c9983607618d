"""A decoder layer's operations beside attention, run by TorchScript instead of Python.

On a CPU a step of few rows is a thousand small operations, and calling them from Python costs as
much as they do; calling the packed product, whose weights are no tensor, more than a small one
takes. TorchScript runs the same operations in the same order: nothing is compiled, and the numbers
are the same to the bit. torch announces that it will go some day; without it layers run as they
are written in `fuse_layer.py`. Knows the order of operations there; proves nothing.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Protocol

import torch
from torch import nn

from kvchat.model.fuse_linear import HalfProduct, MergedProduct
from kvchat.model.fuse_parts import RmsNorm, normed, rotated
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


@dataclass(frozen=True, slots=True)
class LayerScript:
    """What a layer does before its attention, after it, and all of it where attention is the fused
    kernel's for one sequence. cos, sin [num_tokens, 1, dim], the sines'
    first half negated.

    before   (x, cos, sin, keys) -> Q and K as one, [num_tokens, num_heads + num_kv_heads, key_dim],
             and V, [num_tokens, num_kv_heads, value_dim], in the dtype of `keys`
    after    (attended [num_tokens, num_heads, value_dim], x) -> the stream after the layer
    whole    (x, cos, sin, keys, values, slots, runs, mask, key room, value room) -> the same; the
             pools, where in them the new tokens go, no slot being -1, and what FusedStep holds
    """

    before: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    whole: Callable[..., torch.Tensor]


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


def script_of(layer: LayerParts) -> LayerScript | None:
    """Return a layer's script, None where its parts are not of the kind, or torch refuses."""
    attention, mlp = layer.attention, layer.mlp
    own = attention.qkv, attention.out, mlp.gate_up, mlp.down
    products = [script for product in own if (script := _scripted(product)) is not None]
    activation = _ACTIVATIONS.get(type(mlp.act).__name__)
    if len(products) < len(own) or activation is None:
        return None
    before = _Before(layer.before_attention, products[0], attention)
    after = _After(layer, products[1:], mlp.width, activation)
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            whole = torch.jit.script(_Whole(before, after, attention.scale))
    except (AttributeError, RuntimeError, OSError) as error:
        _log.info("not run as a script: %s", error)
        return None
    return LayerScript(whole.before.forward, whole.after.forward, whole.forward)


def reason_of(error: RuntimeError) -> str:
    """Return what went wrong in a script, as Python would have said it; "" for any other error.

    TorchScript says where it was first, and people are told an error's first line.
    """
    message = str(error)
    return message.partition(_REASON)[2] if message.startswith(_IN_A_SCRIPT) else ""


def _scripted(product: object) -> nn.Module | None:
    """Return a product in TorchScript's terms, None where it is no such product, or several."""
    if isinstance(product, HalfProduct):
        return _Half(*product.packs) if len(product.packs) == 1 else None
    if isinstance(product, MergedProduct) and product.operands.weight.device.type == "cpu":
        return _Plain(product.operands.weight, product.operands.bias)
    return None


# What follows TorchScript compiles: types are written out, and nothing is left to guess.


class _Half(nn.Module):
    """A HalfProduct's."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.pack)
        return out


class _Plain(nn.Module):
    """A MergedProduct's, which stay its own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def _normed(x: torch.Tensor, scale: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return normed(x.float(), scale, floor).to(x.dtype)


class _Before(nn.Module):
    """Norm, the product for Q, K and V, norms of heads, rotation."""

    num_heads: Final[int]
    key_dim: Final[int]
    value_dim: Final[int]
    qk_width: Final[int]
    has_head_norm: Final[bool]
    rotates: Final[bool]

    def __init__(self, norm: RmsNorm, qkv: nn.Module, attention: Any) -> None:
        super().__init__()
        layer, head_norm = attention.layer, attention.norm
        self.num_heads = layer.num_heads
        self.key_dim = layer.key_dim
        self.value_dim = layer.value_dim
        self.qk_width = (layer.num_heads + layer.num_kv_heads) * layer.key_dim
        self.rotates = attention.rotates
        self.has_head_norm = head_norm is not None
        self.scale, self.floor = norm.scale, norm.floor
        heads = head_norm if head_norm is not None else norm
        self.head_scale, self.head_floor = heads.scale, heads.floor
        self.qkv = qkv

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = x.shape[0]
        rows = _normed(x, self.scale, self.floor)
        qkv = self.qkv(rows)
        heads = qkv[:, : self.qk_width].view(num_tokens, -1, self.key_dim)
        value = qkv[:, self.qk_width :].view(num_tokens, -1, self.value_dim)
        if self.has_head_norm:
            heads = _normed(heads, self.head_scale, self.head_floor)
        if self.rotates:
            heads = rotated(heads, cos, sin)
        return heads.to(keys.dtype), value.to(keys.dtype)


class _After(nn.Module):
    """The product behind attention, the residual stream, norms, and the gated MLP."""

    width: Final[int]
    activation: Final[int]
    norms_attention: Final[bool]
    norms_mlp: Final[bool]

    def __init__(
        self, layer: LayerParts, products: list[nn.Module], width: int, activation: int
    ) -> None:
        super().__init__()
        self.width = width
        self.activation = activation
        self.norms_attention = layer.after_attention is not None
        self.norms_mlp = layer.after_mlp is not None
        norm = layer.before_mlp
        first, second = layer.after_attention or norm, layer.after_mlp or norm
        self.scale, self.floor = norm.scale, norm.floor
        self.attention_scale, self.attention_floor = first.scale, first.floor
        self.mlp_scale, self.mlp_floor = second.scale, second.floor
        self.out, self.gate_up, self.down = products

    def forward(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = attended.flatten(1).to(x.dtype)
        stream = self.out(rows)
        if self.norms_attention:
            stream = _normed(stream, self.attention_scale, self.attention_floor)
        stream = stream.add_(x)
        rows = _normed(stream, self.scale, self.floor)
        both = self.gate_up(rows)
        gate, up = both[..., : self.width], both[..., self.width :]
        if self.activation == 0:
            gate = nn.functional.silu(gate)
        elif self.activation == 1:
            gate = nn.functional.gelu(gate)
        else:
            gate = nn.functional.gelu(gate, approximate="tanh")
        out = self.down(gate.mul_(up))
        if self.norms_mlp:
            out = _normed(out, self.mlp_scale, self.mlp_floor)
        return out.add_(stream)


class _Whole(nn.Module):
    """A layer over the KV of one sequence."""

    num_heads: Final[int]
    scale: Final[float]

    def __init__(self, before: _Before, after: _After, scale: float) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.num_heads = before.num_heads
        self.scale = scale

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        runs: list[tuple[int, int]],
        mask: torch.Tensor | None,
        key_room: torch.Tensor,
        value_room: torch.Tensor,
    ) -> torch.Tensor:
        heads, value = self.before(x, cos, sin, keys)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        keys.index_copy_(0, slots, heads[:, self.num_heads :])
        values.index_copy_(0, slots, value)
        keys, values = _joined(keys, runs, key_room), _joined(values, runs, value_room)
        attended = attend_fused(heads[:, : self.num_heads], keys, values, mask, self.scale, None)
        return self.after(attended, x)


def _joined(tokens: torch.Tensor, runs: list[tuple[int, int]], room: torch.Tensor) -> torch.Tensor:
    if room.shape[0] == 0:
        return tokens[runs[0][0] : runs[0][1]]
    return torch.cat([tokens[run[0] : run[1]] for run in runs], out=room)
