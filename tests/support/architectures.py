"""Tiny configurations of real architectures: those that must run, and those that must be refused.

Windows are short, so that prompts and completions cross them; every family keeps the one feature it
is here for.
"""

from typing import Any

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONG_FACTORS = [1.0 + 0.5 * i for i in range(8)]

# name -> (model type, settings beside those every tiny model has)
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe, window in its mask only": (
        "qwen2_moe",
        {
            **_MOE,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3": ("qwen3", {}),
    # Proven fused with angles for all dimensions, it once failed in steps with angles for half.
    "nemotron, a part rotated": ("nemotron", {"partial_rotary_factor": 0.5}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "gemma2, softcap": (
        "gemma2",
        {"sliding_window": 8, "attn_logit_softcapping": 2.0, "tie_word_embeddings": False},
    ),
    "gemma3, mixed windows": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3n, shared KV": (
        "gemma3n_text",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 272,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 4,
                "short_factor": [1.0] * 8,
                "long_factor": _LONG_FACTORS,
            },
        },
    ),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "smollm3, some layers without positions": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": False, "tie_word_embeddings": False},
    ),
    "granite": ("granite", {"attention_multiplier": 0.2}),
    "olmo2": ("olmo2", {}),
    "gpt_oss, sinks": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}),
    "glm4": ("glm4", {}),
    "gpt2, learned positions": (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neo, attention of its own": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "deepseek_v3, wide keys": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "head_dim": 8,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
    ),
}

# Each manner of attention and of positions once; the others differ in what runs beside these.
MANNERS = [
    "llama",
    "qwen2_moe, window in its mask only",
    "gemma2, softcap",
    "gemma3n, shared KV",
    "phi3, longrope",
    "gpt_oss, sinks",
    "gpt2, learned positions",
    "gpt_neo, attention of its own",
    "deepseek_v3, wide keys",
]
_DEEPSEEK = SUPPORTED["deepseek_v3, wide keys"][1]
_BART = {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
}
_LLAMA4 = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 16,
    "moe_layers": [1],
    "no_rope_layers": [1, 0],
}

# name -> (model type, settings, what the refusal says); these are refused before weights are read.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent_gemma": (
        "recurrent_gemma",
        {"num_hidden_layers": 3},
        "keeps state other than keys and values in its",  # "recurrent layers" in older versions
    ),
    "gemma3, both directions": (
        "gemma3_text",
        {"use_bidirectional_attention": True, "sliding_window": 8},
        "attends in both directions",
    ),
    "bert, an encoder": ("bert", {}, "attends in both directions"),
    "t5": ("t5", {}, "is not a causal language model"),
}

# name -> (model type, settings, why it runs on the gathered path)
GATHERED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}, "computes with the attention mask itself"),
    "gptj": (
        "gptj",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
        "does not use transformers' attention interface",
    ),
    "falcon": ("falcon", {"head_dim": None}, "does not use transformers' attention interface"),
    "deepseek_v32, sparse indexer": (
        "deepseek_v32",
        {**_DEEPSEEK, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4},
        "chooses its keys by an index of its own",
    ),
    "doge": ("doge", {}, "computes with the attention mask itself"),
    "diffllama": ("diffllama", {}, "runs attention more than once per layer"),
    "llama4, temperature tuning": (
        "llama4_text",
        {**_LLAMA4, "attn_temperature_tuning": True, "floor_scale": 4},
        "tunes its attention by positions it counts itself",
    ),
    "bart": ("bart", _BART, "counts positions itself"),
    "blenderbot-small": ("blenderbot-small", _BART, "counts positions itself"),
    "roberta": ("roberta", {"is_decoder": True}, "counts positions itself"),
}
