"""Weights in 8 or 4 bits for models on a CPU, activations as exact as ever.

Replaces the forward of linear layers and frees their own weights. Knows torch's packed formats and
what is wrong with them; does not know what a layer is for.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from kvchat.core.errors import ModelError
from kvchat.model.spec import ModelSpec

_INT8_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"
_PACK = "_kvchat_pack"
_GROUPS = (128, 64, 32)
# torch packs and reads int4 rows in sixteens, and its bfloat16 kernel crashes on odd lengths.
_INT4_MULTIPLE = 16
# Layers whose shape does not fit, a small router for one, may stay as they are up to this share.
_MAX_KEPT_SHARE = 0.1


class PackedWeight(Protocol):
    """A weight that multiplies what its `prepare` has made of x [num_rows, in_features] float32.

    Layers with an input in common prepare it once.
    """

    num_bytes: int

    def prepare(self, x: torch.Tensor) -> Any: ...

    def multiply(self, prepared: Any) -> torch.Tensor: ...


class Int8Weight:
    """A weight [out, in] in 8 bits, one scale a row, multiplied by FBGEMM's integer kernel.

    The kernel wants 8-bit activations, too few for a transformer's outliers. So each row is scaled
    to the 8-bit range and split in two, what 8 bits hold of it and 8 bits of what is left, which
    run as two rows of one product: 15 bits, ten times as exact as bfloat16, at no cost for few
    rows, where reading the weights is what takes time. No row depends on its neighbours.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.float()
        scale = weight.abs().amax(dim=1).clamp_(min=1e-12).div_(127)
        self._pack = _prepacked(weight, scale)
        self._levels = exact_levels()
        self.num_bytes = weight.numel() + scale.nbytes

    def prepare(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both parts of every row, one below the other, and the rows' scales."""
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-30)
        scaled = x * (self._levels / largest)
        coarse = scaled.round()
        fine = scaled.sub_(coarse).mul_(2 * self._levels)
        return torch.cat((coarse, fine)), largest.div_(self._levels)

    def __deepcopy__(self, memo: object) -> "Int8Weight":
        return self  # nothing ever changes it, and torch would unpack and pack it again

    def multiply(self, prepared: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        both, scale = prepared
        out = _multiply_int8(both, self._levels, self._pack)
        coarse, fine = out.chunk(2)
        return torch.add(coarse, fine, alpha=0.5 / self._levels).mul_(scale)


class Int4Weight:
    """A weight [out, in] in 4 bits, a scale and an offset for each group of a row.

    torch's kernel takes bfloat16 activations; in float32 it is a hundred times slower.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        num_out, num_in = weight.shape
        self._group = next(group for group in _GROUPS if num_in % group == 0)
        groups = weight.float().view(num_out, -1, self._group)
        low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        # Rounded first: the kernel computes with what bfloat16 has left of scale and offset.
        scale = ((high - low) / 15).clamp_(min=1e-8).bfloat16()
        offset = (low + 8 * scale.float()).bfloat16()
        levels = ((groups - offset.float()) / scale.float() + 8).round_().clamp_(0, 15)
        self._pack = torch._convert_weight_to_int4pack_for_cpu(
            levels.view(num_out, num_in).to(torch.int32), 1
        )
        pairs = torch.stack((scale[..., 0], offset[..., 0]), dim=-1)
        self._scales = pairs.transpose(0, 1).contiguous()
        self.num_bytes = self._pack.nbytes + self._scales.nbytes

    def __deepcopy__(self, memo: object) -> "Int4Weight":
        return self

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()

    def multiply(self, prepared: torch.Tensor) -> torch.Tensor:
        out = torch._weight_int4pack_mm_for_cpu(prepared, self._pack, self._group, self._scales)
        return out.float()


class SharedInputProducts:
    """The products of several packed layers with one input, side by side, in float32."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """Raises ValueError where a layer is not packed, or the layers differ in how."""
        packs = [pack_of(layer) for layer in layers]
        if any(type(pack) is not type(packs[0]) or pack is None for pack in packs):
            raise ValueError("layers that are not packed alike")
        self._packs: list[Any] = packs
        self._biases = [None if layer.bias is None else layer.bias.float() for layer in layers]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in_features] float32 times the layers' weights, plus their biases."""
        prepared = self._packs[0].prepare(x.reshape(-1, x.shape[-1]))
        outputs = []
        for pack, bias in zip(self._packs, self._biases, strict=True):
            out = pack.multiply(prepared)
            outputs.append(out if bias is None else out.add_(bias))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out.view(*x.shape[:-1], -1)


def pack_of(layer: nn.Module) -> PackedWeight | None:
    """Return the packed weight of a layer that has one."""
    pack: PackedWeight | None = layer.__dict__.get(_PACK)
    return pack


def quantise(module: Any, spec: ModelSpec, weights: str, tick: Callable[[float], None]) -> None:
    """Pack the linear layers of a model's decoder layers and its head, and free their weights.

    `weights` is int8 or int4; the head, whose errors nothing evens out, has 8 bits in either case.
    Raises ModelError where the device or the shapes do not allow it.
    """
    if module.device.type != "cpu":
        raise ModelError(f"--weights {weights} works on a CPU only.", "Leave it out.")
    if not _has_kernels():
        raise ModelError(f"torch has no {weights} kernels for this processor.", "Leave it out.")
    head = module.get_output_embeddings()
    layers = list(_linear_layers(module, spec))
    kept = [layer for layer in layers if not _fits(layer, weights)]
    total = sum(layer.weight.numel() for layer in layers)
    if total == 0 or sum(layer.weight.numel() for layer in kept) > _MAX_KEPT_SHARE * total:
        raise ModelError(
            f"The shapes of {spec.architecture} do not allow {weights} weights.",
            "Leave out --weights." if weights == "int8" else "Try --weights int8.",
        )
    to_pack = [layer for layer in layers if _fits(layer, weights)]
    for index, layer in enumerate(to_pack):
        make = Int8Weight if weights == "int8" or layer is head else Int4Weight
        _replace(layer, make)
        tick((index + 1) / len(to_pack))


def _linear_layers(module: Any, spec: ModelSpec) -> Iterator[nn.Linear]:
    seen = set()
    for layer in spec.layers:
        parent = module.get_submodule(layer.module_name.rpartition(".")[0])
        for child in parent.modules():
            if type(child) is nn.Linear and child not in seen:
                seen.add(child)
                yield child
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        yield head


def _fits(layer: nn.Linear, weights: str) -> bool:
    if weights == "int8":
        return True
    return layer.in_features % _GROUPS[-1] == 0 and layer.out_features % _INT4_MULTIPLE == 0


@torch.inference_mode()
def _replace(layer: nn.Linear, make: Callable[[torch.Tensor], PackedWeight]) -> None:
    dtype = layer.weight.dtype
    layer.__dict__[_PACK] = make(layer.weight)
    # A new parameter, for the old one may be an embedding's too.
    layer.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    product = SharedInputProducts([layer])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return product(x.float()).to(x.dtype)

    layer.__dict__["forward"] = forward


@cache
def exact_levels() -> int:
    """Return how far activations may reach on either side of zero without the kernel saturating.

    Without VNNI instructions FBGEMM adds pairs of products in 16 bits, which 8-bit activations
    overflow and 7-bit ones do not.
    """
    weight = torch.ones(16, 64)
    pack = _prepacked(weight, torch.full((16,), 1 / 127))
    out = _multiply_int8(torch.full((2, 64), 127.0), 127, pack)
    return 127 if torch.allclose(out, torch.full_like(out, 127.0 * 64)) else 63


def _multiply_int8(x: torch.Tensor, levels: int, pack: Any) -> torch.Tensor:
    """Return whole numbers x within +-levels times a packed weight, in float32."""
    product = getattr(torch.ops.quantized, _INT8_PRODUCT).default
    out: torch.Tensor = product(x, 1.0, levels + 1, pack)
    return out


def _prepacked(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    """Round a weight to 8 bits by its rows' scales and pack it for FBGEMM."""
    engine = torch.backends.quantized.engine
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch announces that quantised tensors will go some day; `_has_kernels` sees to that.
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, None)
    finally:
        torch.backends.quantized.engine = engine


def _has_kernels() -> bool:
    """Tell whether this torch has the packed kernels, which are no promise of its."""
    return (
        "fbgemm" in torch.backends.quantized.supported_engines
        and hasattr(torch, "quantize_per_channel")
        and hasattr(torch.ops.quantized, _INT8_PRODUCT)
        and hasattr(torch, "_weight_int4pack_mm_for_cpu")
    )
