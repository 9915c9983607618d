"""A model whose weights are packed as for a GPU, on a machine without one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvchat.model.quantise as packing
from kvchat.core.config import ModelConfig
from kvchat.model.fuse import Fusing
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.quantise import quantise
from kvchat.model.source import find_model
from kvchat_kernels.linear.blocks import quantised
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.fused_models import without_cpu_code

GPU = torch.device("cuda", 0)


def load_packed_as_on_gpu(
    directory: Path, name: str, weights: str, patch: pytest.MonkeyPatch, dtype: str = "float32"
) -> LoadedModel:
    """Return a tiny model of a supported family; its packed weights stay on the CPU."""
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    loaded = without_cpu_code(load_model(source, ModelConfig(dtype=dtype), 128, lambda _: None))
    patch.setattr(packing, "quantised_on", lambda weight, bits, device: quantised(weight, bits))
    quantise(loaded.module, loaded.spec, weights, GPU, lambda _: None)
    fusing = Fusing(loaded.module, loaded.spec, loaded.step, is_packed=True)
    return replace(loaded, fusing=fusing, weights=weights)
