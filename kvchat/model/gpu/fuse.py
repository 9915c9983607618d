"""Replaces forwards of a model on a GPU by ones of fewer kernels.

`fuse_search.py` finds which form each module has, by its outputs on random input; what has none of
the known forms keeps its own code. Whether the fused model is used is for the self-test to decide:
if the whole fails it, every module runs its own code again. Replacements work during a step of a
PagedModel; otherwise modules run their own code. A CPU has a compiled step instead
(`compiled_step.py`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.gpu.fuse_search import Comparison, FoundParts, LayerSearch, MakeProduct, find_norm
from kvchat.model.gpu.fused_parts import (
    FusedAttention,
    FusedLayer,
    GatedMlp,
    MergedProduct,
    Product,
    RmsNorm,
)
from kvchat.model.hf.module_adapter import StepContext, binding_of
from kvchat.model.packed.quantise import DeviceProducts
from kvchat.model.spec import LayerSpec, ModelSpec

_log = logging.getLogger(__name__)


class Installer:
    """Replaces forwards that work while `context` is inside a step. Once `is_off` is set, every
    module runs its own code again.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.is_off = False

    def layer(self, module: Any, attention: nn.Module, fused: FusedLayer) -> None:
        """Replace a decoder layer's forward."""
        own = module.forward
        self._adopt(fused.attention.qkv, fused.attention.out, fused.mlp.gate_up, fused.mlp.down)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies() and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            cos, sin = position_embeddings
            return fused(hidden_states[0], cos, sin, binding_of(attention))[None]

        module.forward = forward

    def attention(self, module: Any, fused: FusedAttention) -> None:
        """Replace an attention's forward."""
        own = module.forward
        self._adopt(fused.qkv, fused.out)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies() and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            cos, sin = position_embeddings
            return fused(hidden_states[0], cos, sin, binding_of(module))[None], None

        module.forward = forward

    def mlp(self, module: Any, fused: GatedMlp) -> None:
        """Replace an MLP's forward."""
        self._adopt(fused.gate_up, fused.down)
        self._rowwise(module, fused)

    def norm(self, module: Any, fused: RmsNorm) -> None:
        """Replace a norm's forward."""
        self._rowwise(module, fused)

    def head(self, module: Any, fused: Product) -> None:
        """Replace the output head's forward."""
        self._adopt(fused)
        self._rowwise(module, fused)

    def _adopt(self, *products: Product) -> None:
        for product in products:
            if isinstance(product, MergedProduct):
                product.adopt()

    def _rowwise(self, module: Any, fused: Any) -> None:
        own = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fused(x) if self._applies() else own(x)
            return out

        module.forward = forward

    def _applies(self) -> bool:
        return not self.is_off and self._context.batch is not None


def _are_angles(position_embeddings: Any) -> bool:
    """Whether these are cosines and sines, and not one tensor of complex numbers (Llama 4)."""
    return isinstance(position_embeddings, tuple) and len(position_embeddings) == 2


@dataclass(frozen=True, slots=True)
class Fusion:
    """What of a model runs fused: whole decoder layers, and parts fused on their own."""

    num_layers: int = 0
    num_parts: int = 0

    def __str__(self) -> str:
        if not self.num_layers and not self.num_parts:
            return "none: transformers' own forward pass"
        return f"{self.num_layers} layers, {self.num_parts} other parts"


