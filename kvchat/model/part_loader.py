"""Loads what drafts for a loaded model: a small module that has some of the model's own parts."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.tensors import Names, refuse_gaps
from kvchat.model.decoder.matrices import keep_precise
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.gguf.file import weight_header
from kvchat.model.hf.config_limits import ParameterLimit, parameter_limit
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.hf.module_adapter import freeze_rope
from kvchat.model.hf.probe import probe_meta
from kvchat.model.loader import (
    IN_BLOCKS,
    LOADING,
    LoadedModel,
    attention_name,
    built_module,
    can_pack,
    move_weights,
    ways_to_run,
)
from kvchat.model.packed.quantise import quantise, use_blocks, use_cpu_products


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the files of `source`.

    config     its transformers config
    names_in   as of `read_tensors`
    joined     the names of its tensors that `join` gives it
    join       gives the module parts of the model and others of the tensors that were read; at
               first it is called without any, for a module without weights
    weights    the format of linear layers: `int8`, `int4`, or `auto` for the files' own
    owns_head  whether its head is its own, and not the model's, which may be packed already
    limit      how large it may be, where its config is not the model's
    """

    source: ModelSource
    config: Any
    names_in: Names
    joined: Collection[str]
    join: Callable[[Any, Mapping[str, Any]], None]
    weights: str = "auto"
    owns_head: bool = False
    limit: ParameterLimit | None = None


def files_limit(source: ModelSource) -> ParameterLimit:
    """Return how large a module of a checkpoint in safetensors may be."""
    headers = [weight_header(path) for path in source.weight_files]
    return parameter_limit(headers, read_json(source.config_file) or {})


def load_part(target: LoadedModel, part: Part) -> LoadedModel:
    """Return a module beside a loaded model, on its device and in its dtype.

    Raises ModelError if tensors are missing or the module is too large, and what `load_model`
    raises for a module that is not known.
    """
    source, device, names_in = part.source, target.device, part.names_in
    with LOADING:
        meta = MetaModel(part.config)
        spec = probe_meta(meta, part.limit)
        part.join(meta.module, {})
        attention, kept = attention_name(part.config, spec), spec.read_elsewhere
        blocks_on = device if target.weights == IN_BLOCKS else None
        module, report, found = built_module(
            source,
            meta,
            target.dtype,
            attention,
            lambda event: None,
            blocks_on,
            kept,
            names_in,
        )
        refuse_gaps(source, {**report, "missing_keys": {*report["missing_keys"]} - {*part.joined}})
    module.eval().requires_grad_(False)
    frozen_rope = freeze_rope(module, target.max_context)
    if part.owns_head:
        part.join(module, found.tensors)
    else:
        module.set_output_embeddings(nn.Identity())
    if part.weights != "auto" and can_pack(spec, device):
        quantise(module, spec, part.weights, device, lambda share: None)
    if not part.owns_head:
        part.join(module, found.tensors)
    keep_precise(module, found.precise)
    use_blocks(module, found.blocks, device, found.orders)
    move_weights(module, device, lambda event: None)
    use_cpu_products(module)
    _, step, fusing, compiled = ways_to_run(module, spec, device, target.weights)
    return replace(
        target,
        source=source,
        module=module,
        spec=spec,
        frozen_rope=frozen_rope,
        notes=(),
        step=step,
        fusing=fusing,
        compiled=compiled,
    )
