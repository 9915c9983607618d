"""Settings of tiny models, one or more for each family that has a compiled step."""

from typing import Any

ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LATENTS = {
    **ROUTED,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "head_dim": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
}
_HALF_SLIDES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
# What stands behind a comma tells apart the settings of one type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Its code reads none of these, though a configuration may have them.
    "llama, numbers of other types": {
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "logit_scale": 0.25,
        "lm_head_multiplier": 0.5,
        "final_logit_softcapping": 5.0,
    },
    "mistral": {"sliding_window": 8},
    "ministral": {},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 7,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    "gemma": {},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    "gemma4_text": {
        **_HALF_SLIDES,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 272,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text, values are keys": {
        **_HALF_SLIDES,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
    },
    "gemma4_text, experts": {
        **_HALF_SLIDES,
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "olmo2": {},
    "olmo3": {},
    "exaone4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "internlm3": {},
    "iquestcoder": {},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "cwm": {"sliding_window": 8},
    "arcee": {},
    "olmo": {},
    "starcoder2": {"sliding_window": 8, "use_bias": True},
    "nemotron": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "jais2": {},
    "stablelm": {"head_dim": None, "num_attention_heads": 2, "partial_rotary_factor": 0.5},
    "stablelm, parallel": {
        "head_dim": None,
        "num_attention_heads": 2,
        "partial_rotary_factor": 0.5,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    },
    "phi": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "gpt_neox": {"head_dim": None, "rotary_pct": 0.25, "num_key_value_heads": None},
    "gpt_neox, one after the other": {"head_dim": None, "use_parallel_residual": False},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": None,
    },
    "glm": {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
    "ernie4_5": {},
    "ernie4_5, biases": {"use_bias": True, "tie_word_embeddings": False},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {"use_post_norm": True, "logits_scaling": 0.5, "residual_multiplier": 0.5},
    "hyperclovax, fewer norms": {"use_post_norm": False, "residual_multiplier": 2},
    "nanochat": {"final_logit_softcapping": 5.0},
    "apertus": {},
    "vaultgemma": {},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "mellum": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "glm4_moe": {
        **ROUTED,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {**_LATENTS, "q_lora_rank": 32, "routed_scaling_factor": 2.5},
    "deepseek_v3, sets of experts": {**_LATENTS, "q_lora_rank": 32, "n_group": 4, "topk_group": 2},
    "deepseek_v3, halves turn": {**_LATENTS, "q_lora_rank": None, "rope_interleave": False},
    "deepseek_v2": {
        **_LATENTS,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
    "deepseek_v2, sets of experts": {
        **_LATENTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v2, short queries": {**_LATENTS, "q_lora_rank": 32, "attention_bias": True},
    "glm4_moe_lite": {**_LATENTS, "q_lora_rank": 32, "routed_scaling_factor": 1.8},
    "youtu": {**_LATENTS, "q_lora_rank": 32},
    "dots1": {**ROUTED, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
    "solar_open": ROUTED,
    "solar_open, no shared expert": {**ROUTED, "n_shared_experts": 0},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_norm_min": 0.6,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3},
    "phimoe": {
        "num_local_experts": 8,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "attention_bias": True,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
        "residual_multiplier": 0.5,
    },
}
# Those of which no two run the same code; the others differ from one of these in numbers and names.
STRUCTURES = [
    "llama",
    "ministral3",  # queries grow
    "qwen3",  # heads have norms
    "smollm3",  # some layers do not rotate
    "phi3",  # parts are in one matrix
    "granite",  # factors
    "gemma2",  # windows, caps, norms before and after
    "gemma4_text",  # shared KV, side inputs
    "gemma4_text, values are keys",
    "gemma4_text, experts",
    "olmo2",  # norms after only
    "starcoder2",  # norms with means, biases, an MLP of two matrices
    "nemotron",  # squares, parts of heads rotate
    "stablelm, parallel",
    "gpt_neox",  # parts of each head together, two norms of one stream, halves of no vector
    "cohere2",  # only windows rotate
    "glm4",  # neighbours turn
    "nanochat",  # rotates back, norms the embedding
    "apertus",  # xIELU
    "mixtral",
    "qwen2_moe",  # a gated expert for all
    "qwen3_moe",  # some layers have an MLP
    "glm4_moe",  # groups of experts, a bias that chooses
    "deepseek_v3",  # latents, neighbours turn and part
    "deepseek_v3, sets of experts",
    "deepseek_v3, halves turn",
    "deepseek_v2",  # neighbours turn and stay
    "minimax_m2",
    "ernie4_5_moe",
    "phimoe",
    "gpt_oss",  # sinks, gate and up by turns, biases of experts
    "granitemoeshared",
]
