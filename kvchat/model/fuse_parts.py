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
        scale = torch.ones(width, device=device)
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


# TorchScript compiles these as well: types are written out, and nothing is left to guess.


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
