"""llama.cpp's architectures, and the transformers model that each one is.

llama.cpp's metadata leave out what its code knows, so a guess would give a model that talks
nonsense: the architectures are mapped one by one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvchat.core.errors import ModelUnsupported
from kvchat.model.gguf_file import GgufModel
from kvchat.model.gguf_forms import (
    ALTERNATING,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GPT2,
    GRANITE_SHARED,
    HALVES,
    LATENT,
    LLAMA4,
    QWEN3_5,
    QWEN3_NEXT,
    Form,
)

Config = dict[str, Any]

# The layers of the one size of a family that scales its queries otherwise.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_SIGMOID = 2  # the format's number for scores of experts by a sigmoid


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one of llama.cpp's architectures becomes a transformers model.

    `model_type`    transformers' name
    `settings`      what config.json says of every such model
    `names`         further settings by their metadata keys
    `adapt`         completes a configuration, None if nothing is left to do
    `forms`         how tensors are made that the file has in another form
    `norm_offset`   what the file adds to the weights of norms
    `prefix`        what the package gguf calls "model." in names of tensors
    `attends`       whether any layer has attention
    """

    model_type: str
    settings: Config
    names: dict[str, str]
    adapt: Callable[[Config, GgufModel], None] | None = None
    forms: tuple[Form, ...] = ()
    norm_offset: float = 0.0
    prefix: str = "model."
    attends: bool = True


def _has(gguf: GgufModel, end: str) -> bool:
    """Whether any layer of a file has a tensor of this name."""
    return any(name.endswith(end) for name in gguf.tensors)


def _llama(config: Config, gguf: GgufModel) -> None:
    _biases(config, gguf)
    config.setdefault("head_dim", gguf.get("rope.dimension_count"))
    if gguf.get("expert_count"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = gguf.get("expert_count")
        config["num_experts_per_tok"] = gguf.get("expert_used_count")


def _biases(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = _has(gguf, ".attn_q.bias")
    config["mlp_bias"] = _has(gguf, ".ffn_up.bias")


def _mixture(config: Config, gguf: GgufModel) -> None:
    config.setdefault("intermediate_size", config["moe_intermediate_size"])


def _gemma2(config: Config, gguf: GgufModel) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(config, _GEMMA2_27B_LAYERS)


def _gemma3(config: Config, gguf: GgufModel) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(config, _GEMMA3_27B_LAYERS)
    _windows(config, gguf, 6)
    config["rope_local_base_freq"] = gguf.get("rope.freq_base_swa", 10000.0)
    config.setdefault("sliding_window", config["max_position_embeddings"])


def _windows(config: Config, gguf: GgufModel, period: int) -> None:
    """Set which layers have a window: of every `period` all but the last, or as the file says."""
    pattern = gguf.get("attention.sliding_window_pattern", period)
    num_layers = config["num_hidden_layers"]
    if hasattr(pattern, "__len__"):  # whether each layer has a window
        slides = [bool(flag) for flag in pattern][:num_layers]
    else:
        slides = [bool((index + 1) % pattern) for index in range(num_layers)]
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in slides]


def _query_scalar(config: Config, largest: int) -> int:
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma3n(config: Config, gguf: GgufModel) -> None:
    _gemma3(config, gguf)
    scales = gguf.get("activation_sparsity_scale") or [-math.inf] * config["num_hidden_layers"]
    # The share of activations below so many standard deviations, which the file has as those.
    shares = [0.5 * (1 + math.erf(scale / math.sqrt(2))) for scale in scales]
    config["activation_sparsity_pattern"] = [round(share, 4) for share in shares]
    config["laurel_rank"] = gguf.tensors["blk.0.laurel_l.weight"].shape[0]
    config["intermediate_size"] = list(config["intermediate_size"])
    config["vocab_size_per_layer_input"] = gguf.tensors["per_layer_token_embd.weight"].shape[0]


def _gemma4(config: Config, gguf: GgufModel) -> None:
    _windows(config, gguf, 6)
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    config["head_dim"] = gguf.get("attention.key_length_swa", config.get("head_dim"))
    config["global_head_dim"] = gguf.get("attention.key_length")
    heads = config.get("num_key_value_heads")
    if hasattr(heads, "__len__"):
        config["num_key_value_heads"] = _of_layers(heads, slides, True)
        config["num_global_key_value_heads"] = _of_layers(heads, slides, False)
    widths = config["intermediate_size"]
    if hasattr(widths, "__len__"):
        config["use_double_wide_mlp"] = len(set(widths)) > 1
        config["intermediate_size"] = min(widths)
    full = [f"blk.{index}.attn_" for index, flag in enumerate(slides) if not flag]
    config["attention_k_eq_v"] = any(
        f"{layer}k.weight" in gguf.tensors and f"{layer}v.weight" not in gguf.tensors
        for layer in full
    )
    per_layer = gguf.tensors.get("per_layer_token_embd.weight")
    if per_layer is not None:
        config["vocab_size_per_layer_input"] = per_layer.shape[0]
    config["enable_moe_block"] = bool(gguf.get("expert_count"))
    factors = gguf.floats("rope_freqs.weight") or [1.0]
    rotated = sum(factor < 2 for factor in factors) / len(factors)
    config["rope_parameters"] = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": gguf.get("rope.freq_base_swa", 10000.0),
        },
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": rotated,
        },
    }


