"""A plain-torch Llama for training the demo pair.

RMSNorm, RoPE, grouped-query attention, SwiGLU, tied head. Parameter names, shapes and arithmetic
are those of transformers' `LlamaForCausalLM`, which loads the saved weights unchanged; transformers
itself is not needed here. Knows no tokenizer, no optimiser and no file.
"""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, silu

QUERY_CHUNK = 256  # queries attended at once: score matrices that stay in the cache of a CPU
UNSEEN = -1e4  # added to the score of a token that must not be seen


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
        self._initialise(torch.Generator().manual_seed(seed))

    def hidden(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Final hidden states [num_rows, row_len, hidden_size] in `dtype`, before the last norm."""
        turns = rotation(rows.positions.flatten(), self.geometry, dtype)
        pieces = attended_pieces(rows.segments)
        # Indexing would add up its gradients atomically, in the order in which threads come by.
        states = embedding(rows.ids.flatten(), self.model.embed_tokens.weight).to(dtype)
        for layer in self.layers():
            attended = Attention.apply(*project(layer, states, *turns), pieces)
            states = finish(layer, states, attended)
        return states.unflatten(0, rows.ids.shape)

    def loss(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Weighted mean cross entropy over the targets that are not -100."""
        is_learnt = rows.targets != -100
        weights = rows.weights[is_learnt]
        logits = self.learnt_logits(rows, dtype)
        losses = cross_entropy(logits, rows.targets[is_learnt], reduction="none")
        return (losses * weights).sum() / weights.sum()

    def learnt_logits(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Logits [num_learnt, vocab_size] where a token is learnt."""
        is_learnt = (rows.targets != -100).flatten()
        return self.logits(self.hidden(rows, dtype).flatten(0, 1)[is_learnt])

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
        self.embed_tokens = nn.Embedding(geometry.vocab_size, geometry.hidden_size)
        self.layers = nn.ModuleList(Layer(geometry) for _ in range(geometry.num_hidden_layers))
        self.norm = nn.RMSNorm(geometry.hidden_size)


class Layer(nn.Module):
    """One transformer layer's parameters; `project` and `finish` are its arithmetic."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        hidden, inner = geometry.hidden_size, geometry.intermediate_size
        queries = geometry.num_attention_heads * geometry.head_dim
        keys = geometry.num_key_value_heads * geometry.head_dim
        self.head_dim, self.eps = geometry.head_dim, geometry.rms_norm_eps
        self.self_attn = _matrices(
            q_proj=(hidden, queries), k_proj=(hidden, keys), v_proj=(hidden, keys),
            o_proj=(queries, hidden),
        )  # fmt: skip
        self.mlp = _matrices(
            gate_proj=(hidden, inner), up_proj=(hidden, inner), down_proj=(inner, hidden)
        )
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(hidden) for _ in range(2))


def _matrices(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})


def project(
    layer: Layer, states: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [num_tokens, num_heads, head_dim] each.

    states [num_tokens, hidden_size]; the queries are scaled too.
    """
    normed = rms_norm(states, layer.input_layernorm.weight, layer.eps)
    query, key, value = (
        multiply(normed, layer.self_attn[name]).unflatten(-1, (-1, layer.head_dim))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    return rotate(query, cos, sin) * layer.head_dim**-0.5, rotate(key, cos, sin), value


def finish(layer: Layer, states: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer behind its attention."""
    states = states + multiply(attended.flatten(1), layer.self_attn["o_proj"])
    normed = rms_norm(states, layer.post_attention_layernorm.weight, layer.eps)
    gate, up = (multiply(normed, layer.mlp[name]) for name in ("gate_proj", "up_proj"))
    return states + multiply(silu(gate) * up, layer.mlp["down_proj"])


def multiply(states: Tensor, matrix: nn.Module) -> Tensor:
    """Through a float32 matrix in the dtype of `states`."""
    assert isinstance(matrix, nn.Linear)
    return linear(states, matrix.weight.to(states.dtype))


# A segment's first token, and the first and the last but one of some of its queries.
Piece = tuple[int, int, int]


def attended_pieces(segments: Tensor) -> list[Piece]:
    """The pieces in which attention runs over rows [num_rows, row_len], tokens counted through."""
    row_len = segments.shape[1]
    changes = torch.diff(segments.flatten()) != 0
    changes[row_len - 1 :: row_len] = True
    edges = [0, *(changes.nonzero().squeeze(1) + 1).tolist(), segments.numel()]
    return [
        (start, first, min(first + QUERY_CHUNK, end))
        for start, end in pairwise(edges)
        for first in range(start, end, QUERY_CHUNK)
    ]


class Attention(torch.autograd.Function):
    """Causal attention inside each segment, a piece of queries at a time.

    query [num_tokens, num_heads, head_dim], scaled; key and value with num_kv_heads. On a CPU this
    is several times as fast, backward included, as torch's own attention or as a masked one.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece]) -> Tensor:
        attended, saved = torch.empty_like(query), []
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        for start, first, stop in pieces:
            scores = _by_group(query[first:stop], key) @ keys[:, start:stop].mT
            _hide_later(scores, stop - first)
            saved.append(torch.softmax(scores, -1))
            _put(attended, saved[-1] @ values[:, start:stop], first, stop)
        ctx.save_for_backward(query, key, value, *saved)
        ctx.pieces = pieces
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *saved = ctx.saved_tensors
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        for_query, for_key, for_value = (torch.zeros_like(t) for t in (query, key, value))
        for (start, first, stop), weights in zip(ctx.pieces, saved, strict=True):
            ahead = _by_group(gradient[first:stop], key)
            for_weights = ahead @ values[:, start:stop].mT
            for_scores = torch._softmax_backward_data(for_weights, weights, -1, weights.dtype)
            _put(for_query, for_scores @ keys[:, start:stop], first, stop)
            asked = _by_group(query[first:stop], key)
            for_key[start:stop] += (for_scores.mT @ asked).transpose(0, 1)
            for_value[start:stop] += (weights.mT @ ahead).transpose(0, 1)
        return for_query, for_key, for_value, None


def _by_group(heads: Tensor, key: Tensor) -> Tensor:
    """[num_queries, num_heads, head_dim] as [num_kv_heads, group * num_queries, head_dim]."""
    return heads.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _put(whole: Tensor, part: Tensor, first: int, stop: int) -> None:
    """Write back what `_by_group` sorted."""
    heads = part.unflatten(1, (-1, stop - first)).permute(2, 0, 1, 3)
    whole[first:stop] = heads.flatten(1, 2)


def _hide_later(scores: Tensor, num_queries: int) -> None:
    """Hide the keys behind each query, which are among the last `num_queries`, in place."""
    last = scores[..., -num_queries:].unflatten(1, (-1, num_queries))
    last += torch.full((num_queries, num_queries), UNSEEN, dtype=scores.dtype).triu_(1)


def rotation(positions: Tensor, geometry: Geometry, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_tokens, 1, head_dim / 2] of the rotary embedding."""
    half = geometry.head_dim // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[:, None, None].float() * geometry.rope_theta**-exponents
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
