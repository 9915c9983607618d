"""A tiny random model of every causal and image-text model type that transformers knows.

Settings are made by rule: every size that a configuration class declares is replaced by a small one
of the same name, in the nested configurations too. What the rules cannot know stands in `_EXTRA`.
"""

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from support.checkpoints import VOCAB_SIZE

_SIZES: dict[int, str] = {
    VOCAB_SIZE: "vocab_size encoder_hash_byte_group_vocab vocab_size_per_layer_input "
    "unpadded_vocab_size decoder_vocab_size audio_vocab_size",
    2: "num_hidden_layers n_layer n_layers num_layers layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers depth num_global_layers num_experts_per_tok moe_k top_k "
    "num_experts_per_token moe_topk num_key_value_heads swa_num_key_value_heads num_kv_heads "
    "resampler_depth conf_num_hidden_layers num_layers_per_stack num_blocks "
    "linear_num_key_heads deepstack_num out_depth n_window num_codebooks moe_num_shared_experts "
    "resampler_n_heads topk_group_size",
    1: "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace "
    "num_shared_experts max_window_layers num_kv_shared_layers",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads index_topk "
    "swa_num_attention_heads n_routed_experts num_experts num_local_experts moe_num_experts "
    "zero_expert_num linear_num_value_heads num_sliding_attention_heads conf_num_attention_heads "
    "linear_num_heads mamba_n_heads floor_scale index_topk_blocks index_block_size "
    "log_scaling_n_floor laurel_rank d_rel num_centroids centroid_intermediate_top_k",
    8: "sliding_window window_size sliding_window_size keep_window_size qk_rope_head_dim "
    "rotary_dim local_attention attention_window_size rel_extent o_lora_rank",
    12: "v_head_dim",
    # With many index heads no two keys score alike, and so the choice of keys is clear.
    16: "head_dim index_n_heads swa_head_dim kv_lora_rank qk_nope_head_dim index_head_dim d_kv "
    "kv_channels attention_head_dim dim_head hidden_size_per_layer_input attention_chunk_size "
    "n_inner_head linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim "
    "mamba_d_state state_size attention_head_size d_head prompt_mid_dim",
    24: "q_lora_rank qk_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size "
    "dense_intermediate_size_moe input_embedding_size output_embedding_size embedding_size "
    "share_expert_dim base_channels moe_hidden_size",
    64: "hidden_size d_model n_embd emb_dim embedding_dim out_hidden_size hidden_size_global "
    "projection_dim text_hidden_size encoder_hidden_size word_embed_proj_dim vision_output_dim "
    "projector_input_dim projector_output_dim projection_hidden_dim output_dim lru_width "
    "projection_hidden_size adapter_out_dim vision_hidden_size pooler_output_size "
    "backbone_hidden_size out_dim cross_attention_hidden_size patch_embed_hidden_size",
    96: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff "
    "mlp_dim dense_intermediate_size intermediate_size_mlp d_inner feed_forward_size "
    "projector_hidden_size merged_hidden_size projection_intermediate_size router_hidden_size "
    "alignment_intermediate_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_TOKENS = {
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 260,
    "decoder_start_token_id": 257,
    "sep_token_id": 260,
    "cls_token_id": 257,
}
# Encoders that are language models only when told to be.
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
    "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
)

_GEMMA3N = {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4}
_DOTS3 = {
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 12,
}

_MROPE = "qwen2_vl qwen2_5_vl paddleocr_vl glm46v glm4v glm_ocr glmga qwen2_5_omni_thinker"


def _three_axes(*sections: int) -> dict[str, Any]:
    """Return a text part whose positions have three axes, each with so many pairs of a head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"text_config": {"rope_parameters": rope}}


# model type -> settings that no rule gives
_EXTRA: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _DECODERS.split()},
    **{name: _three_axes(2, 3, 3) for name in _MROPE.split()},
    "glm4v_moe": _three_axes(1, 1, 2),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # Half of a head is rotated, in vectors of 8 pairs.
    "glm4": {"head_dim": 32},
    "mamba2": {"num_heads": 8},
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {"text_config": _GEMMA3N},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "hrm_text": {"num_hidden_layers": None},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its keys are rounded up to 64
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
}


def causal_types() -> list[str]:
    """Return every model type with a causal language model, sorted."""
    return sorted(config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING)


def image_text_types() -> list[str]:
    """Return every model type that has an image-text model and no causal one, sorted."""
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING)
    return sorted(c.model_type for c in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if c not in causal)


def every_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny configuration of a type; raises what its class raises where rules fail."""
    config_class = CONFIG_MAPPING[model_type]
    extra = _EXTRA.get(model_type, {})
    try:
        defaults = config_class().to_dict()
    except Exception:
        defaults = {}
    settings = _merged(_shrunk(defaults, is_text=True), extra)
    return config_class(**{k: v for k, v in settings.items() if v is not None})


def _merged(settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _shrunk(defaults: dict[str, Any], is_text: bool) -> dict[str, Any]:
    """Return small values for the sizes that a configuration declares, and for nested ones."""
    settings: dict[str, Any] = {}
    for name, value in defaults.items():
        if isinstance(value, dict) and (name.endswith("_config") or name in ("decoder", "encoder")):
            inner = _shrunk(value, "text" in name or name in ("decoder", "thinker_config"))
            named = {"model_type": value["model_type"]} if "model_type" in value else {}
            settings[name] = inner | named
        elif name in SMALL and (isinstance(value, int) or value is None):
            if value is not None or is_text:
                settings[name] = SMALL[name]
        elif name in _TOKENS and is_text and name in defaults:
            settings[name] = _TOKENS[name]
        elif name == "rope_parameters" and "mrope_section" in (value or {}):
            settings[name] = value | {"mrope_section": _sections(value)}
        elif name == "layer_types" and isinstance(value, list):
            settings[name] = _kinds(value)
    if "num_kv_shared_layers" in defaults and "layer_types" in settings:  # the later layers share
        settings["layer_types"] = settings["layer_types"] * 2
        settings["num_kv_shared_layers"] = len(settings["layer_types"]) // 2
    if "layer_types" in settings:
        settings["num_hidden_layers"] = len(settings["layer_types"])
    if "kv_lora_rank" in settings:  # latent attention: as many keys as queries, rotated in part
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
        if "head_dim" in settings:
            settings["head_dim"] = SMALL["qk_rope_head_dim"]
    return settings


def _sections(rope: dict[str, Any]) -> list[int]:
    """Return the parts of half a head that count time, height and width."""
    half = int(SMALL["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
    return [half // 4, half // 4, half - half // 4 * 2]


def _kinds(layer_types: list[str]) -> list[str]:
    """Return one layer of each kind, in their order, and two where there is one kind."""
    kinds = list(dict.fromkeys(layer_types))
    return kinds * 2 if len(kinds) == 1 else kinds


def every_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model of a configuration, whose weights make greedy choices clear."""
    torch.manual_seed(seed)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = mapping[type(config)]
    if type(config).sub_configs.get("text_config") is model_class.config_class:
        config = config.get_text_config()
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model
