"""Tiny models of the architectures that GGUF files come in, and their files' metadata.

The metadata are those that llama.cpp's converter writes for the same checkpoints.
"""

from typing import Any

import numpy as np

from support.gguf_files import ARCHITECTURE

Settings = dict[str, Any]

_MOE: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MOE_DATA: Settings = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_LATENT: Settings = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 16,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_LATENT_DATA: Settings = {
    **_MOE_DATA,
    "attention.head_count_kv": 1,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "attention.kv_lora_rank": 16,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
}
_YARN: Settings = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_YARN_DATA: Settings = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
_LINEAR: Settings = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_LINEAR_DATA: Settings = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
    "rope.dimension_count": 4,
}
_MAMBA: Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_MAMBA_DATA: Settings = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}
_GRANITE: Settings = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": None,
    "logits_scaling": 2.0,
}
_GRANITE_DATA: Settings = {"expert_count": 4, "expert_used_count": 2, "rope.dimension_count": 16}
_SHARED: Settings = {"shared_intermediate_size": 32}
_SHARED_DATA: Settings = {"expert_shared_feed_forward_length": 32}
_SLIDES: Settings = {"sliding_window": 8, "num_hidden_layers": 4}
_HALF_SLIDES: Settings = {
    **_SLIDES,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 272,
    "hidden_size_per_layer_input": 16,
}
_HALF_SLIDES_DATA: Settings = {
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 16,
    "rope.freq_base_swa": 10000.0,
}
_GEMMA4: Settings = {"global_head_dim": 32, "num_global_key_value_heads": 1}
_GEMMA4_DATA: Settings = {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.head_count_kv": [2, 1, 2, 1],
    "rope.freq_base": 1e6,
}
# Gemma 4 rotates a quarter of a head in layers without a window.
_GEMMA4_FACTORS = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
_QUARTER = {"rope.dimension_count": 8}
_ROUTED_DATA: Settings = {
    **_MOE_DATA,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}
