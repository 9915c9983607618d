"""Linear layers that share an input, as one product; on a CPU with weights laid out for few rows.

Knows torch's packed formats and their limits. Does not know what the outputs are for.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from kvchat.model.fuse_kernels import few_rows_linear
from kvchat.model.linear_race import Operands
from kvchat_kernels.few_sizes import linear_of_few_sizes
from kvchat_kernels.processor import multiplies_in

# Above this many rows bfloat16's own product is the faster one where processors have instructions
# for it (measured on AVX-512 with bf16: even at 12 to 16 rows, 1.3x ahead at 8, 3x ahead at one).
MAX_PACKED_ROWS = 12
# float16 keeps 11 bits down to 2^-14 and an absolute 2^-25 below. Where a row's largest weight is
# at least this, none of its weights moves by more than 2^-13 of it, a 32nd of a bfloat16's step.
_SMALLEST_ROW_MAX = 2.0**-12
_LARGEST_WEIGHT = 65504.0
_SLICE_ELEMENTS = 1 << 26
_NO_LIMIT = 1 << 30
PACKABLE = (torch.bfloat16, torch.float16)


def most_packed_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows the packed product is the faster one: all, on a processor that
    does not multiply in `dtype` itself.
    """
    return MAX_PACKED_ROWS if multiplies_in(dtype) else _NO_LIMIT


class Product(Protocol):
    """x [num_rows, in_features] -> [num_rows, out_features], both in the dtype it was made for."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class HalfProduct:
    """Products of few rows with weights held in float16, by torch's packed kernel (FBGEMM).

    It multiplies and adds in float32 and reads the weights at the speed of memory: a bfloat16
    product of one row takes two to three times as long. Rows come and go in the model's own dtype,
    so that a product rounds where the layer itself does, and differs from it in the order of
    additions only; one that `keeps_float` returns float32. Holds a copy of the weights, 2 bytes
    each.
    """

    def __init__(self, layers: Sequence[nn.Linear], keeps_float: bool = False) -> None:
        """Raises ValueError where the weights would not survive float16."""
        if not all(_survives_half(layer.weight.detach()) for layer in layers):
            raise ValueError("weights beyond float16")
        # The overload by its name: choosing one at every call takes as long as a small product.
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default
        self._keeps_float = keeps_float
        bias = _joined_bias(layers)
        self.packs = [
            torch.ops.quantized.linear_prepack_fp16(
                weight, None if bias is None else bias[start : start + len(weight)]
            )
            for start, weight in _float_slices(layers)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        outputs = [self._multiply(rows, pack) for pack in self.packs]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out if self._keeps_float else out.to(x.dtype)


def _float_slices(layers: Sequence[nn.Linear]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the layers' weights in float32, row after row, and where each slice begins.

    One slice, but for weights so large that a copy of four bytes each might not fit.
    """
    weights = [layer.weight.detach() for layer in layers]
    num_rows = sum(len(weight) for weight in weights)
    if num_rows * weights[0].shape[1] <= _SLICE_ELEMENTS:
        floats = torch.empty(num_rows, weights[0].shape[1], dtype=torch.float32)
        for part, weight in zip(floats.split([len(w) for w in weights]), weights, strict=True):
            part.copy_(weight)
        yield 0, floats
        return
    start = 0
    for weight in weights:
        for piece in weight.split(max(1, _SLICE_ELEMENTS // weight.shape[1])):
            yield start, piece.float()
            start += len(piece)


class MergedProduct:
    """One product with the weights of several layers, for any number of rows.

    The layers' parameters become views of the merged ones on `adopt`, so that nothing is held
    twice; until then the layers are untouched. It is torch's product but for the numbers of rows
    given to `take_kernel`.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = tuple(layers)
        if len(layers) == 1:
            self._weight, self._bias = layers[0].weight.data, _joined_bias(layers, False)
        else:
            self._weight = torch.cat([layer.weight.data for layer in layers])
            self._bias = _joined_bias(layers, False)
        self._kernel_rows: frozenset[int] = frozenset()

    @property
    def operands(self) -> Operands:
        """The merged weight and bias, which stay this product's."""
        return Operands(self._weight, self._bias)

    def take_kernel(self, row_counts: frozenset[int]) -> None:
        """Use kvchat's kernel for these numbers of rows, each from 1 to 16, and torch's for others.

        Not to be changed once a step was captured.
        """
        self._kernel_rows = row_counts

    def adopt(self) -> None:
        """Let the layers' parameters be views of the merged ones."""
        if len(self._layers) == 1:
            return
        start = 0
        for layer in self._layers:
            end = start + layer.out_features
            layer.weight.data = self._weight[start:end]
            if layer.bias is not None and self._bias is not None:
                layer.bias.data = self._bias[start:end]
            start = end

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # By the shape alone, which is the same at every replay of a captured step.
        if x.numel() // x.shape[-1] in self._kernel_rows:
            return few_rows_linear(x, self._weight, self._bias)
        if x.is_cuda:
            return linear(x, self._weight, self._bias)
        return linear_of_few_sizes(x, self._weight, self._bias)


def _survives_half(weight: torch.Tensor) -> bool:
    """Tell whether a [rows, columns] weight can be held in float16 without harm."""
    row_max = weight.abs().amax(dim=1).float()
    is_in_range = (row_max >= _SMALLEST_ROW_MAX) & (row_max <= _LARGEST_WEIGHT)
    return bool((is_in_range | (row_max == 0)).all())


def has_half_products() -> bool:
    """Tell whether torch was built with the packed float16 product for this processor."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )


def plain_linears(*modules: Any) -> list[nn.Linear] | None:
    """Return the modules if they are torch's linear layers with an input in common, else None."""
    if not all(type(module) is nn.Linear for module in modules):
        return None
    layers: list[nn.Linear] = list(modules)
    if len({layer.in_features for layer in layers}) > 1:
        return None
    return layers


def _joined_bias(layers: Sequence[nn.Linear], as_float: bool = True) -> torch.Tensor | None:
    """Return the layers' biases in one tensor, zeros where only some layers have one."""
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    joined = torch.cat(parts)
    return joined.float() if as_float else joined
