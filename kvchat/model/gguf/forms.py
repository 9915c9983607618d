"""How tensors of a transformers model are made from those of a GGUF file.

Most are the same matrix under another name, which the package gguf knows. llama.cpp's converter
puts some into another form: rows in another order, experts' matrices apart, a product precomputed.
A `Form` undoes one such change. Forms are tried in order; the first whose tensors the file has is
used.
"""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvchat.core.errors import ModelError

Parts = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to make a tensor of the model.

    `pattern`   matches the tensor's name in the model
    `stored`    the names of the file's tensors; {0} stands for the pattern's first group
    `order`     returns, for each row of the tensor, its row in the file's tensors one below the
                other; the arguments are the number of rows and the model's configuration
    `columns`   returns the same for each column, of a form of one matrix
    `places`    returns, for each of the file's tensors, the view of the new tensor it fills
    `make`      returns the tensor from the file's in float32; the last argument is the match
    `may_differ`    whether rows of `order` may be in several matrices, in formats of their own
    `is_turned` whether the file has the matrix transposed, or those of experts
    `are_experts`  whether the file's tensors are matrices of all experts, each of their rows a run
                of the new tensor's
    """

    pattern: re.Pattern[str]
    stored: tuple[str, ...]
    order: Callable[[int, Any], torch.Tensor] | None = None
    columns: Callable[[int, Any], torch.Tensor] | None = None
    places: Callable[[torch.Tensor, Any], Parts] | None = None
    make: Callable[[Parts, Any, re.Match[str]], torch.Tensor] | None = None
    may_differ: bool = False
    is_turned: bool = False
    are_experts: bool = False

    def names(self, name: str) -> tuple[str, ...]:
        """Return the file's names for a tensor of the model; () where the form is not for it."""
        match = self.pattern.search(name)
        return tuple(s.format(*match.groups()) for s in self.stored) if match else ()

    def made(self, name: str, parts: Parts, config: Any) -> torch.Tensor:
        """Return what `make` does for a tensor of the model."""
        match = self.pattern.search(name)
        assert match is not None, name
        assert self.make is not None, name
        return self.make(parts, config, match)


def form(pattern: str, *stored: str, **how: Any) -> Form:
    """Return a form whose `pattern` stands for the end of a name."""
    return Form(re.compile(pattern + "$"), stored, **how)


def forms_of(name: str, forms: tuple[Form, ...], has: Container[str]) -> Iterator[Form]:
    """Yield the forms of a tensor of the model whose tensors the file has."""
    for candidate in forms:
        names = candidate.names(name)
        if names and all(stored in has for stored in names):
            yield candidate


def _chunks(out: torch.Tensor, config: Any) -> Parts:
    return list(out.chunk(2, dim=1))


def _turned_chunks(out: torch.Tensor, config: Any) -> Parts:
    return list(out.transpose(1, 2).chunk(2, dim=1))


def _turned(out: torch.Tensor, config: Any) -> Parts:
    return [out.transpose(1, 2)]


def _by_turns(out: torch.Tensor, config: Any) -> Parts:
    """Outputs alternate between gate and up; [experts, in, out] or the biases [experts, out]."""
    rows = out.transpose(1, -1)
    return [rows[:, 0::2], rows[:, 1::2]]