class Fusing:
    """Fuses a model, and can undo it. Replacements run while `context` is inside a step.

    `is_packed`: linear layers multiply with weights in fewer bits, packed on the GPU.
    """

    def __init__(self, module: Any, spec: ModelSpec, context: StepContext, is_packed: bool) -> None:
        self._module = module
        self._spec = spec
        self._make: MakeProduct = DeviceProducts if is_packed else MergedProduct
        self._installer = Installer(context)
        self._agreed: dict[tuple[str, ...], bool] = {}
        self._num_layers = 0
        self._num_parts = 0
        for part in (None, *spec.layers):
            try:
                self._fuse(part)
            except Exception as error:
                # A model's own code may raise anything when it is run; nothing is lost but speed,
                # for the module goes on running that code.
                _log.warning("not fused: %s", error)
        self._install_final_norm()
        self.fusion = Fusion(self._num_layers, self._num_parts)
        _log.info("fused model=%s: %s", spec.model_type, self.fusion)

    @property
    def is_off(self) -> bool:
        return self._installer.is_off

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let every module run its own code in the block."""
        was_off, self._installer.is_off = self._installer.is_off, True
        try:
            yield
        finally:
            self._installer.is_off = was_off

    def abandon(self) -> None:
        """Let every module run its own code again, where the parts together do not do as it does.

        Each was checked alone; what a whole model hands them may still be something else.
        """
        self._installer.is_off = True
        self.fusion = Fusion()

    def _fuse(self, layer: LayerSpec | None) -> None:
        """Fuse one layer; None stands for the head."""
        if layer is None:
            self._fuse_head()
            return
        found = self._search(layer)
        if found is not None:
            self._install(layer, found)

    @torch.inference_mode()
    def _search(self, layer: LayerSpec) -> FoundParts | None:
        parent, attention_name = self._parent(layer)
        dtype = self._module.dtype
        search = LayerSearch(parent, attention_name, layer, self._make, dtype)
        try:
            found = search.run()
        except ValueError as error:
            _log.info("%s runs its own code: %s", layer.module_name, error)
            return None
        if dtype != torch.float32:
            kind = (*(type(module).__name__ for module in parent.modules()), *found.recipe)
            if kind not in self._agreed:
                self._agreed[kind] = search.agrees_in_float32(found)
            if not self._agreed[kind]:
                _log.info("%s runs its own code: float32 does not agree", layer.module_name)
                return None
        return found

    def _parent(self, layer: LayerSpec) -> tuple[Any, str]:
        """Return the module that holds a layer's attention, and the attention's name in it."""
        parent_name, _, attention_name = layer.module_name.rpartition(".")
        return self._module.get_submodule(parent_name), attention_name

    def _install(self, layer: LayerSpec, found: FoundParts) -> None:
        parent, attention_name = self._parent(layer)
        attention = parent.get_submodule(attention_name)
        if found.layer is not None:
            self._installer.layer(parent, attention, found.layer)
            self._num_layers += 1
            return
        for name, norm in found.norms.items():
            self._installer.norm(parent.get_submodule(name), norm)
        if found.attention is not None:
            self._installer.attention(attention, found.attention)
        if found.mlp is not None:
            self._installer.mlp(parent.mlp, found.mlp)
        self._num_parts += found.num_parts

    @torch.inference_mode()
    def _fuse_head(self) -> None:
        """Replace the output head by a product, where it is a linear layer.

        What such a layer computes is known: only the self-test checks the product.
        """
        head = self._module.get_output_embeddings()
        if type(head) is not nn.Linear:
            return
        try:
            product = self._make([head])
        except ValueError as error:
            _log.info("the head runs its own code: %s", error)
            return
        self._installer.head(head, product)
        self._num_parts += 1

    @torch.inference_mode()
    def _install_final_norm(self) -> None:
        """Replace the norm that follows the last layer, where it is found beside the layers."""
        norm = getattr(self._owner_of_layers(), "norm", None)
        comparison = Comparison(self._module.dtype, self._module.device)
        found = find_norm(norm, comparison, self._module.dtype)
        if found is not None:
            self._installer.norm(norm, found[1])
            self._num_parts += 1

    def _owner_of_layers(self) -> nn.Module | None:
        """Return the module that has the list of layers."""
        first, _ = self._parent(self._spec.layers[0])
        for name, module in self._module.named_modules():
            if any(child is first for child in module.children()):
                owner, _, _ = name.rpartition(".")
                found: nn.Module = self._module.get_submodule(owner)
                return found
        return None
