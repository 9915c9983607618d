"""Builds the fused parts of a layer on a GPU from what the decoder's description says of it.

A part of another form has none, and runs transformers' own code.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from kvchat.model.decoder.decoder import Decoder, DecoderAttention, DecoderLayer, Mlp
from kvchat.model.decoder.matrices import Matrix, Norm
from kvchat.model.gpu.fused_parts import FusedAttention, FusedLayer, GatedMlp, Product, RmsNorm
from kvchat.model.hf.gates import GATES
from kvchat_kernels.cpu.rotation import HeadNorm
from kvchat_kernels.kv_write import HeadNorms

# Raises ValueError for layers that it can make no product of.
MakeProduct = Callable[[Sequence[nn.Linear]], Product]


def rms_norm_of(norm: Norm) -> RmsNorm:
    """Return an RMS norm, which centres nothing."""
    assert norm.bias is None
    return RmsNorm(norm.weight, norm.epsilon)


class PartBuilder:
    """Builds the parts of a decoder's layers, with products that `make` makes.

    Products merge the weights of the layers they are made of, so each is built once.
    """

    def __init__(self, decoder: Decoder, make: MakeProduct) -> None:
        self._decoder = decoder
        self._make = make

    def attention(self, part: Any) -> FusedAttention | None:
        """Return attention with a fused form."""
        if not isinstance(part, DecoderAttention) or not self._is_plain(part):
            return None
        norms = None
        if part.head_norms is not None:
            query, key = part.head_norms
            norms = HeadNorms(query.weight, key.weight, query.epsilon)
        products = self._products(part.qkv, (part.out,))
        if products is None:
            return None
        return FusedAttention(
            *products,
            layer=part.spec,
            scale=part.scale,
            norms=norms,
            rotates=part.rotates,
            softcap=part.softcap,
            sinks=part.sinks,
            has_half_angles=self._decoder.has_half_angles,
        )

    def _is_plain(self, part: DecoderAttention) -> bool:
        """Whether heads are normed one by one, and rotated by halves, and nothing else."""
        turns = part.rotates and (part.turns_neighbours or self._decoder.turns_back)
        norms = part.head_norm is not HeadNorm.ALL_HEADS
        others = part.is_gated or part.norms_last or part.norms_value or part.order is not None
        others = others or part.latents is not None
        has_own_kv = part.spec.stores_kv and self._decoder.query_scale is None
        return norms and has_own_kv and not (turns or others)

    def mlp(self, part: Any) -> GatedMlp | None:
        """Return a gated MLP with a fused form."""
        if not isinstance(part, Mlp) or not part.is_gated or part.activation not in GATES:
            return None
        products = self._products(part.gate_up, (part.down,))
        if products is None:
            return None
        width = sum(matrix.num_out for matrix in part.gate_up) // 2
        return GatedMlp(*products, GATES[part.activation], width)

    def layer(
        self, part: DecoderLayer, attention: FusedAttention | None, mlp: GatedMlp | None
    ) -> FusedLayer | None:
        """Return a layer of these parts, if it is one with norms before both and no other parts."""
        if attention is None or mlp is None or any(norm.bias is not None for norm in part.norms):
            return None
        before, after, before_mlp, after_mlp = (
            None if norm is None else rms_norm_of(norm) for norm in part.placed_norms
        )
        if before is None or before_mlp is None:
            return None
        others = part.side, part.beside, part.beside_mlp
        has_others = part.is_parallel or any(other is not None for other in others)
        has_factors = part.stream_factor != 1.0 or self._decoder.residual_factor != 1.0
        if has_others or has_factors or part.other_norms or not part.is_whole:
            return None
        return FusedLayer(attention, mlp, before, after, before_mlp, after_mlp)

    def _products(
        self, into: Sequence[Matrix], back: Sequence[Matrix]
    ) -> tuple[Product, Product] | None:
        """Return the products of both groups of matrices, None where one cannot be made."""
        try:
            first, second = _linears(into), _linears(back)
            return self._make(first), self._make(second)
        except ValueError:
            return None


def _linears(matrices: Sequence[Matrix]) -> list[nn.Linear]:
    """Return the layers of these matrices; raises ValueError for those of no plain layers."""
    layers = [matrix.source for matrix in matrices if isinstance(matrix.source, nn.Linear)]
    if len(layers) < len(matrices) or any(matrix.factors is not None for matrix in matrices):
        raise ValueError("no plain linear layers")
    return layers
