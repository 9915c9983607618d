"""Norms and gated MLPs as few operations, made from modules recognised by what they hold.

Knows the forms they take in transformers' models. Whether a form was rightly guessed is for `fuse`
to find out, by running both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.fuse_kernels import gate_of, takes_kernels
from kvchat.model.fuse_linear import Product, plain_linears
from kvchat_kernels.rms_norm import add_rms_norm, rms_norm

_EPSILON_NAMES = ("variance_epsilon", "eps", "norm_eps")


class RmsNorm:
    """x / rms(x) * weight, over the last dimension, in the dtype of x.

    `scale` and `floor` are what `normed` takes.
    """

    def __init__(self, weight: torch.Tensor | None, width: int, epsilon: float) -> None:
        """`weight` is [width], or [rows, width] to give rows of x weights of their own."""
        device = weight.device if weight is not None else None
        self.width = width
        self.epsilon = epsilon
        self.weight = weight
        scale = torch.ones(width, device=device) if weight is None else weight.float()
        self.scale = scale * width**0.5
        self.floor = torch.tensor((epsilon * width) ** 0.5, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if takes_kernels(x) and self.weight is not None and self.weight.dim() == 1:
            return rms_norm(x, self.weight, self.epsilon)
        rows = x if x.dtype == torch.float32 else x.float()
        out = normed(rows, self.scale, self.floor)
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def of_sum(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum of both, and the sum, for which `x` is given up."""
        if takes_kernels(x) and self.weight is not None and self.weight.dim() == 1:
            return add_rms_norm(x, stream, self.weight, self.epsilon)
        total = x.add_(stream)
        return self(total), total


# TorchScript compiles these two as well: types are written out, and nothing is left to guess.


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
    turned = torch.addcmul(turning * cos, turning.roll([width // 2], [-1]), sin)
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


def rms_norms(module: nn.Module, width: int) -> list[RmsNorm]:
    """Return what a module that looks like an RMS norm may be; empty for any other.

    Gemma's weights are offsets from one: both readings are candidates.
    """
    epsilon = next((getattr(module, n) for n in _EPSILON_NAMES if hasattr(module, n)), None)
    parameters = dict(module.named_parameters())
    if not type(module).__name__.endswith("Norm") or not isinstance(epsilon, float):
        return []
    if not parameters:
        return [RmsNorm(None, width, epsilon)]
    weight = parameters.get("weight")
    if len(parameters) > 1 or weight is None or weight.shape != (width,):
        return []
    plain = weight.detach().float()
    return [RmsNorm(plain, width, epsilon), RmsNorm(1.0 + plain, width, epsilon)]


def mlp_linears(module: Any) -> tuple[list[nn.Linear], list[nn.Linear]] | None:
    """Return gate and up, and down, of a gated MLP; None for any other module."""
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(hasattr(module, name) for name in names):
        return None
    gate_up = plain_linears(module.gate_proj, module.up_proj)
    down = plain_linears(module.down_proj)
    return (gate_up, down) if gate_up is not None and down is not None else None