_ROUTED: Settings = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LONG: Settings = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0 + n for n in range(8)],
        "short_factor": [1.0 + n / 8 for n in range(8)],
        "original_max_position_embeddings": 128,
        "long_mscale": 1.25,
        "short_mscale": 1.25,
    },
}
_LONG_DATA: Settings = {
    "rope.scaling.original_context_length": 128,
    "rope.scaling.attn_factor": 1.25,
    "rope.dimension_count": 16,
}
_LONG_FACTORS = {
    f"rope_factors_{name}.weight": np.array(
        _LONG["rope_parameters"][f"{name}_factor"], dtype=np.float32
    )
    for name in ("long", "short")
}
# name -> (transformers' type, its settings, the file's metadata)
FAMILIES: dict[str, tuple[str, Settings, Settings]] = {
    "deepseek_v2, queries whole": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "n_group": None, "routed_scaling_factor": 1.5},
        {**_LATENT_DATA, "expert_weights_scale": 1.5, "expert_gating_func": 1},
    ),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN},
        {
            **_LATENT_DATA,
            **_YARN_DATA,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.q_lora_rank": 24,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        {"feed_forward_length": 256, "attention.key_length": None},
    ),
    "starcoder": (
        "gpt_bigcode",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        {"feed_forward_length": 256, "attention.head_count_kv": 1, "attention.key_length": None},
    ),
    "falcon, 7b": (
        "falcon",
        {"head_dim": None, "bias": False},
        {
            "context_length": 2048,
            "attention.head_count_kv": 1,
            "attention.key_length": None,
            "feed_forward_length": 256,
        },
    ),
    "falcon, 40b": (
        "falcon",
        {"head_dim": None, "bias": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        {
            "context_length": 2048,
            "attention.head_count_kv": 2,
            "attention.key_length": None,
            "feed_forward_length": 256,
        },
    ),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128}, _MAMBA_DATA),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "shortconv.l_cache": 3,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        {
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 48},
        _LINEAR_DATA,
    ),
    "qwen3_5": ("qwen3_5_text", _LINEAR, _LINEAR_DATA),
    "gemma3n": (
        "gemma3n_text",
        {
            **_HALF_SLIDES,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        },
        {**_HALF_SLIDES_DATA, "activation_sparsity_scale": [1.6448536] + [float("-inf")] * 3},
    ),
    "gemma4": ("gemma4_text", {**_HALF_SLIDES, **_GEMMA4}, {**_HALF_SLIDES_DATA, **_GEMMA4_DATA}),
    "gemma4, experts": (
        "gemma4_text",
        {
            **_HALF_SLIDES,
            **_GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
        },
        {
            **_HALF_SLIDES_DATA,
            **_GEMMA4_DATA,
            **_MOE_DATA,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        },
    ),
    "glm4": ("glm4", {}, _QUARTER),
    "glm4_moe": (
        "glm4_moe",
        {**_ROUTED, "use_qk_norm": True},
        {
            **_ROUTED_DATA,
            **_QUARTER,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            # A layer that predicts a further token; the file lists it and kvchat leaves it out.
            "block_count": 3,
            "nextn_predict_layers": 1,
        },
    ),
    "dots1": (
        "dots1",
        _ROUTED,
        {**_ROUTED_DATA, "expert_weights_scale": 1.0, "attention.sliding_window": None},
    ),
    "minimax_m2": (
        "minimax_m2",
        # Older versions of transformers do not read rotary_dim.
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "partial_rotary_factor": 0.5,
        },
        {**_MOE_DATA, **_QUARTER, "expert_feed_forward_length": 96},
    ),
    "granitemoe": ("granitemoe", _GRANITE, _GRANITE_DATA),
    "granitemoeshared": (
        "granitemoeshared",
        {**_GRANITE, **_SHARED},
        {**_GRANITE_DATA, **_SHARED_DATA},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_GRANITE, **_SHARED, **_MAMBA, "layer_types": ["mamba", "attention"]},
        {**_GRANITE_DATA, **_SHARED_DATA, **_MAMBA_DATA, "attention.head_count_kv": [0, 2]},
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **_SHARED,
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
        },
        {**_GRANITE_DATA, **_MAMBA_DATA, "expert_count": 0, "attention.head_count_kv": [0, 2]},
    ),
    "nemotron": (
        "nemotron",
        {"partial_rotary_factor": 0.5},
        {**_QUARTER, "attention.layer_norm_epsilon": 1e-5},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": None,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
        {
            **_MAMBA_DATA,
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": [0, 0, 96],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": None,
        },
    ),
    "mamba": (
        "mamba",
        {"state_size": 16, "head_dim": None, "intermediate_size": 128},
        {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 4,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "intermediate_size": 128,
            "n_groups": 2,
            "chunk_size": 8,
        },
        {
            **_MAMBA_DATA,
            "attention.head_count": 0,
            "attention.key_length": None,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
    "exaone4": (
        "exaone4",
        {**_SLIDES, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, {}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2},
        {**_MOE_DATA, "expert_feed_forward_length": 96, "expert_shared_count": 1},
    ),
    "ernie4_5": ("ernie4_5", {}, {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        {
            **_MOE_DATA,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
        },
        {
            "expert_count": 4,
            "expert_used_count": 1,
            "interleave_moe_layer_step": 2,
            "expert_feed_forward_length": 96,
            "feed_forward_length": 64,
        },
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
        {
            **_YARN_DATA,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
            "rope.dimension_count": 16,
        },
    ),
    "olmo3": ("olmo3", _SLIDES, {"attention.sliding_window_pattern": [True, True, True, False]}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    "seed_oss": ("seed_oss", {"attention_out_bias": False}, {}),
    "phi2": (
        "phi",
        {"num_key_value_heads": 4, "head_dim": None},
        {**_QUARTER, "attention.key_length": None},
    ),
    "arcee": ("arcee", {}, {"rope.dimension_count": 16}),
    "exaone": ("llama", {}, {ARCHITECTURE: "exaone", "rope.dimension_count": 16}),
    "internlm2": ("llama", {}, {ARCHITECTURE: "internlm2"}),
    "xverse": ("llama", {}, {ARCHITECTURE: "xverse"}),
    "minicpm": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 0.25,
            "attention_multiplier": 0.25,
        },
        # As old files, which leave the factors to llama.cpp.
        {
            ARCHITECTURE: "minicpm",
            "attention.scale": None,
            "embedding_scale": None,
            "residual_scale": None,
            "logit_scale": None,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
        {
            "attention.q_lora_rank": 24,
            "attention.kv_lora_rank": 16,
            "attention.key_length": 24,
            "rope.dimension_count": 8,
        },
    ),
    "apertus": ("apertus", {}, {"rope.dimension_count": 16}),
    "olmo": ("olmo", {"clip_qkv": 0.5}, {"attention.clamp_kqv": 0.5}),
    "phimoe, longrope": (
        "phimoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            **_LONG,
        },
        {"expert_count": 4, **_LONG_DATA},
    ),
    "bloom": (
        "bloom",
        {"n_layer": 2, "n_head": 4, "head_dim": None},
        {"feed_forward_length": 256, "attention.head_count_kv": 4, "attention.key_length": None},
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rotary_pct": 0.5, "head_dim": None, "use_parallel_residual": False},
        {"rope.dimension_count": 8, "use_parallel_residual": False},
    ),
    "mpt": (
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "head_dim": None},
        {
            "feed_forward_length": 256,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.max_alibi_bias": 8.0,
        },
    ),
    "bitnet": (
        "bitnet",
        {"hidden_act": "silu", "tie_word_embeddings": True},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "glm": (
        "glm",
        {"attention_bias": True},
        {"rope.dimension_count": 8, "attention.key_length": None},
    ),
    "jamba": (
        "jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        {
            "attention.head_count_kv": [0, 2, 0, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
        },
    ),
    "jamba, dense": (
        "jamba",
        {
            "num_experts": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        {
            "attention.head_count_kv": [0, 2],
            "expert_count": 1,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "head_dim": None,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            **_MOE_DATA,
            "attention.head_count_kv": [0, 1],
            "attention.key_length": 24,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 12,
            "attention.kv_lora_rank": 16,
            "rope.dimension_count": 8,
            "kda.head_dim": 16,
            "ssm.conv_kernel": 4,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 2.446,
        },
    ),
    "afmoe": (
        "afmoe",
        {**_MOE, **_SLIDES, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
        {
            **_MOE_DATA,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
        },
    ),
}

# Further tensors of a family's files.
EXTRA = {
    name: {"rope_freqs.weight": _GEMMA4_FACTORS} for name in FAMILIES if name.startswith("gemma4")
} | {"phimoe, longrope": _LONG_FACTORS}
