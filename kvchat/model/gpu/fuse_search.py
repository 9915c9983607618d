"""Finds what of a decoder layer can run fused: candidates are compared with the modules.

A module and its replacement run on the same random input; a replacement is found where both agree
within the dtype's tolerance. Reads modules; replaces nothing.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.gpu.fused_parts import (
    FusedAttention,
    FusedLayer,
    GatedMlp,
    Product,
    RmsNorm,
    attention_linears,
    join_layer,
    joined_head_norm,
    mlp_linears,
    rms_norms,
)
from kvchat.model.hf.module_adapter import LayerBinding, StepContext, bind, unbind
from kvchat.model.spec import LayerSpec
from kvchat_kernels.kv_layer import PlainKv

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


class Comparison:
    """One random input, the same for every comparison, in `dtype`; its values are those that
    `rounded_to` has, where that is less precise. With `has_halves` attention is given each angle
    once, and not twice in a row.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rounded_to: torch.dtype | None = None,
        has_halves: bool = False,
    ) -> None:
        self._generator = torch.Generator()
        self._dtype = dtype
        self._device = device
        self._rounded_to = rounded_to or dtype
        self._tolerance = _TOLERANCE[dtype]
        self._has_halves = has_halves

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

    def is_as_exact(
        self, layer: LayerSpec, attention: nn.Module, own: nn.Module, fused: Attend, width: int
    ) -> bool:
        """Tell whether the replacement is as near to the module in float32 as the module itself.

        Attention that has learnt to look at one token is all or nothing: what low precision makes
        of it on random input may be far from what anything else makes of it, and still right.
        """
        exact = Comparison(torch.float32, self._device, self._dtype, has_halves=self._has_halves)
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
        keys, values = pools
        binding = LayerBinding(layer, PlainKv(keys, values), StepContext(), keys, values)
        bind(attention, binding)
        try:
            with binding.context.running(build_batch([piece], _BLOCK_SIZE, self._device)):
                return [run(x, binding), *pools]
        finally:
            unbind(attention)

    def _angles(self, key_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of random angles, [1, num_rows, key_dim], equal in both halves; one
        half alone with `has_halves`.
        """
        generator = torch.Generator().manual_seed(_SEED + 1)
        angles = torch.rand(1, _NUM_ROWS, key_dim // 2, generator=generator) * 6.3
        if not self._has_halves:
            angles = torch.cat((angles, angles), dim=-1)
        angles = angles.to(self._device)
        return self._as_input(angles.cos()), self._as_input(angles.sin())

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


MakeProduct = Callable[[list[nn.Linear]], Product]


@dataclass(frozen=True, slots=True)
class FoundParts:
    """What was found of one decoder layer: the whole of it, or some of its parts.

    `recipe` names the choices made; layers that are built alike have the same.
    """

    layer: FusedLayer | None
    attention: FusedAttention | None
    mlp: GatedMlp | None
    norms: dict[str, RmsNorm]
    recipe: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        """How many parts there are beside a whole layer."""
        blocks = (self.attention is not None) + (self.mlp is not None)
        return blocks + len(self.norms)


class LayerSearch:
    """The search in one decoder layer.

    `attention_name` is its attention module's name within it, `make` makes the products of the
    candidates, which compute in `compute_dtype`.
    """

    def __init__(
        self,
        module: Any,
        attention_name: str,
        layer: LayerSpec,
        make: MakeProduct,
        compute_dtype: torch.dtype,
    ) -> None:
        self._module, self._attention = _twin(module, attention_name)
        self._attention_name = attention_name
        self._layer = layer
        self._make = make
        self._compute_dtype = compute_dtype
        weight = next(module.parameters())
        place = weight.dtype, weight.device
        self._comparison = Comparison(*place)
        self._halved = Comparison(*place, has_halves=True)

    def run(self) -> FoundParts:
        """Try the layer as a whole, and its parts one by one only where that fails.

        Raises ValueError where weights do not admit the products wanted.
        """
        norms, recipe = self._norms()
        mlp = self._mlp_candidate()
        attentions = list(self._attention_candidates())
        for candidate in attentions:
            layer = join_layer(candidate, mlp, norms) if mlp is not None else None
            if layer is not None and self._agrees(self._module, layer):
                return FoundParts(layer, None, None, {}, (*recipe, _name(candidate), "layer"))
        attention = next((a for a in attentions if self._agrees(self._attention, a)), None)
        if mlp is not None and not self._same(self._module.mlp, mlp, mlp.num_inputs):
            mlp = None
        parts = (_name(attention), "mlp" if mlp is not None else "")
        return FoundParts(None, attention, mlp, norms, (*recipe, *parts))

    def agrees_in_float32(self, found: FoundParts) -> bool:
        """Tell whether a float32 copy of the layer leads to the same choices.

        What low precision cannot tell apart, a wrong epsilon for one, float32 can.
        """
        twin = deepcopy(self._module).float()
        search = LayerSearch(twin, self._attention_name, self._layer, self._make, torch.float32)
        return search.run().recipe == found.recipe

    def _norms(self) -> tuple[dict[str, RmsNorm], list[str]]:
        """Return the layer's own norms by name, and which reading of each was right."""
        norms, recipe = {}, []
        for name, module in self._module.named_children():
            found = find_norm(module, self._comparison, self._compute_dtype)
            if found is not None:
                norms[name] = found[1]
                recipe.append(f"{name} {found[0]}")
        return norms, recipe

    def _mlp_candidate(self) -> GatedMlp | None:
        module = getattr(self._module, "mlp", None)
        linears = mlp_linears(module)
        if module is None or linears is None:
            return None
        gate_up, down = linears
        return GatedMlp(
            self._make(gate_up),
            self._make(down),
            module.act_fn,
            gate_up[0].in_features,
            gate_up[0].out_features,
        )

    def _attention_candidates(self) -> Iterator[FusedAttention]:
        layer, module = self._layer, self._attention
        linears = attention_linears(module)
        softcap = getattr(module, "attn_logit_softcapping", None) if layer.has_softcap else None
        sinks = getattr(module, "sinks", None) if layer.has_sinks else None
        is_known = (softcap is not None) == layer.has_softcap and (
            (sinks is not None) == layer.has_sinks
        )
        if linears is None or not is_known or not layer.stores_kv:
            return
        norm = None
        if hasattr(module, "q_norm") or hasattr(module, "k_norm"):
            norm = self._head_norm()
            if norm is None:
                return
        qkv, out = linears
        products = self._make(qkv), self._make(out)
        candidate = FusedAttention(
            *products,
            layer,
            float(module.scaling),
            norm,
            rotates=True,
            softcap=None if softcap is None else float(softcap),
            sinks=None if sinks is None else sinks.detach(),
        )
        yield candidate
        yield replace(candidate, rotates=False)
        yield replace(candidate, has_halves=True)

    def _head_norm(self) -> RmsNorm | None:
        layer, module = self._layer, self._attention
        query, key = (
            find_norm(getattr(module, name, None), self._comparison, self._compute_dtype)
            for name in ("q_norm", "k_norm")
        )
        if query is None or key is None or query[1].width != layer.key_dim:
            return None
        return joined_head_norm(query[1], key[1], layer.num_heads, layer.num_kv_heads)

    def _same(self, module: Any, fused: Any, width: int) -> bool:
        return self._comparison.same(module, lambda x: fused(x.to(self._compute_dtype)), width)

    def _agrees(self, own: nn.Module, fused: FusedLayer | FusedAttention) -> bool:
        width = self._attention.q_proj.in_features
        asked = self._layer, self._attention, own, self._cast(fused), width
        attention = fused if isinstance(fused, FusedAttention) else fused.attention
        comparison = self._halved if attention.has_halves else self._comparison
        return comparison.same_attention(*asked) or comparison.is_as_exact(*asked)

    def _cast(self, fused: FusedLayer | FusedAttention) -> Attend:
        def run(
            x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, binding: LayerBinding
        ) -> torch.Tensor:
            return fused(x.to(self._compute_dtype), cos, sin, binding)

        return run


def _twin(module: Any, attention_name: str) -> tuple[Any, Any]:
    """Return a layer and its attention to experiment on: the same parameters, no binding.

    The layer itself may be running meanwhile, bound to the pools of an engine.
    """
    layer, attention = copy(module), copy(module.get_submodule(attention_name))
    unbind(attention)
    layer.__dict__["_modules"] = {**module._modules, attention_name: attention}
    return layer, attention


def find_norm(
    module: Any, comparison: Comparison, dtype: torch.dtype
) -> tuple[str, RmsNorm] | None:
    """Return a module as an RMS norm of rows in `dtype`, and which reading of its weight was right;
    None if it is something else.

    Where several forms agree, which places to round at make them, it is the nearest.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    width = weight.shape[0]
    forms = [
        form for form in rms_norms(module, width, dtype) if comparison.same(module, form[1], width)
    ]
    return min(forms, key=lambda form: comparison.error(module, form[1], width), default=None)


def _name(attention: FusedAttention | None) -> str:
    if attention is None:
        return ""
    facts = attention.norm is not None, attention.rotates, attention.has_halves
    return "attention, norm {}, rotates {}, halves {}".format(*facts)
