"""A plain-torch Llama for training the demo pair.

RMSNorm, RoPE, grouped-query attention, SwiGLU, tied head. Parameter names, shapes and arithmetic
are those of transformers' `LlamaForCausalLM`, which loads the saved weights unchanged; transformers
itself is not needed here. Knows no tokenizer, no optimiser and no file.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, silu

QUERY_CHUNK = 256  # queries attended at once: score matrices that stay in the cache of a CPU
UNSEEN = -1e4  # added to the score of a token that must not be seen
LOSS_CHUNK = 1024  # positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a network, with the fields of a Hugging Face Llama config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5

    def hf_config(self, *, bos_id: int, end_id: int, pad_id: int) -> dict[str, object]:
        """The contents of config.json."""
        return asdict(self) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": bos_id,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed training rows.

    ids, positions, segments  [num_rows, row_len] int64; tokens attend within their segment
                              only, and segment 0 is padding
    targets                   [num_rows, row_len] int64; the next token, or -100 where none is
                              learnt
    weights                   [num_rows, row_len] float32; how much each target counts
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "Rows":
        return Rows(*(getattr(self, name).to(device) for name in self.__slots__))


class Network(nn.Module):
    """The language model; `model.` prefixes all names, as in transformers."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = Trunk(geometry)
        self._run_layer: Callable[..., Tensor] = run_layer
        self._run_loss: Callable[..., Tensor] = summed_loss
        self._initialise(torch.Generator().manual_seed(seed))

    def compile_parts(self) -> None:
        """Compile the layer and the loss; one compilation per row length, shared by all layers."""
        torch._dynamo.config.recompile_limit = 64
        self._run_layer = torch.compile(run_layer, dynamic=False)
        self._run_loss = torch.compile(summed_loss, dynamic=False)

    def hidden(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Final hidden states [num_rows, row_len, hidden_size] in `dtype`, before the last norm."""
        turns = rotation(rows.positions, self.geometry, dtype)
        mask = segment_mask(rows.segments)
        # Indexing would add up its gradients atomically, in the order in which threads come by.
        states = embedding(rows.ids, self.model.embed_tokens.weight).to(dtype)
        for layer in self.layers():
            states = self._run_layer(layer, states, *turns, mask)
        return states

    def loss(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Weighted mean cross entropy over the targets that are not -100."""
        targets = rows.targets.flatten()
        chosen = (targets != -100).nonzero().squeeze(1)
        # Pad to whole chunks, so that the compiled loss sees one shape only.
        padding = -len(chosen) % LOSS_CHUNK
        picked = torch.cat([chosen, chosen.new_zeros(padding)])
        labels = torch.cat([targets[chosen], targets.new_full((padding,), -100)])
        weights = rows.weights.flatten()[picked]
        states = self.hidden(rows, dtype).flatten(0, 1)[picked]
        head, norm, eps = (
            self.model.embed_tokens.weight,
            self.model.norm.weight,
            self.geometry.rms_norm_eps,
        )
        chunks = (part.split(LOSS_CHUNK) for part in (states, labels, weights))
        total = sum(
            self._run_loss(piece, norm, head, label, weight, eps)
            for piece, label, weight in zip(*chunks, strict=True)
        )
        assert isinstance(total, Tensor), "no target in these rows"
        return total / rows.weights.flatten()[chosen].sum()

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocab_size] in float32 of final hidden states [..., hidden_size]."""
        normed = rms_norm(states, self.model.norm.weight, self.geometry.rms_norm_eps)
        return linear(normed, self.model.embed_tokens.weight.to(states.dtype)).float()

    def layers(self) -> list["Layer"]:
        """The layers, bottom up."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        depth = math.sqrt(2 * self.geometry.num_hidden_layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            spread = 0.02 if "embed" in name else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread /= depth
            weight.normal_(0.0, spread, generator=generator)


