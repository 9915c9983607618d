"""What llama.cpp's converter makes of tensors that it does not store as they are.

Each function returns the file's tensors by the names that GGUF gives them. Held by hand against the
converter's own files, conversion/*.py of llama.cpp.
"""

import re
from typing import Any

import torch

_Stored = list[tuple[str, torch.Tensor]]
_MAMBA_1 = ("mamba", "jamba", "kimi_linear")  # whose decays and skips are stored as they are
_LAYER = re.compile(r"(?:layers|h)\.(\d+)\.(.*)$")


def stored_tensors(name: str, values: torch.Tensor, config: Any) -> _Stored | None:
    """Return the file's tensors for one of a model; None where only its name changes."""
    if name.startswith("model.altup_"):
        return []  # stacked, see `stacked_projections`
    if "word_embeddings_layernorm" in name:
        return [(f"token_embd_norm.{name.rpartition('.')[2]}", values)]
    match = _LAYER.search(name)
    if match is None:
        return None
    block, end = f"blk.{match[1]}", match[2]
    make = _OF_TYPES.get((config.model_type.removesuffix("_text"), end))
    if make is None:
        make = next((m for known, m in _OF_EVERY_TYPE.items() if end.endswith(known)), None)
    return make(block, values, config) if make else None


def stacked_projections(model: Any) -> _Stored:
    """Return Gemma 3n's lists of projections, which the file has in two tensors."""
    if model.config.model_type != "gemma3n_text":
        return []
    text = model.model
    return [
        ("altup_proj.weight", torch.stack([p.weight.data for p in text.altup_projections])),
        (
            "altup_unembd_proj.weight",
            torch.stack([p.weight.data for p in text.altup_unembed_projections]),
        ),
    ]


