"""Replaces forwards of a model on a GPU by ones of fewer kernels.

The decoder that is read from the model says which form each part has; what has no fused form keeps
its own code. Whether the fused model is used is for the self-test to decide: if the whole fails it,
every module runs its own code again. Replacements work during a step of a PagedModel; otherwise
modules run their own code. A CPU has a compiled step instead (`compiled_step.py`), of the same
decoder.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvchat.model.decoder.decoder import Decoder, DecoderAttention, DecoderLayer, Mlp
from kvchat.model.decoder.matrices import Norm
from kvchat.model.decoder.reader import read_decoder
from kvchat.model.gpu.fused_parts import (
    FusedAttention,
    FusedLayer,
    GatedMlp,
    MergedProduct,
    Product,
    RmsNorm,
)
from kvchat.model.gpu.part_builder import MakeProduct, PartBuilder, rms_norm_of
from kvchat.model.hf.module_adapter import StepContext, binding_of
from kvchat.model.packed.quantise import DeviceProducts, pack_of
from kvchat.model.spec import ModelSpec

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

        def run(hidden: torch.Tensor, angles: Any) -> torch.Tensor:
            cos, sin = angles
            return fused(hidden[0], cos, sin, binding_of(attention))[None]

        self._replace(module, run)

    def attention(self, module: Any, fused: FusedAttention) -> None:
        """Replace an attention's forward."""

        def run(hidden: torch.Tensor, angles: Any) -> tuple[torch.Tensor, None]:
            cos, sin = angles
            return fused(hidden[0], cos, sin, binding_of(module))[None], None

        self._replace(module, run)

    def _replace(self, module: Any, run: Callable[[torch.Tensor, Any], Any]) -> None:
        own = module.forward

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            # Cosines and sines; Llama 4 has one tensor of complex numbers.
            are_angles = isinstance(position_embeddings, tuple) and len(position_embeddings) == 2
            if self._applies() and are_angles:
                return run(hidden_states, position_embeddings)
            return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)

        module.forward = forward

    def rows(self, module: Any, fused: GatedMlp | RmsNorm | Product) -> None:
        """Replace the forward of a module that takes rows and nothing else."""
        own = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fused(x) if self._applies() else own(x)
            return out

        module.forward = forward

    def _applies(self) -> bool:
        return not self.is_off and self._context.batch is not None


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
        self._make: MakeProduct = DeviceProducts if is_packed else MergedProduct
        self._installer = Installer(context)
        self._num_layers = 0
        self._num_parts = 0
        with torch.inference_mode():
            self._fuse_head()
            decoder = read_decoder(module, spec, in_parts=True)
            if isinstance(decoder, str):
                _log.info("layers run their own code: the model %s", decoder)
            else:
                self._fuse_layers(decoder)
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
        """Let every module run its own code again, where the fused parts do not do as it does."""
        self._installer.is_off = True
        self.fusion = Fusion()

    def _fuse_head(self) -> None:
        """Replace the output head by a product, where it is a linear layer, and not packed."""
        head = self._module.get_output_embeddings()
        if type(head) is nn.Linear and pack_of(head) is None:
            self._replace_rows(head, MergedProduct([head]))

    def _fuse_layers(self, decoder: Decoder) -> None:
        """Replace the layers that have a fused form; of the others, their parts."""
        builder = PartBuilder(decoder, self._make)
        self._fuse_norm(decoder.norm)
        for layer in decoder.layers:
            try:
                self._fuse_layer(builder, layer)
            except torch.OutOfMemoryError as error:  # only speed is lost
                _log.warning("not fused: %s", error)

    def _fuse_layer(self, builder: PartBuilder, layer: DecoderLayer) -> None:
        attention, mlp = builder.attention(layer.attention), builder.mlp(layer.mlp)
        whole = builder.layer(layer, attention, mlp)
        if attention is not None and isinstance(layer.attention, DecoderAttention):
            module = self._module.get_submodule(layer.attention.spec.module_name)
            if whole is not None:
                self._installer.layer(layer.module, module, whole)
                self._num_layers += 1
                return
            self._installer.attention(module, attention)
            self._num_parts += 1
        if mlp is not None and isinstance(layer.mlp, Mlp):
            self._replace_rows(layer.mlp.module, mlp)
        for norm in layer.norms:
            self._fuse_norm(norm)

    def _fuse_norm(self, norm: Norm) -> None:
        if norm.bias is None:
            self._replace_rows(norm.module, rms_norm_of(norm))

    def _replace_rows(self, module: Any, fused: GatedMlp | RmsNorm | Product) -> None:
        self._installer.rows(module, fused)
        self._num_parts += 1
