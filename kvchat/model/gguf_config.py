"""The transformers configuration of a GGUF file, from its metadata and the names of its tensors.

llama.cpp's architectures are mapped one by one: its metadata leaves out what its code knows, so a
guess would give a model that talks nonsense. What is not in the table is refused by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.gguf_file import GgufModel, GgufTensor

Config = dict[str, Any]

# config.json's names of the metadata that most architectures have.
_COMMON = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The layers of the one size of a family that scales its queries otherwise.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one of llama.cpp's architectures becomes a transformers model.

    `model_type`    transformers' name
    `settings`      what config.json says of every such model
    `names`         further settings by their metadata keys
    `adapt`         completes a configuration, None if nothing is left to do
    `permutes`      whether the rows of query and key weights are stored pairwise rotated
    `norm_offset`   what the file adds to the weights of norms
    `alternates`    whether the model has its experts' matrices as [in, out], and the rows of gate
                    and up by turns
    """

    model_type: str
    settings: Config
    names: dict[str, str]
    adapt: Callable[[Config, GgufModel], None] | None = None
    permutes: bool = False
    norm_offset: float = 0.0
    alternates: bool = False


def architecture_of(gguf: GgufModel, name: str) -> Architecture:
    """Return the mapping of a file's architecture; raises ModelUnsupported if there is none."""
    architecture = gguf.architecture
    kind = gguf.metadata.get("general.type", "model")
    if architecture == "clip" or kind == "mmproj":
        raise ModelUnsupported(
            f"{name} is the image projector of another model (mmproj), not a language model.",
            "Give the GGUF file of the language model it belongs to.",
        )
    if kind == "adapter":
        raise ModelUnsupported(
            f"{name} is a LoRA adapter in a GGUF file, which kvchat does not read.",
            "Give the GGUF file of the whole model.",
        )
    found = _ARCHITECTURES.get(architecture)
    if found is None:
        raise ModelUnsupported(
            f"{name} is a GGUF file of the architecture {architecture or 'of no name'!r}, which "
            "kvchat does not map.",
            f"GGUF files run of {', '.join(sorted(_ARCHITECTURES))}; others in safetensors.",
        )
    return found


def gguf_config(gguf: GgufModel, name: str) -> Config:
    """Return the content that config.json would have; raises ModelError and ModelUnsupported."""
    architecture = architecture_of(gguf, name)
    try:
        return _config(gguf, name, architecture)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        # A number that is a text, or no number at all: the file's writer erred, or means harm.
        raise ModelError(
            f"The metadata of {name} do not describe a model.", "Is the file complete?"
        ) from error


def _config(gguf: GgufModel, name: str, architecture: Architecture) -> Config:
    keys = _COMMON | architecture.names
    config = {setting: gguf.get(key) for setting, key in keys.items() if gguf.get(key) is not None}
    config = architecture.settings | config
    config["model_type"] = architecture.model_type
    if architecture.adapt is not None:
        architecture.adapt(config, gguf)
    config["vocab_size"] = _embedding(gguf, name).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    for setting in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if setting == 'pad' else setting}_token_id"
        config[f"{setting}_token_id"] = gguf.metadata.get(key)
    if scaling := _rope_scaling(config, gguf, name):
        config["rope_scaling"] = scaling
    missing = [
        s for s in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not config.get(s)
    ]
    if missing:
        raise ModelError(f"{name} lacks {missing[0]} in its metadata.", "Is the file complete?")
    for setting in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        config[setting] = _one_size(config.get(setting), setting, name)
    return config


def _embedding(gguf: GgufModel, name: str) -> GgufTensor:
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(
            f"{name} has no token embeddings.", "A file with a vocabulary alone is no model."
        )
    return tensor


def _one_size(value: Any, setting: str, name: str) -> Any:
    """Return the number that an array of sizes by layer holds everywhere."""
    if not hasattr(value, "__len__"):
        return value
    if len(set(value)) != 1:
        raise ModelUnsupported(
            f"{name} has layers that differ in {setting}.", "Use a model whose layers are alike."
        )
    return value[0]


