"""What of a model is likely to run fused, told from its configuration alone.

Looks at what modules hold, as `fuse_search` does first; what they compute is proven at load, on
their weights. Reads no weights.
"""

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvchat.model.fuse_attention import attention_linears
from kvchat.model.fuse_layer import LAYER_NORMS
from kvchat.model.fuse_parts import mlp_linears, rms_norms
from kvchat.model.spec import LayerSpec, ModelSpec


def fusion_in_words(config: Any, spec: ModelSpec) -> str:
    """Return how many layers have a fused form, or that none has."""
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)
        count = sum(_looks_whole(module, layer) for layer in spec.layers)
    except Exception:  # every model class fails in its own way, and this is an outlook only
        return "known when the model is loaded"
    if not count:
        return "transformers' own; single norms and linear layers may be replaced"
    return f"fused in {count} of {len(spec.layers)} layers, proven when the model is loaded"


def _looks_whole(module: Any, layer: LayerSpec) -> bool:
    parent_name, _, attention_name = layer.module_name.rpartition(".")
    parent = module.get_submodule(parent_name)
    attention = parent.get_submodule(attention_name)
    norms = {
        name
        for name, child in parent.named_children()
        if isinstance(getattr(child, "weight", None), torch.Tensor)
        and rms_norms(child, child.weight.shape[0])
    }
    return (
        attention_linears(attention) is not None
        and mlp_linears(getattr(parent, "mlp", None)) is not None
        and any(norms == set(names) for names in LAYER_NORMS)
        and not (layer.has_softcap or layer.has_sinks)
        and layer.stores_kv
    )