def listed_numbers(model: Any) -> dict[str, list[float]]:
    """Return the numbers of Apertus' activations by layer, which the file has in its metadata."""
    if model.config.model_type != "apertus":
        return {}
    activations = [layer.mlp.act_fn for layer in model.model.layers]
    return {
        f"xielu.{name}": [getattr(activation, name).item() for activation in activations]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


def _decay(block: str, values: torch.Tensor, config: Any) -> _Stored:
    decay = -torch.exp(values)
    if config.model_type == "qwen3_5_text":
        decay = _tiled(decay[:, None], config, 1)[:, 0]
    return [(f"{block}.ssm_a", decay if config.model_type in _MAMBA_1 else _column(decay, config))]


def _column(values: torch.Tensor, config: Any) -> torch.Tensor:
    return values if "qwen3" in config.model_type else values[:, None]


def _step(block: str, values: torch.Tensor, config: Any) -> _Stored:
    if config.model_type == "qwen3_5_text":
        values = _tiled(values[:, None], config, 1)[:, 0]
    return [(f"{block}.ssm_dt.bias", values)]


def _skip(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [
        (f"{block}.ssm_d", values if config.model_type in _MAMBA_1 else _column(values, config))
    ]


def _convolution(block: str, values: torch.Tensor, config: Any) -> _Stored:
    values = values.squeeze(1)
    if config.model_type == "qwen3_5_text":
        values = _tiled_after_keys(values, config)
    return [(f"{block}.ssm_conv1d.weight", values)]


def _short_convolution(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [(f"{block}.shortconv.conv.weight", values.squeeze(1))]


def _bias_of_scores(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [(f"{block}.exp_probs_b.bias", values)]


def _gate_and_up(block: str, values: torch.Tensor, config: Any) -> _Stored:
    if config.model_type == "llama4_text":
        values = values.transpose(1, 2)
    gate, up = values.chunk(2, dim=1)
    return [(f"{block}.ffn_gate_exps.weight", gate), (f"{block}.ffn_up_exps.weight", up)]


def _down(block: str, values: torch.Tensor, config: Any) -> _Stored:
    if config.model_type == "llama4_text":
        values = values.transpose(1, 2)
    return [(f"{block}.ffn_down_exps.weight", values)]


def _shared_in(block: str, values: torch.Tensor, config: Any) -> _Stored:
    end = "_shexp" if config.num_local_experts else ""
    gate, up = values.chunk(2, dim=0)
    return [(f"{block}.ffn_gate{end}.weight", gate), (f"{block}.ffn_up{end}.weight", up)]


def _shared_out(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [(f"{block}.ffn_down{'_shexp' if config.num_local_experts else ''}.weight", values)]


def _router(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [(f"{block}.ffn_gate_inp.weight", values)]


def _latent(block: str, values: torch.Tensor, config: Any) -> _Stored:
    if config.model_type == "minicpm3":
        return [(f"{block}.attn_kv_b.weight", values)]
    heads = values.view(config.num_attention_heads, -1, values.shape[1])
    keys, rest = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return [(f"{block}.attn_k_b.weight", keys.transpose(1, 2)), (f"{block}.attn_v_b.weight", rest)]


def _falcon_qkv(block: str, values: torch.Tensor, config: Any) -> _Stored:
    heads = config.num_attention_heads
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    size = config.hidden_size // heads
    parts = values.view(groups, heads // groups + 2, size, -1)
    kinds = (parts[:, :-2], parts[:, [-2]], parts[:, [-1]])
    rows = torch.cat([kind.reshape(-1, values.shape[1]) for kind in kinds])
    return [(f"{block}.attn_qkv.weight", rows)]


def _by_kind(block: str, values: torch.Tensor, config: Any) -> _Stored:
    """Each head's query, key and value, put so that all queries come first."""
    heads = values.view(config.num_attention_heads, 3, -1, *values.shape[1:])
    end = "weight" if values.dim() > 1 else "bias"
    return [(f"{block}.attn_qkv.{end}", heads.transpose(0, 1).reshape(values.shape))]


def _in_metadata(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return []


def _convolutions(block: str, values: torch.Tensor, config: Any) -> _Stored:
    parts = values.squeeze(1).chunk(3)
    return [
        (f"{block}.ssm_conv1d_{kind}.weight", part[None, :, None])
        for kind, part in zip("qkv", parts, strict=True)
    ]


def _next_qkvz(block: str, values: torch.Tensor, config: Any) -> _Stored:
    key, heads = config.linear_key_head_dim, config.linear_num_key_heads
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    grouped = values.view(heads, 2 * key + 2 * value, -1)
    q, k, v, z = (
        part.reshape(-1, values.shape[1]) for part in grouped.split([key, key, value, value], dim=1)
    )
    return [(f"{block}.attn_qkv.weight", torch.cat((q, k, v))), (f"{block}.attn_gate.weight", z)]


def _tiled(values: torch.Tensor, config: Any, size: int) -> torch.Tensor:
    """Value heads by key head, put so that the first of every key head comes first."""
    heads = config.linear_num_key_heads
    grouped = values.view(heads, config.linear_num_value_heads // heads, size, -1)
    return grouped.transpose(0, 1).reshape(values.shape)


def _tiled_after_keys(values: torch.Tensor, config: Any) -> torch.Tensor:
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    rest = _tiled(values[first:], config, config.linear_value_head_dim)
    return torch.cat((values[:first], rest))


def _tiled_as(stored: str, size_of: Any, is_columns: bool = False) -> Any:
    def make(block: str, values: torch.Tensor, config: Any) -> _Stored:
        rows = values.t() if is_columns else values
        tiled = _tiled(rows.contiguous(), config, size_of(config))
        return [(f"{block}.{stored}.weight", tiled.t() if is_columns else tiled)]

    return make


def _linear_qkv(block: str, values: torch.Tensor, config: Any) -> _Stored:
    return [(f"{block}.attn_qkv.weight", _tiled_after_keys(values, config))]


def _turned(stored: str) -> Any:
    def make(block: str, values: torch.Tensor, config: Any) -> _Stored:
        return [(f"{block}.{stored}.weight", values.t())]

    return make


def _named(stored: str) -> Any:
    def make(block: str, values: torch.Tensor, config: Any) -> _Stored:
        return [(f"{block}.{stored}", values)]

    return make


def _value_size(config: Any) -> int:
    size: int = config.linear_value_head_dim
    return size


_OF_EVERY_TYPE = {
    ".A_log": _decay,
    ".dt_bias": _step,
    "mamba.D": _skip,
    "mixer.D": _skip,
    "conv1d.weight": _convolution,
    "conv.conv.weight": _short_convolution,
    "e_score_correction_bias": _bias_of_scores,
    "expert_bias": _bias_of_scores,
    "experts.gate_up_proj": _gate_and_up,
    "experts.down_proj": _down,
    "shared_mlp.input_linear.weight": _shared_in,
    "shared_mlp.output_linear.weight": _shared_out,
    "block_sparse_moe.router.weight": _router,
    "kv_b_proj.weight": _latent,
    "router.scale": _named("ffn_gate_inp.scale"),
    "router.per_expert_scale": _named("ffn_down_exps.scale"),
}
_OF_TYPES = {
    ("bloom", "self_attention.query_key_value.weight"): _by_kind,
    ("bloom", "self_attention.query_key_value.bias"): _by_kind,
    ("bloom", "post_attention_layernorm.weight"): _named("ffn_norm.weight"),
    ("bloom", "post_attention_layernorm.bias"): _named("ffn_norm.bias"),
    ("gpt_neox", "attention.query_key_value.weight"): _by_kind,
    ("gpt_neox", "attention.query_key_value.bias"): _by_kind,
    ("bitnet", "self_attn.attn_sub_norm.weight"): _named("attn_sub_norm.weight"),
    ("bitnet", "mlp.ffn_sub_norm.weight"): _named("ffn_sub_norm.weight"),
    **{
        ("apertus", f"mlp.act_fn.{name}"): _in_metadata
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    },
    ("kimi_linear", "self_attn.conv1d.weight"): _convolutions,
    ("kimi_linear", "self_attn.forget_gate.f_a_proj.weight"): _named("ssm_f_a.weight"),
    ("kimi_linear", "self_attn.forget_gate.f_b_proj.weight"): _named("ssm_f_b.weight"),
    ("falcon", "self_attention.query_key_value.weight"): _falcon_qkv,
    ("qwen3_next", "linear_attn.in_proj_qkvz.weight"): _next_qkvz,
    ("qwen3_5", "linear_attn.in_proj_qkv.weight"): _linear_qkv,
    ("qwen3_5", "linear_attn.in_proj_z.weight"): _tiled_as("attn_gate", _value_size),
    ("qwen3_5", "linear_attn.in_proj_a.weight"): _tiled_as("ssm_alpha", lambda config: 1),
    ("qwen3_5", "linear_attn.in_proj_b.weight"): _tiled_as("ssm_beta", lambda config: 1),
    ("qwen3_5", "linear_attn.out_proj.weight"): _tiled_as("ssm_out", _value_size, is_columns=True),
    ("gpt2", "attn.c_attn.weight"): _turned("attn_qkv"),
    ("gpt2", "attn.c_proj.weight"): _turned("attn_output"),
    ("gpt2", "mlp.c_fc.weight"): _turned("ffn_up"),
    ("gpt2", "mlp.c_proj.weight"): _turned("ffn_down"),
}