def _rope_scaling(config: Config, gguf: GgufModel, name: str) -> Config | None:
    factors = gguf.floats("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(config, factors)
    long, short = gguf.floats("rope_factors_long.weight"), gguf.floats("rope_factors_short.weight")
    original = gguf.get("rope.scaling.original_context_length")
    if long is not None and short is not None:
        config["original_max_position_embeddings"] = original
        return _without_none(
            {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original,
                "attention_factor": gguf.get("rope.scaling.attn_factor"),
            }
        )
    kind, factor = gguf.get("rope.scaling.type", "none"), gguf.get("rope.scaling.factor")
    if kind in ("none", "longrope") or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        raise ModelUnsupported(f"{name} has rope scaling of the unknown kind {kind}.")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for setting in ("beta_fast", "beta_slow"):
            scaling[setting] = gguf.get(f"rope.scaling.yarn_{setting}")
        scaling["attention_factor"] = gguf.get("rope.scaling.yarn_attn_factor")
        if config["model_type"] == "gpt_oss":  # its range of mixed dimensions is not rounded
            scaling["truncate"] = False
    return _without_none(scaling)


def _without_none(config: Config) -> Config:
    return {name: value for name, value in config.items() if value is not None}


def _llama3_scaling(config: Config, factors: list[float]) -> Config:
    """Return the scaling that these factors of Llama 3's formula came from.

    Other factors are given as they are, to long rope with one set for all lengths.
    """
    scaling = {**_LLAMA3_SCALING, "factor": max(factors)}
    expected = _llama3_factors(scaling, config["rope_theta"], len(factors))
    if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        return scaling
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factors(scaling: Config, base: float, count: int) -> list[float]:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    factors = []
    for index in range(count):
        turns = scaling["original_max_position_embeddings"] / (
            2 * math.pi * base ** (index / count)
        )
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


# The adaptations


def _llama(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    config.setdefault("head_dim", gguf.get("rope.dimension_count"))
    if gguf.get("expert_count"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = gguf.get("expert_count")
        config["num_experts_per_tok"] = gguf.get("expert_used_count")


def _qwen2_moe(config: Config, gguf: GgufModel) -> None:
    config.setdefault("intermediate_size", config["moe_intermediate_size"])


def _gemma2(config: Config, gguf: GgufModel) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(config, _GEMMA2_27B_LAYERS)


def _gemma3(config: Config, gguf: GgufModel) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(config, _GEMMA3_27B_LAYERS)
    pattern = gguf.get("attention.sliding_window_pattern", 6)
    num_layers = config["num_hidden_layers"]
    if hasattr(pattern, "__len__"):  # whether each layer has a window
        slides = [bool(flag) for flag in pattern]
    else:
        slides = [bool((index + 1) % pattern) for index in range(num_layers)]
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in slides]
    config["rope_local_base_freq"] = gguf.get("rope.freq_base_swa", 10000.0)
    config.setdefault("sliding_window", config["max_position_embeddings"])


def _query_scalar(config: Config, largest: int) -> int:
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _partial_rotary(config: Config, gguf: GgufModel) -> None:
    """Set the share of a head's dimensions that are rotated, where the file says how many are."""
    rotated = gguf.get("rope.dimension_count")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    if rotated is not None and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if config.get("sliding_window") == 0:  # the format's way to say that there is none
        config["sliding_window"] = None


def _stablelm(config: Config, gguf: GgufModel) -> None:
    _partial_rotary(config, gguf)
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in gguf.tensors
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in gguf.tensors


def _olmo2(config: Config, gguf: GgufModel) -> None:
    if gguf.get("attention.sliding_window"):
        raise ModelUnsupported(
            "A GGUF file of OLMo 3 (olmo2 with windows) is not mapped.", "Use its safetensors."
        )


def _smollm3(config: Config, gguf: GgufModel) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors


_MIXTURE = {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
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
_ARCHITECTURES = {
    "llama": Architecture("llama", {}, {}, _llama, permutes=True),
    "qwen2": Architecture("qwen2", {}, {}),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}, _MIXTURE, _qwen2_moe),
    "qwen3": Architecture("qwen3", {}, {}),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}, _EXPERTS, _qwen2_moe),
    "gemma": Architecture("gemma", _GEMMA, {}, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GEMMA, {**_WINDOW, **_CAPS}, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _GEMMA, {**_WINDOW, **_CAPS}, _gemma3, norm_offset=1.0),
    "gpt-oss": Architecture("gpt_oss", _NO_SCALING, _GPT_OSS, alternates=True),
    "phi3": Architecture("phi3", {}, _WINDOW, _partial_rotary),
    "starcoder2": Architecture("starcoder2", {"use_bias": True}, {**_LAYER_NORM, **_WINDOW}),
    "stablelm": Architecture("stablelm", {}, _LAYER_NORM, _stablelm),
    "smollm3": Architecture("smollm3", {}, {}, _smollm3, permutes=True),
    "granite": Architecture("granite", {}, _GRANITE, _llama, permutes=True),
    "olmo2": Architecture("olmo2", {}, {}, _olmo2),
    "command-r": Architecture("cohere", {}, _COHERE),
    "cohere2": Architecture("cohere2", {}, {**_COHERE, **_WINDOW}),
}
