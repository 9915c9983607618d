"""Tiny checkpoints with a random head for the next token, and what such a head computes, plainly.

The twin is transformers' own layer over a whole context, without any cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from support.checkpoints import save_checkpoint, tiny_model
from support.stateful_models import STATEFUL


@dataclass(frozen=True)
class NextHead:
    """A model, and the parts of its head: `one` is a model of one layer, with the head's norm."""

    model: PreTrainedModel
    one: PreTrainedModel
    token_norm: nn.Module
    hidden_norm: nn.Module
    projection: torch.Tensor

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the head's logits after each pair of a context, [len(ids) - 1, vocab]."""
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        tokens = self.model.get_input_embeddings()(torch.tensor([ids[1:]]))
        pairs = torch.cat([self.token_norm(tokens), self.hidden_norm(hidden[:, :-1])], dim=-1)
        joined = pairs @ self.projection.T
        last = self.one.model(inputs_embeds=joined, use_cache=False).last_hidden_state
        return self.model.lm_head(last)[0]


def write_with_head(directory: Path, name: str, seed: int = 0) -> NextHead:
    """Write a checkpoint of a type in STATEFUL with a head as Qwen's checkpoints have it."""
    model_type, settings = STATEFUL[name]
    model = tiny_model(model_type, seed, **settings)
    one = tiny_model(
        model_type,
        seed + 1,
        **{**settings, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    )
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    norms = [type(one.model.norm)(hidden) for _ in range(2)]
    for norm in (*norms, one.model.norm, model.model.norm):
        norm.weight = nn.Parameter(random(hidden), requires_grad=False)
    head = NextHead(model, one, norms[0], norms[1], random(hidden, 2 * hidden))
    save_checkpoint(directory, model)
    tensors = load_file(directory / "model.safetensors")
    tensors |= _stored(one, "model.layers.0.", "mtp.layers.0.", directory / "one")
    tensors["mtp.norm.weight"] = one.model.norm.weight
    tensors["mtp.pre_fc_norm_embedding.weight"] = norms[0].weight
    tensors["mtp.pre_fc_norm_hidden.weight"] = norms[1].weight
    tensors["mtp.fc.weight"] = head.projection
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return head


def _stored(model: Any, old: str, new: str, scratch: Path) -> dict[str, torch.Tensor]:
    """Return a model's tensors below `old` as transformers stores them, under `new`."""
    model.save_pretrained(scratch)
    tensors = load_file(scratch / "model.safetensors")
    return {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        if name.startswith(old)
    }
