"""Freezes position encodings whose frequencies depend on the longest position of a batch.

longrope and dynamic NTK scaling pick their frequencies from the batch at hand; with several
sequences in one batch, or with cached keys, that is wrong. Fixed once to the longest context the
engine allows, a key means the same whoever reads it. Knows transformers' rotary modules.
"""

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FLOATING = frozenset({"longrope", "dynamic"})


def freeze_rope(model: nn.Module, max_context: int) -> tuple[str, ...]:
    """Fix floating frequencies to `max_context` positions, in place; return the kinds frozen."""
    frozen = set()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in _FLOATING:
            _freeze(module, rope_type, max_context, None)
            module.rope_type = "default"  # type: ignore[assignment]
            frozen.add(rope_type)
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if kind in _FLOATING:
                    _freeze(module, kind, max_context, layer_type)
                    rope_type[layer_type] = "default"
                    frozen.add(kind)
    return tuple(sorted(frozen))


def _freeze(module: Any, kind: str, max_context: int, layer_type: str | None) -> None:
    prefix = f"{layer_type}_" if layer_type is not None else ""
    buffer = getattr(module, f"{prefix}inv_freq")
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=max_context, **arguments
    )
    # A new tensor, not a copy into the old one: the probe's forward pass may have put a tensor of
    # inference mode there, which nothing may write to.
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(buffer.dtype), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
