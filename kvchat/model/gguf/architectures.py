"""llama.cpp's architectures, and the transformers model that each one is.

llama.cpp's metadata leave out what its code knows, so a guess would give a model that talks
nonsense: the architectures are mapped one by one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvchat.model.gguf import families
from kvchat.model.gguf.families import Config
from kvchat.model.gguf.file import GgufModel
from kvchat.model.gguf.forms import (
    ALTERNATING,
    BITNET,
    BLOOM,
    FALCON,
    FUSED,
    GEMMA3N,
    GEMMA4,
    GPT2,
    GPT_NEOX,
    GRANITE_SHARED,
    HALVES,
    KIMI,
    LATENT,
    LLAMA4,
    QWEN3_5,
    QWEN3_NEXT,
    Form,
)


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
    `listed`        tensors of one number that the file has as lists by layer in its metadata: the
                    lists' keys by the ends of the tensors' names
    """

    model_type: str
    settings: Config = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    adapt: Callable[[Config, GgufModel], None] | None = None
    forms: tuple[Form, ...] = ()
    norm_offset: float = 0.0
    prefix: str = "model."
    attends: bool = True
    listed: dict[str, str] = field(default_factory=dict)


_CHOSEN = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_EXPERTS = {"num_experts": "expert_count", **_CHOSEN}
_MIXTURE = {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_ROUTED = {
    "n_routed_experts": "expert_count",
    **_CHOSEN,
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
_MIXTRAL = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GPT_OSS = {
    **_MIXTRAL,
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
    **_MIXTRAL,
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
_XIELU = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
_CLAMP = {"clip_qkv": "attention.clamp_kqv"}
_JAMBA = {
    **_EXPERTS,
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_dt_rank": "ssm.time_step_rank",
}
_RANKS = {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}
_LATENT = {**_ROUTED, **_RANKS}
_KIMI = {
    **_LATENT,
    "num_experts": "expert_count",
    "linear_head_dim": "kda.head_dim",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
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
_MPT = {
    "d_model": "embedding_length",
    "n_heads": "attention.head_count",
    "n_layers": "block_count",
    "max_seq_len": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_AFMOE = {
    **_EXPERTS,
    "num_shared_experts": "expert_shared_count",
    "num_dense_layers": "leading_dense_block_count",
    "route_scale": "expert_weights_scale",
}
_MAMBA = {
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "time_step_rank": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
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
    **_MIXTRAL,
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
    "llama": Architecture("llama", adapt=families.llama, forms=HALVES),
    "qwen2": Architecture("qwen2"),
    # Without pictures its three axes of positions are equal.
    "qwen2vl": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}, _MIXTURE, families.mixture),
    "qwen3": Architecture("qwen3"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}, _EXPERTS, families.mixture),
    "qwen3vlmoe": Architecture("qwen3_moe", {"norm_topk_prob": True}, _EXPERTS, families.mixture),
    "qwen3next": Architecture(
        "qwen3_next",
        {"norm_topk_prob": True},
        {**_MIXTURE, **_LINEAR},
        families.linear_attention,
        QWEN3_NEXT,
        norm_offset=1.0,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", {}, _LINEAR, families.linear_attention, QWEN3_5, norm_offset=1.0
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {},
        {**_MIXTURE, **_LINEAR},
        families.linear_attention,
        QWEN3_5,
        norm_offset=1.0,
    ),
    "gemma": Architecture("gemma", _GEMMA, {}, norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2", _GEMMA, {**_WINDOW, **_CAPS}, families.gemma2, norm_offset=1.0
    ),
    "gemma3": Architecture(
        "gemma3_text", _GEMMA, {**_WINDOW, **_CAPS}, families.gemma3, norm_offset=1.0
    ),
    "gemma3n": Architecture(
        "gemma3n_text", _GEMMA, {**_WINDOW, **_CAPS, **_PER_LAYER}, families.gemma3n, GEMMA3N
    ),
    "gemma4": Architecture("gemma4_text", _GEMMA, _GEMMA4, families.gemma4, GEMMA4),
    "gpt-oss": Architecture("gpt_oss", _NO_SCALING, _GPT_OSS, None, ALTERNATING),
    "gpt2": Architecture("gpt2", {}, _GPT2, families.gpt2, GPT2),
    "starcoder": Architecture("gpt_bigcode", names=_GPT2, adapt=families.starcoder),
    "falcon": Architecture(
        "falcon",
        {"alibi": False, "bias": False, "parallel_attn": True},
        {**_GPT2, "ffn_hidden_size": "feed_forward_length"},
        families.falcon,
        FALCON,
    ),
    "falcon-h1": Architecture(
        "falcon_h1", {"time_step_limit": [0.0, math.inf]}, _MAMBA_PART, families.falcon_h1
    ),
    "deepseek2": Architecture("deepseek_v3", {}, _LATENT, families.deepseek, LATENT),
    "glm4": Architecture("glm4", adapt=families.sigmoid_mixture),
    "glm4moe": Architecture("glm4_moe", names=_ROUTED, adapt=families.sigmoid_mixture),
    "dots1": Architecture("dots1", names=_ROUTED, adapt=families.sigmoid_mixture),
    "minimax-m2": Architecture(
        "minimax_m2",
        {},
        {
            **_MIXTRAL,
            "intermediate_size": "expert_feed_forward_length",
            "rotary_dim": "rope.dimension_count",
        },
        families.partial_rotary,
    ),
    "lfm2": Architecture("lfm2", {"block_auto_adjust_ff_dim": False}, _LFM2, families.lfm2),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {"norm_topk_prob": True},
        {**_LFM2, **_EXPERTS, "num_dense_layers": "leading_dense_block_count"},
        families.lfm2,
    ),
    # Old files of Phi-2 have queries, keys and values in one tensor.
    "phi2": Architecture("phi", names=_LAYER_NORM, adapt=families.partial_rotary, forms=FUSED),
    "phi3": Architecture("phi3", names=_WINDOW, adapt=families.partial_rotary),
    "starcoder2": Architecture("starcoder2", {"use_bias": True}, {**_LAYER_NORM, **_WINDOW}),
    "stablelm": Architecture("stablelm", names=_LAYER_NORM, adapt=families.stablelm),
    "smollm3": Architecture("smollm3", adapt=families.smollm3, forms=HALVES),
    "arcee": Architecture("arcee", adapt=families.biases, forms=HALVES),
    "granite": Architecture("granite", {}, _GRANITE, families.llama, HALVES),
    "granitemoe": Architecture(
        "granitemoeshared", {}, _GRANITE_MIXTURE, families.granite_mixture, HALVES + GRANITE_SHARED
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {},
        {**_GRANITE_MIXTURE, **_MAMBA_PART},
        families.granite_hybrid,
        HALVES + GRANITE_SHARED,
    ),
    "nemotron": Architecture(
        "nemotron",
        {},
        {"norm_eps": "attention.layer_norm_epsilon"},
        families.partial_rotary,
        norm_offset=1.0,
    ),
    "nemotron_h": Architecture(
        "nemotron_h", {}, _NEMOTRON_H, families.nemotron_h, prefix="backbone."
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h", {}, _NEMOTRON_H, families.nemotron_h, prefix="backbone."
    ),
    "mamba": Architecture("mamba", {}, _MAMBA, families.mamba, attends=False),
    "mamba2": Architecture("mamba2", {}, _MAMBA, families.mamba, attends=False),
    "olmo2": Architecture("olmo2", names=_WINDOW, adapt=families.olmo2),
    "olmoe": Architecture("olmoe", names=_EXPERTS),
    "command-r": Architecture("cohere", names=_COHERE),
    "cohere2": Architecture("cohere2", {}, {**_COHERE, **_WINDOW}),
    "exaone4": Architecture("exaone4", names=_WINDOW, adapt=families.exaone4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", adapt=families.biases),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {},
        {**_EXPERTS, "moe_topk": "expert_used_count"},
        families.hunyuan_mixture,
    ),
    "ernie4_5": Architecture("ernie4_5", adapt=families.ernie),
    "ernie4_5-moe": Architecture("ernie4_5_moe", names=_ERNIE_MIXTURE, adapt=families.ernie),
    "seed_oss": Architecture("seed_oss", {"attention_out_bias": False}, {}, families.biases),
    "llama4": Architecture("llama4_text", {}, _LLAMA4, families.llama4, LLAMA4),
    "mistral3": Architecture("ministral3", adapt=families.mistral3, forms=HALVES),
    # Llama's layers, which the converter gives the names of Llama's.
    "exaone": Architecture("llama", adapt=families.llama),
    "internlm2": Architecture("llama", adapt=families.llama, forms=HALVES),
    "xverse": Architecture("llama", adapt=families.llama, forms=HALVES),
    # Granite's factors, in a model without a class of its own in transformers.
    "minicpm": Architecture("granite", names=_GRANITE, adapt=families.minicpm, forms=HALVES),
    "minicpm3": Architecture("minicpm3", names=_RANKS, adapt=families.minicpm3),
    "apertus": Architecture("apertus", names=_WINDOW, adapt=families.biases, listed=_XIELU),
    "olmo": Architecture("olmo", names=_CLAMP, adapt=families.biases, forms=HALVES),
    "phimoe": Architecture("phimoe", names={**_MIXTRAL, **_WINDOW}, adapt=families.phimoe),
    "bloom": Architecture("bloom", names=_GPT2, forms=BLOOM),
    "gptneox": Architecture(
        "gpt_neox",
        names={**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        adapt=families.gpt_neox,
        forms=GPT_NEOX,
    ),
    "mpt": Architecture("mpt", names=_MPT, adapt=families.mpt),
    "bitnet": Architecture("bitnet", {"hidden_act": "silu"}, forms=BITNET),
    "chatglm": Architecture("glm", adapt=families.glm, forms=FUSED),
    "jamba": Architecture("jamba", names=_JAMBA, adapt=families.jamba),
    "kimi-linear": Architecture("kimi_linear", names=_KIMI, adapt=families.kimi, forms=KIMI),
    "afmoe": Architecture("afmoe", {"mup_enabled": True}, {**_AFMOE, **_WINDOW}, families.afmoe),
}
