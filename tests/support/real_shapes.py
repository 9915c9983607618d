"""Real models' sizes, one or two layers of each: what products and formats of weights meet.

Widths, heads and MLPs are the models' own; vocabularies are, where products read them and they are
odd, and small elsewhere, so that a test makes one in a moment.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvchat.model.checkpoint.source import ModelSource, find_model

# name -> (model type, settings)
REAL_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "random 0.4b": (
        "llama",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
        },
    ),
    "Llama 3.2 1B, half as wide, tied": (
        "llama",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 1,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5 0.5B, biases": (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3 0.6B, norms of heads": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_hidden_layers": 1,
            "head_dim": 128,
        },
    ),
    "SmolLM2 135M": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 2 2B, a quarter as wide, softcap and window": (
        "gemma2",
        {
            "hidden_size": 576,
            "intermediate_size": 2304,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "sliding_window": 96,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3 mini, a quarter as wide, fused products": (
        "phi3",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "sliding_window": 63,
        },
    ),
    "GPT-2, a quarter as wide, turned weights": (
        "gpt2",
        {"n_embd": 192, "n_layer": 2, "n_head": 3, "n_positions": 2304, "vocab_size": 50257},
    ),
    "Mistral, a quarter as wide, window": (
        "mistral",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "head_dim": 128,
            "sliding_window": 128,
        },
    ),
    # No width is a multiple of 16: none of its layers fits 4 bits.
    "odd everywhere": (
        "llama",
        {
            "hidden_size": 308,
            "intermediate_size": 1001,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "vocab_size": 1013,
        },
    ),
    # As OpenELM's and others' are: the MLP alone does not fit.
    "odd MLP, many tokens": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 172,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 151936,
        },
    ),
}
_COMMON = {
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2304,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_random(directory: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> ModelSource:
    """Write random weights in one of the shapes as a checkpoint without a tokenizer."""
    model_type, settings = REAL_SHAPES[name]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(directory)
    return find_model(str(directory))