def _of_layers(values: Any, slides: list[bool], is_sliding: bool) -> int | None:
    """Return the value of the layers with a window, or of those without; None without any."""
    return next((v for v, flag in zip(values, slides, strict=False) if flag == is_sliding), None)


def _partial_rotary(config: Config, gguf: GgufModel) -> None:
    """Set the share of a head's dimensions that are rotated, where the file says how many are."""
    rotated = gguf.get("rope.dimension_count")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rotated is not None and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if config.get("sliding_window") == 0:  # the format's way to say that there is none
        config["sliding_window"] = None


def _stablelm(config: Config, gguf: GgufModel) -> None:
    _partial_rotary(config, gguf)
    config["use_qkv_bias"] = _has(gguf, ".attn_q.bias")
    config["use_parallel_residual"] = not _has(gguf, ".ffn_norm.weight")
    config["qk_layernorm"] = _has(gguf, ".attn_q_norm.weight")


def _olmo2(config: Config, gguf: GgufModel) -> None:
    if config.get("sliding_window"):
        config["model_type"] = "olmo3"
        _windows(config, gguf, 4)


def _smollm3(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = _has(gguf, ".attn_q.bias")


def _granite_mixture(config: Config, gguf: GgufModel) -> None:
    _biases(config, gguf)
    if not gguf.get("expert_shared_feed_forward_length"):
        config["model_type"] = "granitemoe"


def _deepseek(config: Config, gguf: GgufModel) -> None:
    if not config.get("n_routed_experts"):
        raise ModelUnsupported(
            "A GGUF file of deepseek2 without experts is not mapped.", "Use its safetensors."
        )
    is_sigmoid = gguf.get("expert_gating_func", 0) == _SIGMOID or _has(gguf, ".exp_probs_b.bias")
    config["model_type"] = "deepseek_v3" if is_sigmoid else "deepseek_v2"
    rotated = gguf.get("rope.dimension_count")
    # Files of before the split of kv_b have no lengths of their own for it.
    key = gguf.get("attention.key_length_mla", gguf.get("attention.key_length"))
    value = gguf.get("attention.value_length_mla", gguf.get("attention.value_length"))
    config["v_head_dim"] = value
    config["qk_rope_head_dim"] = config["head_dim"] = rotated
    config["qk_nope_head_dim"] = key - rotated
    config["num_key_value_heads"] = config["num_attention_heads"]
    if not _has(gguf, ".attn_q_a.weight"):
        config["q_lora_rank"] = None
    if (config.get("n_group") or 1) > 1:
        config["topk_method"] = "group_limited_greedy"
    elif is_sigmoid:
        config["n_group"] = config["topk_group"] = 1
    config.setdefault("norm_topk_prob", False)
    config.setdefault("routed_scaling_factor", 1.0)


def _sigmoid_mixture(config: Config, gguf: GgufModel) -> None:
    """GLM 4.5 and others that are routed like DeepSeek V3, with plain attention."""
    _biases(config, gguf)
    _partial_rotary(config, gguf)
    config["use_qk_norm"] = _has(gguf, ".attn_q_norm.weight")
    config.setdefault("norm_topk_prob", False)


def _gpt2(config: Config, gguf: GgufModel) -> None:
    if _has(gguf, ".attn_q.weight"):
        raise ModelUnsupported(
            "A GGUF file of gpt2 with separate queries is not mapped.", "Use its safetensors."
        )


def _starcoder(config: Config, gguf: GgufModel) -> None:
    config["multi_query"] = config.pop("num_key_value_heads", 1) == 1
    if not config["multi_query"]:
        raise ModelUnsupported(
            "A GGUF file of starcoder without multi-query attention is not mapped.",
            "Use its safetensors.",
        )


def _falcon(config: Config, gguf: GgufModel) -> None:
    groups = config.pop("num_key_value_heads", 1)
    config["num_kv_heads"] = groups
    config["new_decoder_architecture"] = groups > 1
    config["multi_query"] = True
    config["num_ln_in_parallel_attn"] = 2 if _has(gguf, ".attn_norm_2.weight") else 1


def _lfm2(config: Config, gguf: GgufModel) -> None:
    heads = config["num_key_value_heads"]
    counts = list(heads) if hasattr(heads, "__len__") else [heads] * config["num_hidden_layers"]
    config["layer_types"] = ["full_attention" if count else "conv" for count in counts]
    config["num_key_value_heads"] = max(counts)
    config["use_expert_bias"] = _has(gguf, ".exp_probs_b.bias")


def _linear_attention(config: Config, gguf: GgufModel) -> None:
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    _partial_rotary(config, gguf)
    config["layer_types"] = [
        "linear_attention" if f"blk.{index}.ssm_a" in gguf.tensors else "full_attention"
        for index in range(config["num_hidden_layers"])
    ]
    heads = config["linear_num_value_heads"]
    config["linear_value_head_dim"] = gguf.get("ssm.inner_size") // heads


def _exaone4(config: Config, gguf: GgufModel) -> None:
    if config.get("sliding_window"):
        _windows(config, gguf, 4)
    else:
        config["sliding_window"] = None
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _ernie(config: Config, gguf: GgufModel) -> None:
    config["use_bias"] = _has(gguf, ".attn_q.bias")
    if gguf.get("expert_count"):
        config["moe_layer_end_index"] = config["num_hidden_layers"] - 1
        config.setdefault("moe_num_shared_experts", 0)


def _llama4(config: Config, gguf: GgufModel) -> None:
    layers = range(config["num_hidden_layers"])
    config["moe_layers"] = [n for n in layers if f"blk.{n}.ffn_gate_inp.weight" in gguf.tensors]
    config["interleave_moe_layer_step"] = config["interleave_moe_layer_step"] or 1
    # As llama.cpp takes it for every size.
    config["attention_chunk_size"] = gguf.get("attention.chunk_size", 8192)
    # Of the published sizes the one with 128 experts (Maverick) has no norms of queries and keys.
    config["use_qk_norm"] = gguf.get("expert_count") != 128


def _mistral3(config: Config, gguf: GgufModel) -> None:
    """Ministral 3, whose queries grow with the position, or the text of Mistral 3."""
    config["sliding_window"] = None
    if gguf.get("attention.temperature_scale") is None:
        config["model_type"] = "mistral"


def _hunyuan_mixture(config: Config, gguf: GgufModel) -> None:
    if config["moe_intermediate_size"] != config["intermediate_size"]:
        raise ModelUnsupported(
            "A GGUF file of hunyuan-moe whose experts have a width of their own is not mapped.",
            "Use its safetensors.",
        )
    config["num_shared_expert"] = gguf.get("expert_shared_count")


def _state_space(config: Config, gguf: GgufModel) -> None:
    inner, heads = gguf.get("ssm.inner_size"), gguf.get("ssm.time_step_rank")
    config["mamba_d_head"] = inner // heads
    config["mamba_d_ssm"] = inner
    config["mamba_expand"] = max(1, inner // config["hidden_size"])


def _falcon_h1(config: Config, gguf: GgufModel) -> None:
    _state_space(config, gguf)
    config["mamba_rms_norm"] = _has(gguf, ".ssm_norm.weight")


def _granite_hybrid(config: Config, gguf: GgufModel) -> None:
    _biases(config, gguf)
    _state_space(config, gguf)
    names = [f"blk.{index}.ssm_a" for index in range(config["num_hidden_layers"])]
    config["layer_types"] = ["mamba" if name in gguf.tensors else "attention" for name in names]
    key = gguf.tensors.get(f"blk.{config['layer_types'].index('attention')}.attn_k.weight")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    # The converter writes 0 heads for every layer of some files.
    config["num_key_value_heads"] = key.shape[0] // head_dim if key is not None else 1
    is_rotated = gguf.get("rope.scaling.finetuned", False)
    config["position_embedding_type"] = "rope" if is_rotated else "nope"
    shared = gguf.tensors.get("blk.0.ffn_gate_shexp.weight") or gguf.tensors.get(
        "blk.0.ffn_gate.weight"
    )
    config["shared_intermediate_size"] = shared.shape[0] if shared is not None else 0
    config["num_local_experts"] = gguf.get("expert_count") or 0
    config["num_experts_per_tok"] = gguf.get("expert_used_count") or 0


def _nemotron_h(config: Config, gguf: GgufModel) -> None:
    inner, heads = gguf.get("ssm.inner_size"), config["mamba_num_heads"]
    config["mamba_head_dim"] = inner // heads
    kinds = []
    for index in range(config.pop("num_hidden_layers")):
        here = {
            kind: f"blk.{index}.{stored}" in gguf.tensors
            for kind, stored in (
                ("mamba", "ssm_a"),
                ("attention", "attn_q.weight"),
                ("moe", "ffn_gate_inp.weight"),
                ("mlp", "ffn_up.weight"),
            )
        }
        kinds.append(next((kind for kind, found in here.items() if found), "mlp"))
    config["layers_block_type"] = kinds
    config["num_hidden_layers"] = len(kinds)
    key = gguf.tensors.get(f"blk.{kinds.index('attention')}.attn_k.weight")
    config["num_key_value_heads"] = key.shape[0] // config["head_dim"] if key is not None else 1
    widths = config["intermediate_size"]
    config["intermediate_size"] = max(widths) if hasattr(widths, "__len__") else widths
    up = next((t for name, t in gguf.tensors.items() if name.endswith(".ffn_up.weight")), None)
    if up is not None:
        config["intermediate_size"] = up.shape[0]


def _mamba(config: Config, gguf: GgufModel) -> None:
    for setting in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        config.pop(setting, None)
    config["expand"] = gguf.get("ssm.inner_size") // config["hidden_size"]
    config["intermediate_size"] = gguf.get("ssm.inner_size")
    if gguf.get("ssm.dt_b_c_rms"):
        config["model_type"] = "falcon_mamba"
    if gguf.architecture == "mamba2":
        config["num_heads"] = gguf.get("ssm.time_step_rank")
        config["head_dim"] = gguf.get("ssm.inner_size") // config["num_heads"]
        config.pop("time_step_rank")


_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_MIXTURE = {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_ROUTED = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_GEMMA: Config = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GPT_OSS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length",
    **_WINDOW,
}
# Without a setting transformers takes the scaling of the published sizes.
_NO_SCALING: Config = {"rope_scaling": {"rope_type": "default"}}
_LAYER_NORM = {
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
}
_COHERE = {**_LAYER_NORM, "logit_scale": "logit_scale"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_GRANITE_MIXTURE = {
    **_GRANITE,
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
_GPT2 = {
    "n_layer": "block_count",
    "n_positions": "context_length",
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_head": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_LFM2 = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
_LINEAR = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
_MAMBA_PART = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
_NEMOTRON_H = {
    **_ROUTED,
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}
_MAMBA = {
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "time_step_rank": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
}
_LATENT = {
    **_ROUTED,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_ERNIE_MIXTURE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_LLAMA4 = {
    "intermediate_size_mlp": "feed_forward_length",
    "intermediate_size": "expert_feed_forward_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
_PER_LAYER = {
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
}
_GEMMA4 = {
    **_WINDOW,
    **_CAPS,
    **_PER_LAYER,
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURES = {
    "llama": Architecture("llama", {}, {}, _llama, HALVES),
    "qwen2": Architecture("qwen2", {}, {}),
    # Without pictures its three axes of positions are equal.
    "qwen2vl": Architecture("qwen2", {}, {}),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}, _MIXTURE, _mixture),
    "qwen3": Architecture("qwen3", {}, {}),
    "qwen3vl": Architecture("qwen3", {}, {}),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}, _EXPERTS, _mixture),
    "qwen3vlmoe": Architecture("qwen3_moe", {"norm_topk_prob": True}, _EXPERTS, _mixture),
    "qwen3next": Architecture(
        "qwen3_next",
        {"norm_topk_prob": True},
        {**_MIXTURE, **_LINEAR},
        _linear_attention,
        QWEN3_NEXT,
        norm_offset=1.0,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", {}, _LINEAR, _linear_attention, QWEN3_5, norm_offset=1.0
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {},
        {**_MIXTURE, **_LINEAR},
        _linear_attention,
        QWEN3_5,
        norm_offset=1.0,
    ),
    "gemma": Architecture("gemma", _GEMMA, {}, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GEMMA, {**_WINDOW, **_CAPS}, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _GEMMA, {**_WINDOW, **_CAPS}, _gemma3, norm_offset=1.0),
    "gemma3n": Architecture(
        "gemma3n_text", _GEMMA, {**_WINDOW, **_CAPS, **_PER_LAYER}, _gemma3n, GEMMA3N
    ),
    "gemma4": Architecture("gemma4_text", _GEMMA, _GEMMA4, _gemma4, GEMMA4),
    "gpt-oss": Architecture("gpt_oss", _NO_SCALING, _GPT_OSS, None, ALTERNATING),
    "gpt2": Architecture("gpt2", {}, _GPT2, _gpt2, GPT2),
    "starcoder": Architecture("gpt_bigcode", {}, _GPT2, _starcoder),
    "falcon": Architecture(
        "falcon",
        {"alibi": False, "bias": False, "parallel_attn": True},
        {**_GPT2, "ffn_hidden_size": "feed_forward_length"},
        _falcon,
        FALCON,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", {"time_step_limit": [0.0, math.inf]}, _MAMBA_PART, _falcon_h1
    ),
    "deepseek2": Architecture("deepseek_v3", {}, _LATENT, _deepseek, LATENT),
    "glm4": Architecture("glm4", {}, {}, _sigmoid_mixture),
    "glm4moe": Architecture("glm4_moe", {}, _ROUTED, _sigmoid_mixture),
    "dots1": Architecture("dots1", {}, _ROUTED, _sigmoid_mixture),
    "minimax-m2": Architecture(
        "minimax_m2",
        {},
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "rotary_dim": "rope.dimension_count",
        },
        _partial_rotary,
    ),
    "lfm2": Architecture("lfm2", {"block_auto_adjust_ff_dim": False}, _LFM2, _lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {"norm_topk_prob": True},
        {**_LFM2, **_EXPERTS, "num_dense_layers": "leading_dense_block_count"},
        _lfm2,
    ),
    "phi2": Architecture("phi", {}, _LAYER_NORM, _partial_rotary),
    "phi3": Architecture("phi3", {}, _WINDOW, _partial_rotary),
    "starcoder2": Architecture("starcoder2", {"use_bias": True}, {**_LAYER_NORM, **_WINDOW}),
    "stablelm": Architecture("stablelm", {}, _LAYER_NORM, _stablelm),
    "smollm3": Architecture("smollm3", {}, {}, _smollm3, HALVES),
    "arcee": Architecture("arcee", {}, {}, _biases, HALVES),
    "granite": Architecture("granite", {}, _GRANITE, _llama, HALVES),
    "granitemoe": Architecture(
        "granitemoeshared", {}, _GRANITE_MIXTURE, _granite_mixture, HALVES + GRANITE_SHARED
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {},
        {**_GRANITE_MIXTURE, **_MAMBA_PART},
        _granite_hybrid,
        HALVES + GRANITE_SHARED,
    ),
    "nemotron": Architecture(
        "nemotron",
        {},
        {"norm_eps": "attention.layer_norm_epsilon"},
        _partial_rotary,
        norm_offset=1.0,
    ),
    "nemotron_h": Architecture("nemotron_h", {}, _NEMOTRON_H, _nemotron_h, prefix="backbone."),
    "nemotron_h_moe": Architecture("nemotron_h", {}, _NEMOTRON_H, _nemotron_h, prefix="backbone."),
    "mamba": Architecture("mamba", {}, _MAMBA, _mamba, attends=False),
    "mamba2": Architecture("mamba2", {}, _MAMBA, _mamba, attends=False),
    "olmo2": Architecture("olmo2", {}, _WINDOW, _olmo2),
    "olmoe": Architecture("olmoe", {}, _EXPERTS),
    "command-r": Architecture("cohere", {}, _COHERE),
    "cohere2": Architecture("cohere2", {}, {**_COHERE, **_WINDOW}),
    "exaone4": Architecture("exaone4", {}, _WINDOW, _exaone4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {}, {}, _biases),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {},
        {**_EXPERTS, "moe_topk": "expert_used_count"},
        _hunyuan_mixture,
    ),
    "ernie4_5": Architecture("ernie4_5", {}, {}, _ernie),
    "ernie4_5-moe": Architecture("ernie4_5_moe", {}, _ERNIE_MIXTURE, _ernie),
    "seed_oss": Architecture("seed_oss", {"attention_out_bias": False}, {}, _biases),
    "llama4": Architecture("llama4_text", {}, _LLAMA4, _llama4, LLAMA4),
    "mistral3": Architecture("ministral3", {}, {}, _mistral3, HALVES),
}