def _keys_and_values(out: torch.Tensor, config: Any) -> Parts:
    """Latent attention: a head's key rows, which the file has transposed, and its value rows."""
    heads = out.view(config.num_attention_heads, -1, out.shape[1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return [keys.transpose(1, 2), values]


def _halves(kind: str, num_rows: int, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers one half of a head with the other."""
    heads = config.num_attention_heads if kind == "q" else config.num_key_value_heads
    if num_rows % (2 * heads):
        raise ModelError(f"The attention's {num_rows} rows do not divide into {heads} heads.")
    pairs = torch.arange(num_rows).view(heads, num_rows // heads // 2, 2)
    return pairs.transpose(1, 2).flatten()


def _falcon_groups(num_rows: int, config: Any) -> torch.Tensor:
    """Falcon has each group's queries, key and value together; the file has them by kind."""
    heads = config.num_attention_heads
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    size = num_rows // (heads + 2 * groups)
    rows = torch.arange(num_rows).view(-1, size)
    queries = rows[:heads].view(groups, heads // groups, size)
    keys, values = rows[heads : heads + groups, None], rows[heads + groups :, None]
    return torch.cat((queries, keys, values), dim=1).flatten()


def _by_heads(num_rows: int, config: Any) -> torch.Tensor:
    """Each head's query, key and value are together; the file has them by kind."""
    heads = config.num_attention_heads
    return torch.arange(num_rows).view(3, heads, -1).transpose(0, 1).flatten()


def _part(number: int) -> Callable[[int, Any], torch.Tensor]:
    """Return the rows of queries (0), keys (1) or values (2) in a tensor of all three."""

    def order(num_rows: int, config: Any) -> torch.Tensor:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        size = num_rows // (heads + 2 * groups)
        rows = torch.arange(num_rows)
        return rows.split([heads * size, groups * size, groups * size])[number]

    return order


def _as_they_are(num_rows: int, config: Any) -> torch.Tensor:
    return torch.arange(num_rows)


def _next_groups(num_rows: int, config: Any) -> torch.Tensor:
    """Qwen3-Next has query, key, values and gates of each key head together."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    kinds = torch.arange(num_rows).split([heads * key, heads * key, heads * value, heads * value])
    return torch.cat([kind.view(heads, -1) for kind in kinds], dim=1).flatten()


def _value_heads(num_rows: int, config: Any, size: int) -> torch.Tensor:
    """Qwen3.5 has value heads by key head; the file has the first of every key head first."""
    heads = config.linear_num_key_heads
    return torch.arange(num_rows).view(-1, heads, size).transpose(0, 1).flatten()


def _value_rows(num_rows: int, config: Any) -> torch.Tensor:
    return _value_heads(num_rows, config, config.linear_value_head_dim)


def _value_scalars(num_rows: int, config: Any) -> torch.Tensor:
    return _value_heads(num_rows, config, 1)


def _last_value_rows(num_rows: int, config: Any) -> torch.Tensor:
    """Queries and keys come first, in the same order in both."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat((torch.arange(first), first + _value_rows(num_rows - first, config)))


def _logarithm(parts: Parts, config: Any, match: re.Match[str]) -> torch.Tensor:
    return (-parts[0]).log()


def _value_logarithm(parts: Parts, config: Any, match: re.Match[str]) -> torch.Tensor:
    values = _logarithm(parts, config, match)
    return values[_value_scalars(len(values), config)]


def _one_of_stack(parts: Parts, config: Any, match: re.Match[str]) -> torch.Tensor:
    return parts[0][int(match[1])]


_LAYER = r"layers\.(\d+)\."
GENERAL = (
    form(
        _LAYER + r".*\bexperts\.gate_up_proj",
        "blk.{0}.ffn_gate_exps.weight",
        "blk.{0}.ffn_up_exps.weight",
        places=_chunks,
        are_experts=True,
    ),
    form(
        _LAYER + r".*\bexperts\.gate_up_proj", "blk.{0}.ffn_gate_up_exps.weight", are_experts=True
    ),
    form(_LAYER + r".*\bexperts\.up_proj", "blk.{0}.ffn_up_exps.weight"),
    form(_LAYER + r".*\bexperts\.down_proj", "blk.{0}.ffn_down_exps.weight", are_experts=True),
    form(_LAYER + r".*(?:e_score_correction_bias|expert_bias)", "blk.{0}.exp_probs_b.bias"),
    form(_LAYER + r".*(?:e_score_correction_bias|expert_bias)", "blk.{0}.exp_probs_b"),
    form(_LAYER + r"self_attn\.sinks", "blk.{0}.attn_sinks.weight"),
    form(_LAYER + r"\w+\.dt_bias", "blk.{0}.ssm_dt.bias"),
    form(_LAYER + r"\w+\.A_log", "blk.{0}.ssm_a", make=_logarithm),
)
HALVES = tuple(
    form(
        _LAYER + rf"self_attn\.{kind}_proj\.(weight|bias)",
        f"blk.{{0}}.attn_{kind}.{{1}}",
        order=partial(_halves, kind),
    )
    for kind in "qk"
)
GPT2 = tuple(
    form(rf"h\.(\d+)\.{part}\.weight", f"blk.{{0}}.{stored}.weight", is_turned=True)
    for part, stored in (
        ("attn\\.c_attn", "attn_qkv"),
        ("attn\\.c_proj", "attn_output"),
        ("mlp\\.c_fc", "ffn_up"),
        ("mlp\\.c_proj", "ffn_down"),
    )
)
FALCON = (
    form(
        r"h\.(\d+)\.self_attention\.query_key_value\.weight",
        "blk.{0}.attn_qkv.weight",
        order=_falcon_groups,
    ),
)
BLOOM = (
    form(
        r"h\.(\d+)\.self_attention\.query_key_value\.(weight|bias)",
        "blk.{0}.attn_qkv.{1}",
        order=_by_heads,
    ),
    form(r"word_embeddings_layernorm\.(weight|bias)", "token_embd_norm.{0}"),
    form(r"h\.(\d+)\.post_attention_layernorm\.(weight|bias)", "blk.{0}.ffn_norm.{1}"),
)
GPT_NEOX = (
    form(
        _LAYER + r"attention\.query_key_value\.(weight|bias)",
        "blk.{0}.attn_qkv.{1}",
        order=_by_heads,
    ),
)
FUSED = tuple(
    form(
        _LAYER + rf"self_attn\.{kind}_proj\.(weight|bias)",
        "blk.{0}.attn_qkv.{1}",
        order=_part(number),
    )
    for number, kind in enumerate("qkv")
)
BITNET = (
    form(_LAYER + r"self_attn\.attn_sub_norm\.weight", "blk.{0}.attn_sub_norm.weight"),
    form(_LAYER + r"mlp\.ffn_sub_norm\.weight", "blk.{0}.ffn_sub_norm.weight"),
)
ALTERNATING = (
    form(
        _LAYER + r"mlp\.experts\.gate_up_proj",
        "blk.{0}.ffn_gate_exps.weight",
        "blk.{0}.ffn_up_exps.weight",
        places=_by_turns,
        is_turned=True,
        are_experts=True,
    ),
    form(
        _LAYER + r"mlp\.experts\.gate_up_proj_bias",
        "blk.{0}.ffn_gate_exps.bias",
        "blk.{0}.ffn_up_exps.bias",
        places=_by_turns,
    ),
    form(
        _LAYER + r"mlp\.experts\.down_proj",
        "blk.{0}.ffn_down_exps.weight",
        places=_turned,
        is_turned=True,
        are_experts=True,
    ),
    form(_LAYER + r"mlp\.experts\.down_proj_bias", "blk.{0}.ffn_down_exps.bias"),
)
LLAMA4 = (
    form(
        _LAYER + r"feed_forward\.experts\.gate_up_proj",
        "blk.{0}.ffn_gate_exps.weight",
        "blk.{0}.ffn_up_exps.weight",
        places=_turned_chunks,
    ),
    form(
        _LAYER + r"feed_forward\.experts\.down_proj", "blk.{0}.ffn_down_exps.weight", places=_turned
    ),
)
LATENT = (
    form(
        _LAYER + r"self_attn\.kv_b_proj\.weight",
        "blk.{0}.attn_k_b.weight",
        "blk.{0}.attn_v_b.weight",
        places=_keys_and_values,
    ),
)
KIMI = (
    *LATENT,
    form(
        _LAYER + r"self_attn\.conv1d\.weight",
        *(f"blk.{{0}}.ssm_conv1d_{kind}.weight" for kind in "qkv"),
        order=_as_they_are,
    ),
    form(_LAYER + r"self_attn\.forget_gate\.(f_[ab])_proj\.weight", "blk.{0}.ssm_{1}.weight"),
    form(_LAYER + r"self_attn\.forget_gate\.dt_bias", "blk.{0}.ssm_dt.bias"),
    form(_LAYER + r"self_attn\.forget_gate\.A_log", "blk.{0}.ssm_a", make=_logarithm),
)
QWEN3_NEXT = (
    form(
        _LAYER + r"linear_attn\.in_proj_qkvz\.weight",
        "blk.{0}.attn_qkv.weight",
        "blk.{0}.attn_gate.weight",
        order=_next_groups,
        may_differ=True,
    ),
)
_LINEAR = _LAYER + r"linear_attn\."
QWEN3_5 = (
    form(_LINEAR + r"in_proj_qkv\.weight", "blk.{0}.attn_qkv.weight", order=_last_value_rows),
    form(_LINEAR + r"in_proj_z\.weight", "blk.{0}.attn_gate.weight", order=_value_rows),
    form(_LINEAR + r"in_proj_a\.weight", "blk.{0}.ssm_alpha.weight", order=_value_scalars),
    form(_LINEAR + r"in_proj_b\.weight", "blk.{0}.ssm_beta.weight", order=_value_scalars),
    form(_LINEAR + r"dt_bias", "blk.{0}.ssm_dt.bias", order=_value_scalars),
    form(_LINEAR + r"A_log", "blk.{0}.ssm_a", make=_value_logarithm),
    form(_LINEAR + r"conv1d\.weight", "blk.{0}.ssm_conv1d.weight", order=_last_value_rows),
    form(_LINEAR + r"out_proj\.weight", "blk.{0}.ssm_out.weight", columns=_value_rows),
)
GEMMA3N = tuple(
    form(rf"altup_{ours}\.(\d+)\.weight", f"altup_{theirs}.weight", make=_one_of_stack)
    for ours, theirs in (("projections", "proj"), ("unembed_projections", "unembd_proj"))
)
GEMMA4 = (
    form(_LAYER + r"router\.scale", "blk.{0}.ffn_gate_inp.scale"),
    form(_LAYER + r"router\.per_expert_scale", "blk.{0}.ffn_down_exps.scale"),
)
GRANITE_SHARED = (
    form(_LAYER + r"block_sparse_moe\.router\.weight", "blk.{0}.ffn_gate_inp.weight"),
    form(
        _LAYER + r"shared_mlp\.input_linear\.weight",
        "blk.{0}.ffn_gate_shexp.weight",
        "blk.{0}.ffn_up_shexp.weight",
        order=_as_they_are,
    ),
    form(
        _LAYER + r"shared_mlp\.input_linear\.weight",
        "blk.{0}.ffn_gate.weight",
        "blk.{0}.ffn_up.weight",
        order=_as_they_are,
    ),
    form(_LAYER + r"shared_mlp\.output_linear\.weight", "blk.{0}.ffn_down_shexp.weight"),
    form(_LAYER + r"shared_mlp\.output_linear\.weight", "blk.{0}.ffn_down.weight"),
)
