"""Which transformers class runs a configuration: its causal one, or its image-text one.

Of an image-text model kvchat runs the text alone.
"""

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)


def is_image_text(config: Any) -> bool:
    """Whether a configuration has an image-text class and no causal one."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return not is_causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def new_model(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """Build a model with fresh weights on the default device.

    Raises what transformers and the model's class raise, ValueError for a class it does not have.
    """
    auto = AutoModelForImageTextToText if is_image_text(config) else AutoModelForCausalLM
    return auto.from_config(
        config,
        attn_implementation=attention,
        dtype=dtype,
        trust_remote_code=False,  # None would make transformers ask on the terminal
    )


def class_and_config(config: Any) -> tuple[Any, Any]:
    """Return a config's model class and the config that class takes.

    Repeats the choice of transformers' Auto classes, because those load from directories only.
    """
    if is_image_text(config):
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], config
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text_class = config.sub_configs.get("text_config")
    if text_class is None or model_class.config_class is not text_class:
        return model_class, config
    text_config = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        text_config.quantization_config = config.quantization_config
    return model_class, text_config
