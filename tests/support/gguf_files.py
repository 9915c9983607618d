"""Writes tiny models as GGUF files, as llama.cpp's converter does, with the package gguf."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from support.gguf_stored import listed_numbers, stacked_projections, stored_tensors
from support.template_zoo import CHAT_TEMPLATE
from support.tokenizer_zoo import byte_tokenizer

ARCHITECTURE = "general.architecture"
# transformers' type -> llama.cpp's architecture
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "falcon": "falcon",
    "falcon_h1": "falcon-h1",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "seed_oss": "seed_oss",
    "phi": "phi2",
    "arcee": "arcee",
    "minicpm3": "minicpm3",
    "apertus": "apertus",
    "olmo": "olmo",
    "phimoe": "phimoe",
    "bloom": "bloom",
    "gpt_neox": "gptneox",
    "mpt": "mpt",
    "bitnet": "bitnet",
    "glm": "chatglm",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "afmoe": "afmoe",
}
# llama.cpp's architectures whose queries and keys are rotated by neighbours.
_PERMUTED = (
    *("llama", "mistral3", "smollm3", "arcee", "olmo", "internlm2", "xverse"),
    *("granite", "granitemoe", "granitehybrid", "minicpm"),
)
# Those whose norms' weights are stored plus one.
_SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text")
_PLAIN_METADATA = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
# Where the two bytes of a block's float16 scales are; random ones would be NaN or infinite.
SCALES_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ2_0": (64,),
}
QUANTISED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
RANDOM_BLOCKS = tuple(name for name in SCALES_AT if name not in QUANTISED)

Blocks = Callable[[np.ndarray], np.ndarray]


def plain(values: np.ndarray) -> np.ndarray:
    """Return float32 values as they are: the format F32."""
    return values


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of each head as llama.cpp wants them: halves become neighbours."""
    halves = weight.view(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    pairs = weight.view(heads, len(weight) // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    template: str | None = CHAT_TEMPLATE,
    merges: tuple[str, ...] = (),
    write_tokenizer: Callable[[Any], None] | None = None,
    further: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a model, and put what its blocks hold into the model's own weights.

    So the model is the file's exact twin afterwards. Matrices are in the block format `kind`, or
    each in what `kind` returns for its name in the file.
    `metadata` is added under the architecture's name, None leaves a key out; `ARCHITECTURE` names
    another architecture than that of the model's type. `extra` are further float32 tensors;
    `further` are written as the model's own are.
    `merges` are pairs of letters that one token has, such as "h e"; llama.cpp itself reads no
    file without. `write_tokenizer` writes another tokenizer than the tiny models' to the writer.
    """
    config = model.config
    metadata = dict(metadata or {})
    architecture = metadata.pop(ARCHITECTURE, ARCHITECTURES[config.model_type])
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, architecture, config, metadata | listed_numbers(model))
    if write_tokenizer is not None:
        write_tokenizer(writer)
    else:
        write_vocabulary(writer, config.vocab_size, template, merges)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    generator = np.random.default_rng(5)
    kind_of = kind if callable(kind) else lambda stored: kind
    for stored, part in (*file_tensors(model, architecture), *(further or {}).items()):
        _write_tensor(writer, stored, part, config, kind_of(stored), generator)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file_tensors(
    model: PreTrainedModel, architecture: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's file by their names there, as views of the model's if they
    can be."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    config = model.config
    arch = known[architecture or ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    buffers = [(n, b) for n, b in model.named_buffers() if n in model.state_dict()]
    for name, parameter in (*model.named_parameters(), *buffers):
        yield from _parts(name, parameter, names, config)
    yield from stacked_projections(model)


def _parts(name: str, parameter: Any, names: Any, config: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the file's tensors that a parameter becomes, as views of it where it can."""
    if ".experts." in name and config.model_type == "gpt_oss":
        return _alternating_parts(name, parameter.data, name.split(".")[2])
    if name.endswith(".sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", parameter.data)]
    special = stored_tensors(name, parameter.data, config)
    if special is not None:
        return special
    if config.model_type == "nemotron_h":
        name = name.replace("model.", "backbone.")
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    if not stored.endswith((".weight", ".bias")) and ".ssm_" not in stored:
        stored += ".weight"
    return [(stored, parameter.data)]


def _alternating_parts(name: str, data: torch.Tensor, block: str) -> list[tuple[str, torch.Tensor]]:
    """Return gpt-oss's experts as views: gate and up alternate in one tensor of the model."""
    is_bias = name.endswith("_bias")
    rows, end = (data, "bias") if is_bias else (data.transpose(1, 2), "weight")
    if "down_proj" in name:
        return [(f"blk.{block}.ffn_down_exps.{end}", rows)]
    return [
        (f"blk.{block}.ffn_gate_exps.{end}", rows[:, 0::2]),
        (f"blk.{block}.ffn_up_exps.{end}", rows[:, 1::2]),
    ]


def _write_tensor(
    writer: Any, name: str, part: torch.Tensor, config: Any, kind: str, generator: Any
) -> None:
    is_permuted = writer.arch in _PERMUTED and (".attn_q." in name or ".attn_k." in name)
    heads = 0
    if is_permuted:
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    values = permuted(part, heads) if is_permuted else part
    if part.dim() == 1 or name.endswith(".bias") or kind == "F32":
        is_shifted = name.endswith("norm.weight") and ".ssm_norm" not in name
        offset = 1.0 if config.model_type in _SHIFTED and is_shifted else 0.0
        writer.add_tensor(name, np.ascontiguousarray((values + offset).float().numpy()))
        return
    quantisation = GGMLQuantizationType[kind]
    blocks = _blocks(np.ascontiguousarray(values.float().numpy()), kind, generator)
    writer.add_tensor(name, blocks, raw_dtype=quantisation)
    unpacked = torch.from_numpy(dequantize(blocks, quantisation))
    part.copy_(unpermuted(unpacked, heads) if is_permuted else unpacked)


def _blocks(values: np.ndarray, kind: str, generator: Any) -> np.ndarray:
    """Return the blocks of a matrix; random ones in the formats that gguf cannot write."""
    if kind in QUANTISED:
        return quantize(values, GGMLQuantizationType[kind])
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (*values.shape[:-1], values.shape[-1] // size, num_bytes)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = np.full(shape[:-1], 0.001, dtype=np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _write_metadata(writer: Any, architecture: str, config: Any, metadata: dict[str, Any]) -> None:
    found = {
        key: getattr(config, name)
        for key, name in _PLAIN_METADATA.items()
        if key not in metadata and getattr(config, name, None) is not None
    }
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, name):
            found["attention.layer_norm_epsilon"] = getattr(config, name)
    for name in ("logit_scale", "logits_scaling"):
        if hasattr(config, name):
            found["logit_scale"] = getattr(config, name)
    for key, value in {**found, **metadata}.items():
        if value is None:
            continue
        full = key if key.startswith("xielu.") else f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_string(full, value)


def write_vocabulary(
    writer: Any, size: int, template: str | None = CHAT_TEMPLATE, merges: tuple[str, ...] = ()
) -> None:
    """Write the tiny models' byte-level tokenizer, padded to `size` tokens."""
    tokenizer = byte_tokenizer()
    added = tokenizer.get_added_tokens_decoder()
    count = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(index) or "" for index in range(count)]
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in range(count)]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds += [1] * len(merges)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), size)]
    kinds += [5] * (size - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges:
        writer.add_token_merges(list(merges))
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(260)
    writer.add_pad_token_id(256)
    if template is not None:
        writer.add_chat_template(template)
