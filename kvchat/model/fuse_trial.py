"""Trials: a module and its replacement, run on the same random input and compared.

Knows tolerances and how an attention module is run on its own. Decides nothing.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import nn

from kvchat.model.attention import LayerBinding, StepContext, bind, unbind
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.spec import LayerSpec

_SEED = 0
_BLOCK_SIZE = 4
# Tokens already in the cache, and new ones: more than one of each, within and across blocks.
_NUM_EARLIER = 6
_NUM_ROWS = 3
# Relative, over all outputs. In float32 only the order of additions differs. In low precision a
# replacement that rounds where the module does agrees mostly to the bit. Over packed weights one
# computes in float32, and was never further from the module than 0.008 in bfloat16; a wrong norm,
# rotation or mask makes 0.1 and more.
_TOLERANCE = {torch.float32: 3e-5, torch.float16: 0.01, torch.bfloat16: 0.03}

_TINY = torch.finfo(torch.float32).tiny

# So much further from float32 than the module itself a replacement may be.
_AS_EXACT = 1.5

_FAILURES = (AttributeError, TypeError, RuntimeError, ValueError, LookupError)

Tensors = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerBinding], torch.Tensor]


class Trial:
    """One random input, the same for everybody who asks, in `dtype`; its values are those that
    `rounded_to` has, where that is less precise. `noise` is how far two right results may be apart
    for reasons other than the dtype, as a share of either.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rounded_to: torch.dtype | None = None,
        noise: float = 0.0,
    ) -> None:
        self._generator = torch.Generator()
        self._dtype = dtype
        self._device = device
        self._rounded_to = rounded_to or dtype
        self._tolerance = max(_TOLERANCE[dtype], noise)

    def agree(self, own: torch.Tensor, fused: torch.Tensor) -> bool:
        """Tell whether the replacement's output is the module's, within the dtype's tolerance."""
        return _error(own, fused) <= self._tolerance

    def same(self, module: Tensors, fused: Tensors, width: int) -> bool:
        """Compare two functions of rows of `width`; one that cannot be run does not agree."""
        return self.error(module, fused, width) <= self._tolerance

    def error(self, module: Tensors, fused: Tensors, width: int) -> float:
        """Return how far `fused` is from `module` on rows of `width`, relative to all outputs;
        infinity where one cannot be run.
        """
        self._generator.manual_seed(_SEED)
        x = self._random(1, _NUM_ROWS, width)
        try:
            return _error(module(x), fused(x))
        except _FAILURES:
            return math.inf

    def same_attention(
        self, layer: LayerSpec, attention: nn.Module, own: nn.Module, fused: Attend, width: int
    ) -> bool:
        """Compare `own`, which holds `attention`, with its replacement: outputs and KV written."""
        try:
            mine = self.outputs_of_own(layer, attention, own, width)
            other = self.outputs_of_fused(layer, attention, fused, width)
        except _FAILURES:
            return False
        return all(self.agree(a, b) for a, b in zip(mine, other, strict=True))

    def is_identical(self, layer: LayerSpec, one: Attend, other: Attend, width: int) -> bool:
        """Tell whether two replacements of a layer give the same to the bit, KV included."""
        try:
            mine, others = (
                self.outputs_of_fused(layer, nn.Module(), fused, width) for fused in (one, other)
            )
        except _FAILURES:
            return False
        return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))

    def is_as_exact(
        self, layer: LayerSpec, attention: nn.Module, own: nn.Module, fused: Attend, width: int
    ) -> bool:
        """Tell whether the replacement is as near to the module in float32 as the module itself.

        Attention that has learnt to look at one token is all or nothing: what low precision makes
        of it on random input may be far from what anything else makes of it, and still right.
        """
        exact = Trial(torch.float32, self._device, self._dtype)
        twin = deepcopy(own).float()
        inner = next(
            b for a, b in zip(own.modules(), twin.modules(), strict=True) if a is attention
        )
        assert isinstance(inner, nn.Module)
        try:
            true = exact.outputs_of_own(layer, inner, twin, width)
            mine = self.outputs_of_own(layer, attention, own, width)
            other = self.outputs_of_fused(layer, attention, fused, width)
        except _FAILURES:
            return False
        return all(
            fused_out.shape == own_out.shape
            and _distance(fused_out, out) <= _AS_EXACT * _distance(own_out, out)
            for out, own_out, fused_out in zip(true, mine, other, strict=True)
        )

    def outputs_of_own(
        self, layer: LayerSpec, attention: nn.Module, own: nn.Module, width: int
    ) -> list[torch.Tensor]:
        """Return the output of `own`, which holds `attention`, and both pools after it."""
        return self._attend(layer, attention, width, partial(self._run_own, own))

    def outputs_of_fused(
        self, layer: LayerSpec, attention: nn.Module, fused: Attend, width: int
    ) -> list[torch.Tensor]:
        """Return the same of a replacement."""
        return self._attend(layer, attention, width, partial(self._run_fused, fused))

    def _run_own(self, own: nn.Module, x: torch.Tensor, binding: LayerBinding) -> torch.Tensor:
        output = own(
            hidden_states=x,
            position_embeddings=self._angles(binding.layer.key_dim),
            attention_mask=None,
            past_key_values=None,
        )
        return output if isinstance(output, torch.Tensor) else output[0]

    def _run_fused(self, fused: Attend, x: torch.Tensor, binding: LayerBinding) -> torch.Tensor:
        cos, sin = self._angles(binding.layer.key_dim)
        return fused(x[0], cos, sin, binding)[None]

    def _attend(
        self,
        layer: LayerSpec,
        attention: nn.Module,
        width: int,
        run: Callable[[torch.Tensor, LayerBinding], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the output and both pools after a step over random KV."""
        self._generator.manual_seed(_SEED)
        x = self._random(1, _NUM_ROWS, width)
        blocks = (3, 1, 4)
        piece = SequencePiece([0] * _NUM_ROWS, _NUM_EARLIER, blocks, 1)
        shape = (1 + max(blocks), _BLOCK_SIZE, layer.num_kv_heads)
        pools = [self._random(*shape, dim) for dim in (layer.key_dim, layer.value_dim)]
        binding = LayerBinding(layer, pools[0], pools[1], StepContext())
        bind(attention, binding)
        try:
            with binding.context.running(build_batch([piece], _BLOCK_SIZE, self._device)):
                return [run(x, binding), *pools]
        finally:
            unbind(attention)

    def _angles(self, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of random angles, [1, num_rows, key_dim], equal in both halves."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        angles = torch.rand(1, _NUM_ROWS, key_dim // 2, generator=generator) * 6.3
        both = torch.cat((angles, angles), dim=-1).to(self._device)
        return self._as_input(both.cos()), self._as_input(both.sin())

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator)
        return self._as_input(values.to(self._device))

    def _as_input(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._rounded_to).to(self._dtype)


def _error(own: torch.Tensor, fused: torch.Tensor) -> float:
    """Return the distance relative to `own`; infinity where shapes differ or it is no number."""
    if own.shape != fused.shape:
        return math.inf
    error = _distance(own, fused) / max(_distance(own, torch.zeros_like(own)), _TINY)
    return error if math.isfinite(error) else math.inf


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one.float() - other.float()))
