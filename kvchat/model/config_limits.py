"""Limits on what config.json may ask for, taken from what the weight files can hold.

A configuration may ask for a million layers: building them takes hours, and filling what the files
lack takes all memory. Counts are checked before transformers reads them, and building stops when a
model grows beyond its files.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as hooks

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint_files import WeightHeader

# Configuration classes make lists as long as their counts of layers; no model has that many.
_LAYER_COUNT = re.compile(r"(layers?|depths?)$")
_MAX_LAYERS = 4096
# Tables of angles and masks, which are computed and in no file.
_MAX_BUFFER_BYTES = 1 << 30
# A tied output layer is counted twice while it is built; a tiny checkpoint gets an exact message
# about the tensors that are missing, later on.
_SHARE, _SPARE_ELEMENTS, _SPARE_TENSORS = 2, 1 << 20, 10_000
# Files may hold the parts of what a model holds as one tensor, and the other way round.
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
    """The most parameters that a model may have, by their number and by their elements."""

    num_tensors: int
    num_elements: int

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While entered: raise TooLarge from the building of a module that exceeds this.

        Watches all modules that the process builds; one model is loaded at a time.
        """
        num_tensors = num_elements = buffer_bytes = 0

        def take(module: object, name: str, parameter: torch.nn.Parameter | None) -> None:
            nonlocal num_tensors, num_elements
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
    """Return how large a model the files with these headers may belong to."""
    num_tensors = sum(len(header.tensors) for header in headers)
    if config.get("quantization_config"):
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
    """Raise TooLarge where a configuration counts more layers than any model has."""
    if isinstance(content, list):
        for part in content:
            check_counts(part)
    elif isinstance(content, dict):
        for name, value in content.items():
            is_number = isinstance(value, (int, float))
            if is_number and value > _MAX_LAYERS and _LAYER_COUNT.search(str(name)):
                raise TooLarge(f"a model with {name} of more than {_MAX_LAYERS:,}")
            check_counts(value)
