"""The transformers configuration of a GGUF file, from its metadata and the names of its tensors.

`architectures.py` maps llama.cpp's architectures. What is not in its table is refused by name.
"""

import math
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.core.text import shown
from kvchat.model.gguf.architectures import ARCHITECTURES, Architecture
from kvchat.model.gguf.families import Config
from kvchat.model.gguf.file import GgufModel, GgufTensor

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
_LENGTH = "max_position_embeddings"
_COUNTS = (_LENGTH, "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim")
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
    found = ARCHITECTURES.get(architecture)
    if found is None:
        raise ModelUnsupported(
            f"{name} is a GGUF file of the architecture {architecture or 'of no name'!r}, which "
            "kvchat does not map.",
            f"GGUF files run of {', '.join(sorted(ARCHITECTURES))}; others in safetensors.",
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
    # Layers that predict further tokens stand behind the model's own.
    config["num_hidden_layers"] -= gguf.get("nextn_predict_layers", 0)
    if architecture.adapt is not None:
        architecture.adapt(config, gguf)
    config["vocab_size"] = _embedding(gguf, name).shape[0]
    config["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    for setting in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if setting == 'pad' else setting}_token_id"
        config[f"{setting}_token_id"] = gguf.metadata.get(key)
    if "rope_parameters" not in config and (scaling := _rope_scaling(config, gguf, name)):
        config["rope_scaling"] = scaling
    wanted = ["num_hidden_layers", "hidden_size"]
    wanted += ["num_attention_heads"] if architecture.attends else []
    missing = [setting for setting in wanted if not config.get(setting)]
    if missing:
        raise ModelError(f"{name} lacks {missing[0]} in its metadata.", "Is the file complete?")
    for setting in _COUNTS:
        value = config.get(setting, 1)
        if isinstance(value, str) or (type(value) is int and value < (setting == _LENGTH)):
            raise ModelError(
                f"{name} has {keys[setting]} {shown(value)} in its metadata.",
                "Is the file complete?",
            )
    for setting in _SIZES:
        if setting in config and not isinstance(config[setting], list):
            config[setting] = _one_size(config[setting], setting, name)
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
        original = original or config["max_position_embeddings"]
        config["original_max_position_embeddings"] = original
        factor = gguf.get("rope.scaling.attn_factor")
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
            "attention_factor": factor,
        }
        if config["model_type"] == "phimoe":  # its class reads a factor for each set
            scaling["long_mscale"] = scaling["short_mscale"] = factor
        return _without_none(scaling)
    # As in llama.cpp: a factor without a kind is linear, 0 is none, and older files spell it so.
    factor = gguf.get("rope.scaling.factor", gguf.get("rope.scale_linear", 0))
    kind = gguf.get("rope.scaling.type", "linear")
    if kind in ("none", "longrope") or factor == 0:
        return None
    if not 0 < factor < math.inf:
        raise ModelError(f"{name} has rope scaling by {factor}.", "Is the file complete?")
    if kind not in ("linear", "yarn"):
        raise ModelUnsupported(f"{name} has rope scaling of the unknown kind {kind}.")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for setting in ("beta_fast", "beta_slow"):
            scaling[setting] = gguf.get(f"rope.scaling.yarn_{setting}")
        scaling["attention_factor"] = gguf.get("rope.scaling.yarn_attn_factor")
        scaling.update(_yarn_of(config, gguf))
    return _without_none(scaling)


def _yarn_of(config: Config, gguf: GgufModel) -> Config:
    """Return what some families add to yarn."""
    kind, slope = config["model_type"], gguf.get("rope.scaling.yarn_log_multiplier")
    if kind == "gpt_oss":  # its range of mixed dimensions is not rounded
        return {"truncate": False}
    if kind in ("deepseek_v2", "deepseek_v3") and slope:
        # The file has a tenth of it. Published models have both numbers alike.
        return {"mscale": 10 * slope, "mscale_all_dim": 10 * slope}
    if kind == "ministral3":
        beta = gguf.get("attention.temperature_scale")
        return {"mscale": 1.0, "mscale_all_dim": slope, "llama_4_scaling_beta": beta}
    return {}


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
