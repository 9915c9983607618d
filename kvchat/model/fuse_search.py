"""Finds what a decoder layer's modules are: by what they hold, and then by what they compute.

Makes candidates and tries them. Installs nothing.
"""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvchat.model.attention import LayerBinding, unbind
from kvchat.model.fuse_attention import FusedAttention, attention_linears, joined_head_norm
from kvchat.model.fuse_layer import FusedLayer, join_layer
from kvchat.model.fuse_linear import HalfProduct, MergedProduct, Product
from kvchat.model.fuse_parts import GatedMlp, RmsNorm, mlp_linears, rms_norms
from kvchat.model.fuse_trial import Attend, Trial
from kvchat.model.spec import LayerSpec
from kvchat.model.weight_only import PACKED_NOISE, SharedInputProducts

MakeProduct = Callable[[list[nn.Linear]], Product]


@dataclass(frozen=True, slots=True)
class FoundParts:
    """What was proven of one decoder layer: the whole of it, or some of its parts.

    `recipe` names the choices made; layers that are built alike have the same.
    """

    layer: FusedLayer | None
    attention: FusedAttention | None
    mlp: GatedMlp | None
    norms: dict[str, RmsNorm]
    linears: dict[str, Product]
    recipe: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        """How many parts there are beside a whole layer."""
        blocks = (self.attention is not None) + (self.mlp is not None)
        return blocks + len(self.norms) + len(self.linears)


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
        noise = PACKED_NOISE if make is SharedInputProducts else 0.0
        self._trial = Trial(weight.dtype, weight.device, noise=noise)

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
                return FoundParts(layer, None, None, {}, {}, (*recipe, _name(candidate), "layer"))
        attention = next((a for a in attentions if self._agrees(self._attention, a)), None)
        if mlp is not None and not self._same(self._module.mlp, mlp, mlp.num_inputs):
            mlp = None
        parts = (_name(attention), "mlp" if mlp is not None else "")
        linears = self._linears(attention is not None, mlp is not None)
        return FoundParts(None, attention, mlp, norms, linears, (*recipe, *parts))

    def is_proven_in_float32(self, found: FoundParts) -> bool:
        """Tell whether a float32 copy of the layer leads to the same choices.

        What low precision cannot tell apart, a wrong epsilon for one, float32 can.
        """
        twin = deepcopy(self._module).float()
        make = MergedProduct if self._make is HalfProduct else self._make
        search = LayerSearch(twin, self._attention_name, self._layer, make, torch.float32)
        return search.run().recipe == found.recipe

    def _norms(self) -> tuple[dict[str, RmsNorm], list[str]]:
        """Return the layer's own norms by name, and which reading of each was right."""
        norms, recipe = {}, []
        for name, module in self._module.named_children():
            found = find_norm(module, self._trial, self._compute_dtype)
            if found is not None:
                norms[name] = found[1]
                recipe.append(f"{name} {found[0]}")
        return norms, recipe

    def _linears(self, has_attention: bool, has_mlp: bool) -> dict[str, Product]:
        """Return the layer's linear layers that are in no fused part, where that changes them."""
        if self._make is not HalfProduct:
            return {}
        prefixes = [self._attention_name] if has_attention else []
        prefixes += ["mlp"] if has_mlp else []
        found: dict[str, Product] = {}
        for name, module in self._module.named_modules():
            is_taken = any(name.startswith(f"{prefix}.") for prefix in prefixes)
            if type(module) is nn.Linear and not is_taken:
                product = self._make([module])
                if self._same(module, product, module.in_features):
                    found[name] = product
        return found

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
        if linears is None or layer.has_softcap or layer.has_sinks or not layer.stores_kv:
            return
        norm = None
        if hasattr(module, "q_norm") or hasattr(module, "k_norm"):
            norm = self._head_norm()
            if norm is None:
                return
        qkv, out = linears
        products = self._make(qkv), self._make(out)
        candidate = FusedAttention(*products, layer, float(module.scaling), norm, rotates=True)
        yield candidate
        yield replace(candidate, rotates=False)

    def _head_norm(self) -> RmsNorm | None:
        layer, module = self._layer, self._attention
        query, key = (
            find_norm(getattr(module, name, None), self._trial, self._compute_dtype)
            for name in ("q_norm", "k_norm")
        )
        if query is None or key is None or query[1].width != layer.key_dim:
            return None
        return joined_head_norm(query[1], key[1], layer.num_heads, layer.num_kv_heads)

    def _same(self, module: Any, fused: Any, width: int) -> bool:
        return self._trial.same(module, lambda x: fused(x.to(self._compute_dtype)), width)

    def _agrees(self, own: nn.Module, fused: FusedLayer | FusedAttention) -> bool:
        width = self._attention.q_proj.in_features
        asked = self._layer, self._attention, own, self._cast(fused), width
        return self._trial.same_attention(*asked) or self._trial.is_as_exact(*asked)

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


def find_norm(module: Any, trial: Trial, dtype: torch.dtype) -> tuple[str, RmsNorm] | None:
    """Return a module as an RMS norm of rows in `dtype`, and which reading of its weight was right;
    None if it is something else.

    Where several forms agree, which places to round at make them, it is the nearest.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    width = weight.shape[0]
    forms = [form for form in rms_norms(module, width, dtype) if trial.same(module, form[1], width)]
    return min(forms, key=lambda form: trial.error(module, form[1], width), default=None)


def _name(attention: FusedAttention | None) -> str:
    if attention is None:
        return ""
    return f"attention, norm {attention.norm is not None}, rotates {attention.rotates}"