class Trunk(nn.Module):
    """Everything below the head."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.embed_tokens = Weight(geometry.vocab_size, geometry.hidden_size)
        self.layers = nn.ModuleList(Layer(geometry) for _ in range(geometry.num_hidden_layers))
        self.norm = Weight(geometry.hidden_size)


class Layer(nn.Module):
    """One transformer layer's parameters; `run_layer` is its arithmetic."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        hidden, inner = geometry.hidden_size, geometry.intermediate_size
        queries = geometry.num_attention_heads * geometry.head_dim
        keys = geometry.num_key_value_heads * geometry.head_dim
        self.head_dim, self.eps = geometry.head_dim, geometry.rms_norm_eps
        self.self_attn = Group(
            q_proj=(queries, hidden),
            k_proj=(keys, hidden),
            v_proj=(keys, hidden),
            o_proj=(hidden, queries),
        )
        self.mlp = Group(
            gate_proj=(inner, hidden), up_proj=(inner, hidden), down_proj=(hidden, inner)
        )
        self.input_layernorm = Weight(hidden)
        self.post_attention_layernorm = Weight(hidden)


class Group(nn.Module):
    """Some matrices under one name."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.add_module(name, Weight(*shape))

    def __getitem__(self, name: str) -> Tensor:
        weight = self.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return weight


class Weight(nn.Module):
    """One parameter named `weight`, as transformers names it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


def run_layer(layer: Layer, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    """One layer over whole rows; states [num_rows, row_len, hidden_size]."""
    query, key, value = project(layer, states, cos, sin)
    states = states + merge(layer, attend_within(query, key, value, mask))
    return states + feed_forward(layer, states)


def project(
    layer: Layer, states: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values: [num_rows, num_heads, row_len, head_dim] each."""
    normed = rms_norm(states, layer.input_layernorm.weight, layer.eps)
    query, key, value = (
        linear(normed, layer.self_attn[name].to(states.dtype))
        .unflatten(-1, (-1, layer.head_dim))
        .transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def merge(layer: Layer, attended: Tensor) -> Tensor:
    """Project heads [num_rows, num_heads, row_len, head_dim] back to hidden states."""
    flat = attended.transpose(1, 2).flatten(2)
    return linear(flat, layer.self_attn["o_proj"].to(flat.dtype))


def feed_forward(layer: Layer, states: Tensor) -> Tensor:
    """The gated MLP with its norm."""
    normed = rms_norm(states, layer.post_attention_layernorm.weight, layer.eps)
    gate, up, down = (
        layer.mlp[name].to(states.dtype) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return linear(silu(linear(normed, gate)) * linear(normed, up), down)


def segment_mask(segments: Tensor) -> Tensor:
    """What causal attention inside each segment adds to the scores: 0, or -10,000 where unseen.

    segments [num_rows, row_len]; the result is [num_rows, 1, row_len, row_len] float32, made once
    for all layers: the comparisons in every layer took half the time of attention.
    """
    index = torch.arange(segments.shape[1], device=segments.device)
    is_same = segments[:, :, None] == segments[:, None, :]
    is_seen = is_same & (index[:, None] >= index[None, :])
    hidden = torch.full(is_seen.shape, UNSEEN, device=segments.device)
    return hidden.masked_fill_(is_seen, 0.0)[:, None]


def attend_within(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Causal attention under a `segment_mask`, a chunk of queries at a time.

    query [num_rows, num_heads, row_len, head_dim], key and value with num_kv_heads. On a CPU this
    compiles to code half again as fast, backward included, as the built-in attention at these
    lengths.
    """
    groups, row_len = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = query * query.shape[-1] ** -0.5
    attended = []
    for start in range(0, row_len, QUERY_CHUNK):
        stop = min(row_len, start + QUERY_CHUNK)
        scores = (query[:, :, start:stop] @ key[:, :, :stop].transpose(-1, -2)).float()
        weights = torch.softmax(scores + mask[:, :, start:stop, :stop], -1)
        attended.append(weights.to(value.dtype) @ value[:, :, :stop])
    return torch.cat(attended, 2)


def rotation(positions: Tensor, geometry: Geometry, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_rows, 1, row_len, head_dim / 2] of the rotary embedding."""
    half = geometry.head_dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() * geometry.rope_theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs half a head apart, as transformers' Llama does."""
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, the result in the dtype of `states`."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(states.dtype) * weight.to(states.dtype)


def summed_loss(
    states: Tensor, norm: Tensor, head: Tensor, labels: Tensor, weights: Tensor, eps: float
) -> Tensor:
    """Weighted cross entropy summed over the labels that are not -100."""
    logits = linear(rms_norm(states, norm, eps), head.to(states.dtype)).float()
    return (cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()
