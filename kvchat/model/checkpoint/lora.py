"""Merges a LoRA adapter into a loaded model, one layer at a time."""

import re
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvchat.core.errors import ModelError
from kvchat.model.files.adapter import WEIGHTS, Adapter
from kvchat.model.files.checkpoint_files import read_header

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.default)?(?:\.weight)?")
_SAVED = re.compile(r"\.base_layer|\.modules_to_save(?:\.default)?")

Tensors = dict[str, torch.Tensor]


@torch.inference_mode(False)
@torch.no_grad()
def merge(module: Any, adapter: Adapter) -> None:
    """Add an adapter's change to each weight that it names, and put in what it saved whole.

    A merged weight is a new tensor: the file's own, and weights tied to it, stay as they are.
    Raises ModelError if a tensor names no layer of the model, or does not fit it.
    """
    pairs: dict[str, Tensors] = {}
    for name, tensor in _tensors(adapter).items():
        path = name.removeprefix(_PREFIX)
        if (part := _PART.fullmatch(path)) is not None:
            pairs.setdefault(part[1], {})[part[2]] = tensor
        else:
            _replace(module, _SAVED.sub("", path), tensor, adapter)
    if not pairs:
        raise _fault(adapter, "it changes no layer")
    for path, parts in pairs.items():
        _merge_layer(module, path, parts, adapter)


def _tensors(adapter: Adapter) -> Tensors:
    path = adapter.directory / WEIGHTS
    read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has its own error types
        raise _fault(adapter, f"{WEIGHTS} is damaged") from error


def _merge_layer(module: Any, path: str, parts: Tensors, adapter: Adapter) -> None:
    layer = _layer(module, path, adapter)
    is_table = isinstance(layer, nn.Embedding)
    names = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A", "lora_B")
    if parts.keys() != set(names) or any(part.dim() != 2 for part in parts.values()):
        raise _fault(adapter, f"the parts for {path} are not a pair")
    into, out_of = parts[names[0]].float(), parts[names[1]].float()
    # A change is [out, in]; tables of embeddings, and GPT-2's layers, are [in, out].
    is_turned = is_table or isinstance(layer, Conv1D)
    weight = layer.weight
    shape = weight.shape[::-1] if is_turned else weight.shape
    if (
        (len(out_of), into.shape[1]) != tuple(shape)
        or out_of.shape[1] != len(into)
        or not len(into)
    ):
        raise _fault(adapter, f"the parts for {path} do not fit it")
    change = out_of @ into
    change = (change.t() if is_turned else change).mul(adapter.scale(path, len(into)))
    merged = change.add_(weight)
    layer.weight = nn.Parameter(merged.to(weight.dtype), requires_grad=False)


def _replace(module: Any, path: str, tensor: torch.Tensor, adapter: Adapter) -> None:
    """Put in a weight or bias that the adapter's author trained whole."""
    owner, _, name = path.rpartition(".")
    layer = _layer(module, owner, adapter)
    own = layer._parameters.get(name)
    if own is None:
        raise _fault(adapter, f"the model has no {path}")
    if own.shape != tensor.shape:
        raise _fault(adapter, f"its {path} has another shape than the model's")
    setattr(layer, name, nn.Parameter(tensor.to(own.dtype), requires_grad=False))


def _layer(module: Any, path: str, adapter: Adapter) -> Any:
    try:
        layer = module.get_submodule(path)
    except AttributeError as error:
        raise _fault(adapter, f"the model has no {path}") from error
    if not isinstance(getattr(layer, "weight", None), nn.Parameter):
        raise _fault(adapter, f"{path} of the model has no weight")
    return layer


def _fault(adapter: Adapter, what: str) -> ModelError:
    return ModelError(
        f"The adapter in {adapter.directory} cannot be merged: {what}.",
        f"It was made for {adapter.base_name or 'another model'}.",
    )
