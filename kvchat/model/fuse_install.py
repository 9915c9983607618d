"""Puts proven replacements in place: one forward of one instance each.

Knows when a replacement may run: inside a step, and for few enough rows. Proves nothing.
"""

from typing import Any

import torch
from torch import nn

from kvchat.model.attention import StepContext, binding_of
from kvchat.model.fuse_attention import FusedAttention
from kvchat.model.fuse_layer import FusedLayer
from kvchat.model.fuse_linear import MergedProduct, Product
from kvchat.model.fuse_parts import GatedMlp, RmsNorm


class Installer:
    """Replaces forwards that work while `context` is inside a step of at most `max_rows` rows.

    Once `keeps_stream` is set, layers hand the residual stream on in `compute_dtype`, which only
    replacements understand: set it where all of a model's layers and what follows them are. Once
    `is_off` is set, every module runs its own code again. `layers` are the decoder layers replaced,
    by their attention modules.
    """

    def __init__(self, context: StepContext, compute_dtype: torch.dtype, max_rows: int) -> None:
        self._context = context
        self._compute_dtype = compute_dtype
        self._max_rows = max_rows
        self.keeps_stream = False
        self.is_off = False
        self.merged: list[MergedProduct] = []
        self.layers: dict[nn.Module, FusedLayer] = {}

    def layer(self, module: Any, attention: nn.Module, fused: FusedLayer) -> None:
        """Replace a decoder layer's forward."""
        own = module.forward
        self.layers[attention] = fused
        self._adopt(fused.attention.qkv, fused.attention.out, fused.mlp.gate_up, fused.mlp.down)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies(hidden_states) and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            cos, sin = position_embeddings
            x = hidden_states[0].to(self._compute_dtype)
            out = self.layers[attention](x, cos, sin, binding_of(attention))[None]
            return out if self.keeps_stream else out.to(hidden_states.dtype)

        module.forward = forward

    def attention(self, module: Any, fused: FusedAttention) -> None:
        """Replace an attention's forward."""
        own = module.forward
        self._adopt(fused.qkv, fused.out)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies(hidden_states) and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            cos, sin = position_embeddings
            x = hidden_states[0].to(self._compute_dtype)
            out = fused(x, cos, sin, binding_of(module))[None]
            return out.to(hidden_states.dtype), None

        module.forward = forward

    def mlp(self, module: Any, fused: GatedMlp) -> None:
        """Replace an MLP's forward."""
        self._adopt(fused.gate_up, fused.down)
        self._rowwise(module, fused, self._compute_dtype)

    def norm(self, module: Any, fused: RmsNorm) -> None:
        """Replace a norm's forward."""
        self._rowwise(module, fused, None)

    def linear(self, module: Any, fused: Product) -> None:
        """Replace a linear layer's forward."""
        self._adopt(fused)
        self._rowwise(module, fused, self._compute_dtype)

    def head(self, module: Any, fused: Product) -> None:
        """Replace the output head's forward; logits keep the precision they are computed in."""
        self._adopt(fused)
        self._rowwise(module, fused, self._compute_dtype, casts_back=False)

    def _adopt(self, *products: Product) -> None:
        for product in products:
            if isinstance(product, MergedProduct):
                product.adopt()
                self.merged.append(product)

    def _rowwise(
        self, module: Any, fused: Any, dtype: torch.dtype | None, casts_back: bool = True
    ) -> None:
        own = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self._applies(x):
                out: torch.Tensor = own(x)
                return out
            out = fused(x if dtype is None else x.to(dtype))
            return out.to(x.dtype) if casts_back else out

        module.forward = forward

    def _applies(self, x: torch.Tensor) -> bool:
        """`x` is [1, num_rows, ...]; a step's rows lie in one sequence."""
        if self.is_off or self._context.batch is None:
            return False
        return x.shape[1] <= self._max_rows


def _are_angles(position_embeddings: Any) -> bool:
    """Whether these are cosines and sines, and not one tensor of complex numbers (Llama 4)."""
    return isinstance(position_embeddings, tuple) and len(position_embeddings) == 2
