"""Which transformers class runs a configuration: its causal one, or its image-text one.

Of a model that also reads images or sound kvchat runs the text alone. The towers that read the rest
are built without their layers, where the class allows it, so that they take no memory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from kvchat.model.hf.lean_import import import_meta_operators

_log = logging.getLogger(__name__)


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


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules without memory inside this context, and without computing initial values."""
    with operators_on_meta(), torch.device("meta"), _NoInitialValues():
        yield


def operators_on_meta() -> TorchFunctionMode:
    """Return a context in which code runs on the meta device though torch was imported leanly.

    Imports torch's Python operators of that device, and with them sympy, only where one is used
    that has no other form. Enter it outside of `torch.device("meta")`.
    """
    return _OperatorsOnMeta()


class _OperatorsOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # The two such operators that the usual models call: for RoPE tables, and for tokens.
        if function is torch.arange and str(kwargs.get("device")) == "meta":
            values = function(*args, **{**kwargs, "device": "cpu"})
            return torch.empty_like(values, device="meta")
        if function is torch.nn.functional.embedding and args[1].device.type == "meta":
            ids, table = args[:2]
            return table.new_empty(*ids.shape, table.shape[1])
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            if not import_meta_operators():
                raise
            return function(*args, **kwargs)


class _NoInitialValues(TorchFunctionMode):
    """Leaves new parameters as they are: random values that take no memory are never read."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers")


def reads_more_than_text(config: Any) -> bool:
    """Whether a configuration has towers beside its text model."""
    return bool(_towers(config))


def loads_towers(config: Any) -> bool:
    """Whether towers have layers in a configuration that `without_towers` returned."""
    depths = [getattr(tower, name, 0) for tower in _towers(config) for name in _DEPTHS]
    return any(isinstance(depth, int) and depth > 0 for depth in depths)


def without_towers(config: Any) -> Any:
    """Return a copy of a configuration whose towers have no layers, if its class can be built so.

    Otherwise, and without towers, returns `config` itself.
    """
    if not _towers(config):
        return config
    light = deepcopy(config)
    for tower in _towers(light):
        for name in _DEPTHS:
            if isinstance(getattr(tower, name, None), int):
                setattr(tower, name, 0)
    try:
        tensor_names(light)
    except Exception as error:  # each model class raises its own error types
        _log.info("a model's towers are built whole: %s", error)
        return config
    return light


def tensor_names(config: Any) -> set[str]:
    """Return the names of a configuration's weights; raises what its class raises."""
    return set(MetaModel(config).module.state_dict())


class MetaModel:
    """The model of a configuration without weights, on torch's meta device.

    All that is asked of a model before its weights are read is asked of this one.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self._module: Any = None

    @property
    def module(self) -> Any:
        """The model; built if nothing did before. Raises what transformers and its class raise."""
        if self._module is None:
            self.build("eager")
        return self._module

    def build(self, attention: str) -> Any:
        """Build the model anew, with this attention, and return it; raises as `module`."""
        with on_meta():
            # Of a copy: transformers writes the attention's name and the dtype into it. bfloat16,
            # because grouped expert products support no other dtype on the meta device.
            built = new_model(deepcopy(self.config), attention, torch.bfloat16).eval()
        self._module = built
        return built


def _towers(config: Any) -> list[Any]:
    text_config = config.get_text_config()
    if text_config is config:
        return []
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [part for part in parts if _is_beside(part, text_config)]


def _is_beside(part: Any, text_config: Any) -> bool:
    """Whether a part of a configuration is neither the text model's nor around it."""
    return (
        isinstance(part, PreTrainedConfig)
        and part is not text_config
        and part.get_text_config() is not text_config
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
