"""Limits on the model that config.json describes, computed from the size of the weight files.

A bad config.json can ask for a million layers. Building them takes hours, and initialising the
tensors that the files lack takes all memory. Layer counts are checked before transformers reads
them, and building stops when the model has more parameters than its files can hold.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as hooks

from kvchat.core.errors import ModelError
from kvchat.model.files.checkpoint_files import WeightHeader

# Configuration classes build lists with one entry per layer. No model has this many layers.
_LAYER_COUNT = re.compile(r"(layers?|depths?)$")
_MAX_LAYERS = 4096
# Buffers (rotary tables, masks) are computed, so the files give no limit for them.
_MAX_BUFFER_BYTES = 1 << 30
# Building counts a tied output layer twice, hence the factor. The spare amounts let a tiny
# checkpoint pass: loading it gives a more exact message about its missing tensors.
_SHARE, _SPARE_ELEMENTS, _SPARE_TENSORS = 2, 1 << 20, 10_000
# A file may store several tensors of the model as one, or one as several.
_SPLIT = 16
_QUANTISED_PER_BYTE = 8


class TooLarge(ModelError):
    """config.json describes a model that the weight files cannot hold."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"config.json describes {what}.", "Does config.json belong to these weights?"
        )


@dataclass(frozen=True, slots=True)
class ParameterLimit:
    """The largest number of parameter tensors, and of their elements, that a model may have."""

    num_tensors: int
    num_elements: int

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside this context, building a module that exceeds the limit raises TooLarge.

        The hooks count every module that the process builds; only one model is loaded at a time.
        """
        num_tensors = num_elements = buffer_bytes = 0
        counted = {}  # by identity; held, so that no other parameter has the identity of one

        def take(module: object, name: str, parameter: torch.nn.Parameter | None) -> None:
            nonlocal num_tensors, num_elements
            if id(parameter) in counted:  # tied to another module, as a layer that many share
                return
            counted[id(parameter)] = parameter
            num_tensors += 1
            num_elements += parameter.numel() if parameter is not None else 0
            if num_tensors > self.num_tensors or num_elements > self.num_elements:
                raise TooLarge("a larger model than its weight files hold")

        def take_buffer(module: object, name: str, buffer: torch.Tensor | None) -> None:
            nonlocal buffer_bytes
            buffer_bytes += buffer.nbytes if buffer is not None else 0
            if buffer_bytes > _MAX_BUFFER_BYTES:
                raise TooLarge(f"tables of more than {_MAX_BUFFER_BYTES:,} bytes")

        handles = (
            hooks.register_module_parameter_registration_hook(take),
            hooks.register_module_buffer_registration_hook(take_buffer),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def parameter_limit(headers: Sequence[WeightHeader], config: dict[str, Any]) -> ParameterLimit:
    """Return the limit for a model whose weight files have these headers."""
    num_tensors = sum(len(header.tensors) for header in headers)
    if config.get("quantization_config") or config.get("quantization"):
        num_elements = _QUANTISED_PER_BYTE * sum(header.file_bytes for header in headers)
    else:
        num_elements = sum(
            min(_SHARE * header.file_bytes, sum(t.num_elements for t in header.tensors))
            for header in headers
        )
    return ParameterLimit(
        _SPLIT * num_tensors + _SPARE_TENSORS, _SHARE * num_elements + _SPARE_ELEMENTS
    )


def check_counts(content: Any) -> None:
    """Raise TooLarge if a layer count anywhere in a configuration exceeds `_MAX_LAYERS`."""
    if isinstance(content, list):
        for part in content:
            check_counts(part)
    elif isinstance(content, dict):
        for name, value in content.items():
            is_number = isinstance(value, (int, float))
            if is_number and value > _MAX_LAYERS and _LAYER_COUNT.search(str(name)):
                raise TooLarge(f"a model with {name} of more than {_MAX_LAYERS:,}")
            check_counts(value)
