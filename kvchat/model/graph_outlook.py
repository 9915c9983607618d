"""Can a model's decode be captured in a CUDA graph? Told from its configuration alone.

Runs one decode of our own forward pass without weights (on torch's meta device), with everything
trapped that would make the host wait for values. The same trap is set again before the first
capture, on the weights and the kernels that are really there.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvchat.model.attention import OWN_ATTENTION, PAGED, register_attention
from kvchat.model.graph_trial import NotGraphable, trapping_host_reads
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from kvchat.model.rope import freeze_rope
from kvchat.model.source import ModelSource
from kvchat.model.spec import ModelSpec
from kvchat.model.step_buffers import StepBuffers, StepShape
from kvchat_kernels.paged_attention import (
    READS_LENGTHS_ON_DEVICE,
    Implementation,
    implementation_for,
)

_META = torch.device("meta")
# Grouped expert products exist on meta in bfloat16 only.
_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16
_MAX_CONTEXT = 64
_SHAPES = (StepShape(1, 1), StepShape(2, 3))


def why_not_graphable(config: Any, spec: ModelSpec) -> str | None:
    """Return what keeps small steps of a model from being captured; None where nothing does."""
    try:
        run_on_meta(model_on_meta(config, spec))
    except NotGraphable as error:
        return str(error)
    return None


def graphs_in_words(
    config: Any,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[..., Implementation] = implementation_for,
) -> str:
    """Return whether small steps run as CUDA graphs on `device`, and why not."""
    if device.type != "cuda":
        return "none: only a CUDA device has them"
    for layer in spec.layers:
        chosen = choose(device, layer.key_dim, layer.value_dim, dtype)
        if chosen.name not in READS_LENGTHS_ON_DEVICE:
            return f"none: attention runs without kernels, for {chosen.refusal}"
    try:
        reason = why_not_graphable(config, spec)
    except Exception:  # every model class fails in its own way, and this is an outlook only
        return "known when the model is run"
    return "of small steps" if reason is None else f"none: {reason}"


def model_on_meta(config: Any, spec: ModelSpec) -> PagedModel:
    """Return a model without weights, bound to pools without memory."""
    register_attention()
    own = OWN_ATTENTION.get(config.model_type)
    with _META:
        module = AutoModelForCausalLM.from_config(
            deepcopy(config), attn_implementation="eager" if own else PAGED, dtype=_DTYPE
        )
    freeze_rope(module, _MAX_CONTEXT)
    loaded = LoadedModel(
        source=ModelSource(config.model_type, Path()),
        module=module.eval().requires_grad_(False),
        spec=spec,
        device=_META,
        dtype=_DTYPE,
        max_context=_MAX_CONTEXT,
        identity="",
        load_s=0.0,
    )
    pools = [
        tuple(
            torch.empty(2, _BLOCK_SIZE, layer.num_kv_heads, dim, dtype=_DTYPE, device=_META)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for layer in spec.storing_layers
    ]
    return PagedModel(loaded, [(keys, values) for keys, values in pools])


def run_on_meta(model: PagedModel) -> None:
    """Run a decode and a verification; raises NotGraphable where a graph could not repeat them."""
    buffers = StepBuffers(_SHAPES, _BLOCK_SIZE, _MAX_CONTEXT, 0, _META)
    for shape in _SHAPES:
        with trapping_host_reads():
            model.forward(buffers.batch(shape))
