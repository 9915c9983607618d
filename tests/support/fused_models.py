"""A model that is fused as on a GPU, on a machine without one."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from kvchat.core.config import ModelConfig
from kvchat.model.checkpoint.source import find_model
from kvchat.model.gpu.fuse import Fusing
from kvchat.model.loader import LoadedModel, load_model
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model


def load_plain(directory: Path, name: str, dtype: str) -> LoadedModel:
    """Return a tiny model of a supported family that runs transformers' own code."""
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(directory, tiny_model(model_type, **settings))))
    return without_cpu_code(load_model(source, ModelConfig(dtype=dtype), 128, lambda _: None))


def load_fused(directory: Path, name: str, dtype: str) -> LoadedModel:
    """Return the same, fused."""
    return fused(load_plain(directory, name, dtype))


def fused(loaded: LoadedModel) -> LoadedModel:
    fusing = Fusing(loaded.module, loaded.spec, loaded.step, is_packed=False)
    return replace(loaded, compiled=None, fusing=fusing)


def without_cpu_code(loaded: LoadedModel) -> LoadedModel:
    """Take away what only a CPU has: the compiled step, and its products of few rows."""
    for layer in loaded.module.modules():
        if type(layer) is nn.Linear:
            layer.__dict__.pop("forward", None)
    return replace(loaded, compiled=None)
