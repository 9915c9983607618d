"""What is known of a model's products of few rows on this machine, told from its configuration.

Reads the outcomes kept, no weights; races nothing.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvchat.model.device import dtype_name
from kvchat.model.fuse_attention import attention_linears
from kvchat.model.fuse_parts import mlp_linears
from kvchat.model.linear_race import LinearShape, Outcomes
from kvchat.model.linear_race_at_load import machine_name
from kvchat.model.linear_race_memory import RaceMemory
from kvchat.model.spec import ModelSpec


def products_in_words(
    config: Any, spec: ModelSpec, device: torch.device, dtype: torch.dtype, directory: Path
) -> str:
    """Return for how many sizes of few rows kvchat's kernel was faster than torch's product.

    `directory` is where outcomes are kept.
    """
    if device.type != "cuda":
        return "torch's own: kvchat's kernel for few rows needs a CUDA device"
    outcomes = RaceMemory(directory, machine_name(device)).read()
    try:
        return outcomes_in_words(product_shapes(config, spec, dtype), outcomes)
    except Exception:  # every model class fails in its own way, and this is an outlook only
        return "known when the model is loaded"


def outcomes_in_words(shapes: set[LinearShape], outcomes: Outcomes) -> str:
    """Return what outcomes say of a model with products of these shapes."""
    own = [found for (shape, _), found in outcomes.items() if shape in shapes]
    if not own:
        return "of few rows: raced against torch's when the model is loaded"
    num_won = sum(found.is_won for found in own)
    return f"of few rows: kvchat's kernel was faster for {num_won} of {len(own)} sizes raced here"


def product_shapes(config: Any, spec: ModelSpec, dtype: torch.dtype) -> set[LinearShape]:
    """Return the shapes of the products that a model is likely to run fused."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)
    return {_joined(layers, dtype) for layers in _merged_layers(module, spec)}


def _merged_layers(module: Any, spec: ModelSpec) -> Iterator[list[nn.Linear]]:
    for layer in spec.layers:
        parent_name, _, attention_name = layer.module_name.rpartition(".")
        parent = module.get_submodule(parent_name)
        yield from attention_linears(parent.get_submodule(attention_name)) or ()
        yield from mlp_linears(getattr(parent, "mlp", None)) or ()
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        yield [head]


def _joined(layers: list[nn.Linear], dtype: torch.dtype) -> LinearShape:
    return LinearShape(
        sum(layer.out_features for layer in layers),
        layers[0].in_features,
        dtype_name(dtype),
        any(layer.bias is not None for layer in layers),
    )
