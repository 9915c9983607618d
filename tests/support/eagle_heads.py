"""Tiny random EAGLE-3 heads as they are published, and what such a head computes, plainly.

The twin is written from the published formulas, in float32, over a whole context.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

_EPSILON = 1e-5
# SGLang's name for the layers counts outputs, speculators' counts inputs: [1, 3, 6] are [0, 2, 5].
_SETTINGS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": _EPSILON,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "model_type": "llama",
}


@dataclass(frozen=True)
class EagleHead:
    """A model, the tensors of its head, and the layers whose inputs it reads."""

    model: PreTrainedModel
    tensors: dict[str, torch.Tensor]
    before: tuple[int, ...]
    norms_stream: bool

    @property
    def places(self) -> torch.Tensor:
        """The model's ids of the head's."""
        return torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_guesses: int = 0) -> torch.Tensor:
        """Return the head's logits after each pair of a context, [len(ids) - 1, draft vocab].

        The last `num_guesses` ids are guesses: the pairs that they follow have the head's own
        hidden states.
        """
        known = ids[: len(ids) - num_guesses]
        places = [*self.model.get_decoder().layers, self.model.get_decoder().norm]
        states: dict[int, torch.Tensor] = {}
        hooks = [
            place.register_forward_pre_hook(lambda _, args, i=i: states.update({i: args[0][0]}))
            for i, place in enumerate(places)
        ]
        self.model(torch.tensor([known]))
        for hook in hooks:
            hook.remove()
        streams = torch.cat([states[index] for index in self.before], dim=-1)
        if "input_norm.weight" in self.tensors:
            streams = rms_norm(streams, streams.shape[-1:], self.tensors["input_norm.weight"], 1e-5)
        hidden = (streams @ self.tensors["fc.weight"].T)[:-1]
        for _ in range(num_guesses):
            output, _ = self._layer(ids[1 : len(hidden) + 1], hidden)
            hidden = torch.cat([hidden, output[-1:]])
        return self._layer(ids[1:], hidden)[1]

    def _layer(self, ids: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def get(name: str) -> torch.Tensor:
            return self.tensors[f"midlayer.{name}.weight"]

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, x.shape[-1:], weight, _EPSILON)

        table = self.tensors.get("embed_tokens.weight")
        table = self.model.get_input_embeddings().weight if table is None else table
        normed = norm(hidden, get("hidden_norm"))
        stream = normed if self.norms_stream else hidden
        tokens = norm(table[torch.tensor(list(ids))], get("input_layernorm"))
        x = torch.cat([tokens, normed], dim=-1)
        query, key, value = (
            (x @ get(f"self_attn.{n}_proj").T).view(len(x), -1, 16).transpose(0, 1) for n in "qkv"
        )
        query, key = _rotated(query), _rotated(key).repeat_interleave(2, 0)
        scores = query @ key.transpose(1, 2) / 4.0
        scores += torch.full_like(scores, -torch.inf).triu(1)
        attended = scores.softmax(-1) @ value.repeat_interleave(2, 0)
        stream = stream + attended.transpose(0, 1).flatten(1) @ get("self_attn.o_proj").T
        x = norm(stream, get("post_attention_layernorm"))
        inner = silu(x @ get("mlp.gate_proj").T) * (x @ get("mlp.up_proj").T)
        stream = stream + inner @ get("mlp.down_proj").T
        head = self.tensors["lm_head.weight"]
        return stream, norm(stream, self.tensors["norm.weight"]) @ head.T


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate heads [heads, tokens, 16] as Llama does."""
    rates = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.outer(torch.arange(x.shape[1]).float(), rates).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def write_eagle(
    directory: Path, model: PreTrainedModel, style: str = "specforge", **changes: torch.Tensor
) -> EagleHead:
    """Write a head for `model` and return it; `changes` are other tensors.

    `style`: `specforge` has Llama's norm of the stream, `speculators` another config.json, other
    names of the layer and a normed stream, `own parts` an embedding of its own and more.
    """
    config = model.config.get_text_config()
    width, num_layers = config.hidden_size, config.num_hidden_layers
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    # Of the model's tokens the head knows every third: the offset of its i-th is 2 i.
    size = config.vocab_size // 3
    tensors = {
        "fc.weight": random(64, 3 * width),
        "norm.weight": 1 + random(64),
        "lm_head.weight": random(size, 64),
        "d2t": 2 * torch.arange(size),
        "midlayer.hidden_norm.weight": 1 + random(64),
        "midlayer.input_layernorm.weight": 1 + random(64),
        "midlayer.post_attention_layernorm.weight": 1 + random(64),
        "midlayer.self_attn.q_proj.weight": random(64, 128),
        "midlayer.self_attn.k_proj.weight": random(32, 128),
        "midlayer.self_attn.v_proj.weight": random(32, 128),
        "midlayer.self_attn.o_proj.weight": random(64, 64),
        "midlayer.mlp.gate_proj.weight": random(96, 64),
        "midlayer.mlp.up_proj.weight": random(96, 64),
        "midlayer.mlp.down_proj.weight": random(64, 96),
    }
    before = (0, 1, num_layers)
    name = "eagle_aux_hidden_state_layer_ids"
    if style == "speculators":
        content: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": size,
            "norm_before_residual": True,
            name: before,
            "transformer_layer_config": {**_SETTINGS, "vocab_size": config.vocab_size},
        }
    else:
        before = (1, 1, num_layers)
        content = {
            **_SETTINGS,
            "architectures": ["LlamaForCausalLMEagle3"],
            "pad_token_id": 0,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": size,
            "eagle_config": {name: [index - 1 for index in before], "use_aux_hidden_state": True},
        }
    if style == "own parts":
        tensors["embed_tokens.weight"] = random(config.vocab_size, 64)
        tensors["input_norm.weight"] = 1 + random(3 * width)
    tensors |= changes
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[torch.arange(size) * 3] = True
    stored = {**tensors, "t2d": known}
    if style == "speculators":
        stored = {name.replace("midlayer.", "layers.0."): part for name, part in stored.items()}
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(content))
    return EagleHead(model, tensors, before, norms_stream=style == "speculators")
