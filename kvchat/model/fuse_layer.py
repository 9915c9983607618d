"""A decoder layer as one function: norms, attention, MLP and the residual stream between them.

Knows the two orders that Llama's and Gemma's families use. Whether a layer is of one of them is for
`fuse` to find out, by running both.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvchat.model.attention import LayerBinding
from kvchat.model.fuse_attention import FusedAttention, rotation
from kvchat.model.fuse_kernels import takes_kernels
from kvchat.model.fuse_parts import GatedMlp, RmsNorm
from kvchat.model.fuse_script import LayerScript, form_of, reason_of, script_of
from kvchat_kernels.paged_attention.cpu_step import columns_of

_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """x + attention(norm x), then x + mlp(norm x); Gemma norms what is added as well.

    `script` does the same without Python between the operations, where there is one; in it the
    layer is that of `index`.
    """

    attention: FusedAttention
    mlp: GatedMlp
    before_attention: RmsNorm
    after_attention: RmsNorm | None
    before_mlp: RmsNorm
    after_mlp: RmsNorm | None
    script: LayerScript | None = None
    index: int = 0

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, binding: LayerBinding
    ) -> torch.Tensor:
        """Return the stream after this layer: [num_tokens, hidden_size] in x's dtype."""
        if self.script is not None and not takes_kernels(x):
            try:
                return self._run(self.script, x, cos, sin, binding)
            except RuntimeError as error:
                if reason := reason_of(error):
                    raise RuntimeError(reason) from error
                raise
        attended = self.attention(self.before_attention(x), cos, sin, binding)
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        normed, x = self.before_mlp.of_sum(attended, x)
        out = self.mlp(normed)
        if self.after_mlp is not None:
            out = self.after_mlp(out)
        return out.add_(x)

    def _run(
        self,
        script: LayerScript,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        binding: LayerBinding,
    ) -> torch.Tensor:
        batch, memo, keys = binding.context.batch, binding.context.memo, binding.keys
        assert batch is not None, "attention outside of a step"
        cos, sin = rotation(cos, sin, x.dtype, memo)
        step = self.attention.fused_step(binding, batch)
        if step is None:
            # Nothing holds on to Q, K and V: of many rows the MLP wants the memory itself.
            attended = self.attention.attend(*script.before(x, cos, sin, keys, self.index), binding)
            return script.after(attended, x, self.index)
        pools, slots = [(keys, binding.values)], batch.slot_mapping
        return script.run(x, [cos], [sin], pools, slots, *columns_of([step]), self.index)


def join_layer(
    attention: FusedAttention, mlp: GatedMlp, norms: Mapping[str, RmsNorm]
) -> FusedLayer | None:
    """Return the layer that norms of these names make, None where there is no such order."""
    if set(norms) == set(_GEMMA_NORMS):
        first, second, third, fourth = (norms[name] for name in _GEMMA_NORMS)
        return FusedLayer(attention, mlp, first, second, third, fourth)
    if set(norms) == set(_LLAMA_NORMS):
        first, second = (norms[name] for name in _LLAMA_NORMS)
        return FusedLayer(attention, mlp, first, None, second, None)
    return None


def with_scripts(layers: Sequence[FusedLayer]) -> list[FusedLayer]:
    """Return the layers, in one script those that are built alike, where torch makes one of them.

    A script a layer would take twenty times as long to make, for a model of twenty: it is parsed
    anew for each.
    """
    made = list(layers)
    alike: dict[object, list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        alike[form_of(layer)].append(place)
    for places in alike.values():
        script = script_of([layers[place] for place in places])
        for index, place in enumerate(places):
            made[place] = replace(layers[place], script=script, index=index)
    return made
