"""Steps of small models over random KV, by the compiled step or by the modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from kvchat.core.config import ModelConfig
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from support.checkpoints import save_checkpoint, tiny_model
from support.specimens import random_ids
from support.step_families import FAMILIES

BLOCK = 16
CPU = torch.device("cpu")


def load(directory: Path, family: str, **config: Any) -> LoadedModel:
    model_type = family.split(",")[0]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    settings = {"max_position_embeddings": 2048, **FAMILIES[family]}
    model = tiny_model(model_type, **settings)
    stir(model)
    source = find_model(str(save_checkpoint(directory, model)))
    return load_model(source, ModelConfig(**config), None, lambda _: None)


def stir(model: torch.nn.Module) -> None:
    """Change what a new model has as ones and zeros: norms, biases, what routers choose by."""
    generator = torch.Generator().manual_seed(1)
    ends = "correction_bias", "layer_scalar"
    buffers = (part for name, part in model.named_buffers() if name.endswith(ends))
    with torch.no_grad():
        for part in (*model.parameters(), *buffers):
            if part.dim() == 1:
                part += 0.1 * torch.randn(part.shape, generator=generator)


def pools_of(loaded: LoadedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pools of random KV, 128 blocks for each layer that stores its own."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(128, BLOCK, heads, dim, generator=generator).to(loaded.dtype)

    return [
        (random(layer.num_kv_heads, layer.key_dim), random(layer.num_kv_heads, layer.value_dim))
        for layer in loaded.spec.storing_layers
    ]


def batch_of(step: list[tuple[int, int]], num_logit_rows: int | None = None) -> ForwardBatch:
    pieces = []
    for index, (new, end) in enumerate(step):
        blocks = range(1 + 40 * index, 1 + 40 * index + -(-end // BLOCK))
        rows = new if num_logit_rows is None else num_logit_rows
        pieces.append(SequencePiece(random_ids(new, seed=new), end - new, blocks, rows))
    return build_batch(pieces, BLOCK, CPU)


def run(
    loaded: LoadedModel, batch: ForwardBatch, is_compiled: bool
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a step's logits over random KV, and the pools after it."""
    pools = pools_of(loaded)
    model = PagedModel(loaded, pools)
    assert model.compiled is not None
    if not is_compiled:
        model.compiled = None
    return model.forward(batch), pools


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
