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

from support import step_families
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model
from support.gguf_families import FAMILIES
from support.gguf_files import file_tensors, write_gguf
from support.hybrid_files import HYBRIDS, SIZES, formats_of
from support.stateful_models import STATEFUL

# The names of the norms of tokens and hidden states, of the projection and of the last norm.
_QWEN = [
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
]
_BEHIND = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"]
_GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # The layer of its head has a window, and angles of its own.
    "mellum": ("mellum", {**step_families.FAMILIES["mellum"], "num_mtp_layers": 1}),
    "glm4_moe": ("glm4_moe", _GLM),
    "deepseek_v3": SUPPORTED["deepseek_v3, wide keys"],
}


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


def _new_head(model_type: str, settings: dict[str, Any], seed: int = 0) -> NextHead:
    model = tiny_model(model_type, seed, **settings)
    one_layer: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if "layer_types" in settings:
        one_layer["layer_types"] = getattr(model.config, "mtp_layer_types", None) or [
            "full_attention"
        ]
    if "mlp_layer_types" in settings:
        one_layer["mlp_layer_types"] = settings["mlp_layer_types"][-1:]
    one = tiny_model(model_type, seed + 1, **{**settings, **one_layer})
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    norms = [type(one.model.norm)(hidden) for _ in range(2)]
    for norm in (*norms, one.model.norm, model.model.norm):
        norm.weight = nn.Parameter(random(hidden), requires_grad=False)
    return NextHead(model, one, norms[0], norms[1], random(hidden, 2 * hidden))


def write_with_head(directory: Path, name: str) -> NextHead:
    """Write a checkpoint with a head: as Qwen's have it, or as a layer behind the last."""
    is_qwen = name in STATEFUL or name == "mellum"
    head = _new_head(*_known(name))
    model, one = head.model, head.one
    save_checkpoint(directory, model)
    tensors = load_file(directory / "model.safetensors")
    behind = f"model.layers.{model.config.num_hidden_layers}."
    layer, names = ("mtp.layers.0.", _QWEN) if is_qwen else (behind, [behind + n for n in _BEHIND])
    tensors |= _stored(one, "model.layers.0.", layer, directory / "one")
    own = head.token_norm.weight, head.hidden_norm.weight, head.projection, one.model.norm.weight
    tensors |= dict(zip(names, own, strict=True))
    if not is_qwen:  # as these checkpoints have them, once more
        tensors[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return head


def write_gguf_with_head(path: Path, name: str, kind: str = "F32", **more: Any) -> NextHead:
    """Write a GGUF file with a head, its matrices in the block format `kind`.

    `name` is of HYBRIDS or FAMILIES, `more` are settings.
    """
    model_type, settings, metadata = HYBRIDS.get(name) or FAMILIES[name]
    sizes = SIZES if name in HYBRIDS else {}
    head = _new_head(model_type, {**sizes, **settings, **more})
    num_layers = head.model.config.num_hidden_layers
    behind = f"blk.{num_layers}."
    further = {
        behind + stored.removeprefix("blk.0."): part
        for stored, part in file_tensors(head.one)
        if stored.startswith("blk.0.")
    }
    further |= {
        f"{behind}nextn.enorm.weight": head.token_norm.weight,
        f"{behind}nextn.hnorm.weight": head.hidden_norm.weight,
        f"{behind}nextn.eh_proj.weight": head.projection,
        f"{behind}nextn.shared_head_norm.weight": head.one.model.norm.weight,
    }
    if name in FAMILIES:  # as these files have them, once more
        further[f"{behind}nextn.embed_tokens.weight"] = head.model.model.embed_tokens.weight.data
        further[f"{behind}nextn.shared_head_head.weight"] = head.model.lm_head.weight.data
    counts = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    write_gguf(path, head.model, formats_of(kind), metadata | counts, further=further)
    return head


def _known(name: str) -> tuple[str, dict[str, Any]]:
    return STATEFUL[name] if name in STATEFUL else _OTHERS[name]


def _stored(model: Any, old: str, new: str, scratch: Path) -> dict[str, torch.Tensor]:
    """Return a model's tensors below `old` as transformers stores them, under `new`."""
    model.save_pretrained(scratch)
    tensors = load_file(scratch / "model.safetensors")
    return {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        if name.startswith(old)
    }
