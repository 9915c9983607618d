"""Tiny random checkpoints in real architectures, with a tokenizer and a chat template."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from support.template_zoo import CHAT_TEMPLATE
from support.tokenizer_zoo import byte_tokenizer

VOCAB_SIZE = 272
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 260,
}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Return a tiny configuration; an override of None leaves a common setting out."""
    settings = {**_COMMON, **overrides}
    common = {name: value for name, value in settings.items() if value is not None}
    return AutoConfig.for_model(model_type, **common)


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a tiny float32 model with weights large enough that greedy choices are not ties."""
    config = tiny_config(model_type, **overrides)
    torch.manual_seed(seed)
    # Eager: transformers 5.17 leaves gemma2's softcap out of its faster attention.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model


def never_stopping(model: PreTrainedModel) -> PreTrainedModel:
    """Make control tokens too unlikely to be drawn greedily, so that answers end by their limit."""
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0
    return model


def save_checkpoint(
    directory: Path, model: PreTrainedModel, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a model with tokenizer and template as a checkpoint directory; return it."""
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 260}))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    return directory
