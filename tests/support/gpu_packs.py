"""A model whose weights are packed as for a GPU, on a machine without one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvchat.model.packed.experts as packing_of_experts
import kvchat.model.packed.quantise as packing
from kvchat.core.config import ModelConfig
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.fuse import Fusing
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.packed.quantise import quantise
from kvchat_kernels.linear.blocks import quantised, quantised_matrices
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.fused_models import without_cpu_code

GPU = torch.device("cuda", 0)
# Mixtures of plain experts, as SUPPORTED has families.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": SUPPORTED["qwen3_moe"],
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def load_packed_as_on_gpu(
    directory: Path,
    name: str,
    weights: str,
    patch: pytest.MonkeyPatch,
    dtype: str = "float32",
    **sizes: int,
) -> LoadedModel:
    """Return a tiny model of a supported family; its packed weights stay on the CPU."""
    model_type, settings = (SUPPORTED | MIXTURES)[name]
    source = find_model(
        str(save_checkpoint(directory, tiny_model(model_type, **settings, **sizes)))
    )
    loaded = without_cpu_code(load_model(source, ModelConfig(dtype=dtype), 128, lambda _: None))
    patch.setattr(packing, "quantised_on", lambda weight, bits, device: quantised(weight, bits))
    patch.setattr(
        packing_of_experts,
        "quantised_matrices",
        lambda weight, bits, device: quantised_matrices(weight, bits, torch.device("cpu")),
    )
    quantise(loaded.module, loaded.spec, weights, GPU, lambda _: None)
    fusing = Fusing(loaded.module, loaded.spec, loaded.step, is_packed=True)
    return replace(loaded, fusing=fusing, weights=weights)
