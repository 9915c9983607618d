"""What the metadata of GGUF files leave unsaid: completes the configurations of families.

llama.cpp's code knows it by the architecture, or reads it from the names and shapes of tensors.
"""

import math
from collections.abc import Sequence
from typing import Any

from kvchat.core.errors import ModelUnsupported
from kvchat.model.gguf.file import GgufModel

Config = dict[str, Any]

# The layers of the one size of a family that scales its queries otherwise.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_SIGMOID = 2  # the format's number for scores of experts by a sigmoid


def _has(gguf: GgufModel, end: str) -> bool:
    """Whether any layer of a file has a tensor of this name."""
    return any(name.endswith(end) for name in gguf.tensors)


def llama(config: Config, gguf: GgufModel) -> None:
    biases(config, gguf)
    config.setdefault("head_dim", gguf.get("rope.dimension_count"))
    if gguf.get("expert_count"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = gguf.get("expert_count")
        config["num_experts_per_tok"] = gguf.get("expert_used_count")


def biases(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = _has(gguf, ".attn_q.bias")
    config["mlp_bias"] = _has(gguf, ".ffn_up.bias")


def mixture(config: Config, gguf: GgufModel) -> None:
    config.setdefault("intermediate_size", config["moe_intermediate_size"])


def gemma2(config: Config, gguf: GgufModel) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(config, _GEMMA2_27B_LAYERS)


def gemma3(config: Config, gguf: GgufModel) -> None:
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


def gemma3n(config: Config, gguf: GgufModel) -> None:
    gemma3(config, gguf)
    scales = gguf.get("activation_sparsity_scale") or [-math.inf] * config["num_hidden_layers"]
    # The share of activations below so many standard deviations, which the file has as those.
    shares = [0.5 * (1 + math.erf(scale / math.sqrt(2))) for scale in scales]
    config["activation_sparsity_pattern"] = [round(share, 4) for share in shares]
    config["laurel_rank"] = gguf.tensors["blk.0.laurel_l.weight"].shape[0]
    config["intermediate_size"] = list(config["intermediate_size"])
    config["vocab_size_per_layer_input"] = gguf.tensors["per_layer_token_embd.weight"].shape[0]


def gemma4(config: Config, gguf: GgufModel) -> None:
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


def partial_rotary(config: Config, gguf: GgufModel) -> None:
    """Set the share of a head's dimensions that are rotated, where the file says how many are."""
    rotated = gguf.get("rope.dimension_count")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rotated is not None and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if config.get("sliding_window") == 0:  # the format's way to say that there is none
        config["sliding_window"] = None


def stablelm(config: Config, gguf: GgufModel) -> None:
    partial_rotary(config, gguf)
    config["use_qkv_bias"] = _has(gguf, ".attn_q.bias")
    config["use_parallel_residual"] = not _has(gguf, ".ffn_norm.weight")
    config["qk_layernorm"] = _has(gguf, ".attn_q_norm.weight")


def olmo2(config: Config, gguf: GgufModel) -> None:
    if config.get("sliding_window"):
        config["model_type"] = "olmo3"
        _windows(config, gguf, 4)


def smollm3(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = _has(gguf, ".attn_q.bias")


def granite_mixture(config: Config, gguf: GgufModel) -> None:
    biases(config, gguf)
    if not gguf.get("expert_shared_feed_forward_length"):
        config["model_type"] = "granitemoe"


def deepseek(config: Config, gguf: GgufModel) -> None:
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


def sigmoid_mixture(config: Config, gguf: GgufModel) -> None:
    """GLM 4.5 and others that are routed like DeepSeek V3, with plain attention."""
    biases(config, gguf)
    partial_rotary(config, gguf)
    config["use_qk_norm"] = _has(gguf, ".attn_q_norm.weight")
    config.setdefault("norm_topk_prob", False)


def gpt2(config: Config, gguf: GgufModel) -> None:
    if _has(gguf, ".attn_q.weight"):
        raise ModelUnsupported(
            "A GGUF file of gpt2 with separate queries is not mapped.", "Use its safetensors."
        )


def starcoder(config: Config, gguf: GgufModel) -> None:
    config["multi_query"] = config.pop("num_key_value_heads", 1) == 1
    if not config["multi_query"]:
        raise ModelUnsupported(
            "A GGUF file of starcoder without multi-query attention is not mapped.",
            "Use its safetensors.",
        )


def falcon(config: Config, gguf: GgufModel) -> None:
    groups = config.pop("num_key_value_heads", 1)
    config["num_kv_heads"] = groups
    config["new_decoder_architecture"] = groups > 1
    config["multi_query"] = True
    config["num_ln_in_parallel_attn"] = 2 if _has(gguf, ".attn_norm_2.weight") else 1


def lfm2(config: Config, gguf: GgufModel) -> None:
    heads = config["num_key_value_heads"]
    counts = list(heads) if hasattr(heads, "__len__") else [heads] * config["num_hidden_layers"]
    config["layer_types"] = ["full_attention" if count else "conv" for count in counts]
    config["num_key_value_heads"] = max(counts)
    config["use_expert_bias"] = _has(gguf, ".exp_probs_b.bias")


def linear_attention(config: Config, gguf: GgufModel) -> None:
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    partial_rotary(config, gguf)
    config["layer_types"] = [
        "linear_attention" if f"blk.{index}.ssm_a" in gguf.tensors else "full_attention"
        for index in range(config["num_hidden_layers"])
    ]
    heads = config["linear_num_value_heads"]
    config["linear_value_head_dim"] = gguf.get("ssm.inner_size") // heads


def exaone4(config: Config, gguf: GgufModel) -> None:
    if config.get("sliding_window"):
        _windows(config, gguf, 4)
    else:
        config["sliding_window"] = None
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def ernie(config: Config, gguf: GgufModel) -> None:
    config["use_bias"] = _has(gguf, ".attn_q.bias")
    if gguf.get("expert_count"):
        config["moe_layer_end_index"] = config["num_hidden_layers"] - 1
        config.setdefault("moe_num_shared_experts", 0)


def llama4(config: Config, gguf: GgufModel) -> None:
    layers = range(config["num_hidden_layers"])
    config["moe_layers"] = [n for n in layers if f"blk.{n}.ffn_gate_inp.weight" in gguf.tensors]
    config["interleave_moe_layer_step"] = config["interleave_moe_layer_step"] or 1
    # As llama.cpp takes it for every size.
    config["attention_chunk_size"] = gguf.get("attention.chunk_size", 8192)
    # Of the published sizes the one with 128 experts (Maverick) has no norms of queries and keys.
    config["use_qk_norm"] = gguf.get("expert_count") != 128


def mistral3(config: Config, gguf: GgufModel) -> None:
    """Ministral 3, whose queries grow with the position, or the text of Mistral 3."""
    config["sliding_window"] = None
    if gguf.get("attention.temperature_scale") is None:
        config["model_type"] = "mistral"


def hunyuan_mixture(config: Config, gguf: GgufModel) -> None:
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


def falcon_h1(config: Config, gguf: GgufModel) -> None:
    _state_space(config, gguf)
    config["mamba_rms_norm"] = _has(gguf, ".ssm_norm.weight")


def granite_hybrid(config: Config, gguf: GgufModel) -> None:
    biases(config, gguf)
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


def nemotron_h(config: Config, gguf: GgufModel) -> None:
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


def mamba(config: Config, gguf: GgufModel) -> None:
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


def minicpm(config: Config, gguf: GgufModel) -> None:
    """MiniCPM 1 to 4: Llama with factors, which old files leave to llama.cpp."""
    biases(config, gguf)
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    config.setdefault("embedding_multiplier", 12.0)
    config.setdefault("residual_multiplier", 1.4 / math.sqrt(layers))
    config.setdefault("logits_scaling", width / 256)
    config["head_dim"] = config.get("head_dim") or width // config["num_attention_heads"]
    config["attention_multiplier"] = config["head_dim"] ** -0.5


def minicpm3(config: Config, gguf: GgufModel) -> None:
    rotated = gguf.get("rope.dimension_count")
    heads = config["num_attention_heads"]
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = gguf.get("attention.key_length") - rotated
    key_and_value = gguf.tensors["blk.0.attn_kv_b.weight"].shape[0] // heads
    config["v_head_dim"] = key_and_value - config["qk_nope_head_dim"]
    config.pop("head_dim")


def phimoe(config: Config, gguf: GgufModel) -> None:
    partial_rotary(config, gguf)
    biases(config, gguf)
    config["lm_head_bias"] = "output.bias" in gguf.tensors


def gpt_neox(config: Config, gguf: GgufModel) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["rotary_pct"] = gguf.get("rope.dimension_count", head_dim) / head_dim
    config["attention_bias"] = _has(gguf, ".attn_qkv.bias")


def mpt(config: Config, gguf: GgufModel) -> None:
    if config.get("num_key_value_heads", config["n_heads"]) != config["n_heads"]:
        raise ModelUnsupported(
            "A GGUF file of mpt with shared keys is not mapped.", "Use its safetensors."
        )
    largest = gguf.get("attention.max_alibi_bias", 8.0)
    if not largest:
        raise ModelUnsupported(
            "A GGUF file of mpt with learned positions is not mapped.", "Use its safetensors."
        )
    clamp = gguf.get("attention.clamp_kqv")
    config["attn_config"] = {"alibi": True, "alibi_bias_max": int(largest), "clip_qkv": clamp}
    config["expansion_ratio"] = config["intermediate_size"] // config["d_model"]


def glm(config: Config, gguf: GgufModel) -> None:
    """GLM-4 9B, from files of either of its two classes."""
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["partial_rotary_factor"] = gguf.get("rope.dimension_count") / config["head_dim"]
    config["attention_bias"] = _has(gguf, ".attn_qkv.bias") or _has(gguf, ".attn_q.bias")


def jamba(config: Config, gguf: GgufModel) -> None:
    config["mamba_expand"] = gguf.get("ssm.inner_size") // config["hidden_size"]
    config["num_key_value_heads"] = max(config["num_key_value_heads"])
    layers = range(config["num_hidden_layers"])
    for setting, stored in (("attn_layer", "attn_q"), ("expert_layer", "ffn_gate_inp")):
        found = [n for n in layers if f"blk.{n}.{stored}.weight" in gguf.tensors]
        offset, period = _every(found, len(layers))
        config[f"{setting}_offset"], config[f"{setting}_period"] = offset, period
    config["num_experts"] = config.get("num_experts") or 1


def _every(found: Sequence[int], count: int) -> tuple[int, int]:
    """Return the first of these layers and the distance between them; a model may have none."""
    if not found:
        return count, count + 1
    period = found[1] - found[0] if len(found) > 1 else max(count, found[0] + 1)
    if list(found) != list(range(found[0], count, period)) or found[0] >= period:
        raise ModelUnsupported(
            "A GGUF file of jamba whose layers do not alternate is not mapped.",
            "Use its safetensors.",
        )
    return found[0], period


def kimi(config: Config, gguf: GgufModel) -> None:
    rotated = gguf.get("rope.dimension_count")
    config["qk_rope_head_dim"] = rotated
    config["qk_nope_head_dim"] = gguf.get("attention.key_length_mla") - rotated
    config["v_head_dim"] = gguf.get("attention.value_length_mla")
    counts = config["num_key_value_heads"]  # 0 for layers of linear attention
    config["layer_types"] = ["full_attention" if n else "linear_attention" for n in counts]
    config["num_key_value_heads"] = config["linear_num_heads"] = config["num_attention_heads"]
    config.pop("head_dim", None)
    config.setdefault("q_lora_rank", None)


def afmoe(config: Config, gguf: GgufModel) -> None:
    biases(config, gguf)
    _windows(config, gguf, 4)
