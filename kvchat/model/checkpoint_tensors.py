"""The tensors of a checkpoint as transformers receives them: as they are in the files, or unpacked.

Plain tensors are memory-mapped. Packed ones are unpacked when transformers takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint_files import read_json
from kvchat.model.device import dtype_name, free_bytes
from kvchat.model.packed_weights import PackedTensor, Packing, packing_of, unpacked
from kvchat.model.source import ModelSource


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """Tensors by name; the dtype to load them in, None for their own; and what to say meanwhile."""

    tensors: Mapping[str, torch.Tensor | PackedTensor]
    dtype: torch.dtype | None
    stage: str


def read_tensors(
    source: ModelSource, hf_config: Any, dtype: torch.dtype | None
) -> CheckpointTensors:
    """Return a checkpoint's tensors; `dtype` is the one asked for, if any.

    Raises ModelError if packed weights are damaged, or take more memory than is free.
    """
    tensors = _mapped(source)
    packing = packing_of(read_json(source.config_file) or {}, source.name)
    if packing is None:
        return CheckpointTensors(tensors, dtype, "loading weights")
    if dtype is None:
        own = getattr(hf_config, "dtype", None)
        dtype = own if isinstance(own, torch.dtype) else torch.bfloat16
    loose = unpacked(tensors, packing, dtype, source.name)
    return CheckpointTensors(loose, dtype, _size_said(loose, packing, dtype, source.name))


def _mapped(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return every tensor of the weight files, memory-mapped: data is read at first use.

    If two files hold a tensor of the same name, the later file wins, as in transformers.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in source.weight_files:
        with safe_open(path, framework="pt") as file:
            tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return tensors


def _size_said(
    tensors: Mapping[str, torch.Tensor | PackedTensor],
    packing: Packing,
    dtype: torch.dtype,
    name: str,
) -> str:
    """Return the stage's name with the memory; raises ModelError if that is more than is free."""
    packed = [tensor for tensor in tensors.values() if isinstance(tensor, PackedTensor)]
    num_bytes = sum(tensor.num_bytes for tensor in packed)
    if num_bytes > free_bytes(torch.device("cpu")):
        raise ModelError(
            f"The {packing.title} weights of {name} take {num_bytes >> 20:,} MiB unpacked, more "
            "than is free.",
            "Use a smaller model.",
        )
    return f"unpacking {packing.title} to {dtype_name(dtype)}, {num_bytes >> 20:,} MiB"
