"""Quantises weights to 8 or 4 bits for models on a CPU; activations keep their precision.

Replaces the forward of linear layers and frees their own weights. Uses torch's packed formats and
works around their faults.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvchat.core.errors import ModelError
from kvchat.model.spec import ModelSpec

_INT8_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"
_PACK = "_kvchat_pack"
_GROUPS = (128, 64, 32)
# torch packs and reads int4 rows in sixteens, and its bfloat16 kernel crashes on odd lengths.
_INT4_MULTIPLE = 16
# How far two right ways to one result may be apart: inputs that differ in their last bits are
# rounded to other levels, of 13 bits at the least in Int8Weight and of 8 in Int4Weight.
PACKED_NOISE = 3e-3
# Where more of the parameters than this stay as they are, experts for one, the user is told.
_KEPT_SHARE_TOLD = 0.1


class PackedWeight(Protocol):
    """A weight that multiplies what its `prepare` has made of x [num_rows, in_features] float32.

    Layers with an input in common prepare it once. There is at least one row.
    """

    num_out: int
    num_bytes: int

    def prepare(self, x: torch.Tensor) -> Any: ...

    def multiply(self, prepared: Any) -> torch.Tensor: ...


class Int8Weight:
    """A weight [out, in] in 8 bits, one scale a row, multiplied by FBGEMM's integer kernel.

    The kernel wants 8-bit activations, too few for a transformer's outliers. So each row is scaled
    to the 8-bit range and split in two, what 8 bits hold of it and 8 bits of what is left, which
    run as two rows of one product: 15 bits, 13 without VNNI instructions, at no cost for few rows,
    where reading the weights is what takes time. No row depends on its neighbours.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.float()
        self.num_out = len(weight)
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
        """The weight is of a shape that `_fits`."""
        num_out, num_in = weight.shape
        self.num_out = num_out
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

    def __init__(self, layers: Sequence[Any]) -> None:
        """Raises ValueError where a layer is not packed, or the layers differ in how."""
        packs: list[Any] = [pack_of(layer) for layer in layers]
        if any(type(pack) is not type(packs[0]) or pack is None for pack in packs):
            raise ValueError("layers that are not packed alike")
        self._packs = packs
        self._num_out = sum(pack.num_out for pack in packs)
        self._biases = [None if layer.bias is None else layer.bias.float() for layer in layers]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in_features] float32 times the layers' weights, plus their biases.

        A step in the middle of a prompt asks the head for no row.
        """
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self._num_out)
        prepared = self._packs[0].prepare(x.reshape(-1, x.shape[-1]))
        outputs = []
        for pack, bias in zip(self._packs, self._biases, strict=True):
            out = pack.multiply(prepared)
            outputs.append(out if bias is None else out.add_(bias))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out.view(*x.shape[:-1], self._num_out)


def pack_of(layer: nn.Module) -> PackedWeight | None:
    """Return the packed weight of a layer that has one."""
    pack: PackedWeight | None = layer.__dict__.get(_PACK)
    return pack


def quantise(
    module: Any, spec: ModelSpec, weights: str, tick: Callable[[float], None]
) -> tuple[str, ...]:
    """Pack the linear layers of a model's decoder layers and its head, and free their weights.

    `weights` is int8 or int4. With int4 the head, whose errors nothing evens out, has 8 bits, and
    so has a layer that does not fit 4. Returns notes for the user on what has other bits than asked
    for. Raises ModelError where the device, torch or the model has nothing to pack.
    """
    if module.device.type != "cpu":
        raise ModelError(f"--weights {weights} works on a CPU only.", "Leave it out.")
    if not _has_kernels():
        raise ModelError(f"torch has no {weights} kernels for this processor.", "Leave it out.")
    head = module.get_output_embeddings()
    layers = list(_linear_layers(module, spec))
    if not layers:
        raise ModelError(
            f"{spec.architecture} has no linear layers that --weights {weights} could pack.",
            "Leave it out.",
        )
    num_packed = sum(layer.weight.numel() for layer in layers)
    odd = [
        layer for layer in layers if weights == "int4" and layer is not head and not _fits(layer)
    ]
    notes = _note_on_odd(odd, layers)
    for index, layer in enumerate(layers):
        has_8_bits = weights == "int8" or layer is head or layer in odd
        _replace(layer, Int8Weight if has_8_bits else Int4Weight)
        tick((index + 1) / len(layers))
    return notes + _note_on_kept(module, num_packed)


def _note_on_odd(odd: Sequence[Any], layers: Sequence[Any]) -> tuple[str, ...]:
    if not odd:
        return ()
    num_out, num_in = _weight_of(odd[0]).shape
    return (
        f"{len(odd)} of {len(layers)} linear layers, one of {num_in} x {num_out} for one, do not "
        "fit 4 bits and are held in 8.",
    )


def _note_on_kept(module: Any, num_packed: int) -> tuple[str, ...]:
    """Return a note where much of a model is not packed; tables of embeddings never are."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    num_kept = sum(p.numel() for p in module.parameters() if id(p) not in tables)
    share = num_kept / (num_kept + num_packed)
    if share < _KEPT_SHARE_TOLD:
        return ()
    return (f"Only linear layers are packed; {share:.0%} of the weights are others and stay.",)


def _linear_layers(module: Any, spec: ModelSpec) -> Iterator[nn.Linear | Conv1D]:
    """Yield what multiplies by a matrix: torch's linear layers, and GPT-2's."""
    seen = set()
    for layer in spec.layers:
        parent = module.get_submodule(layer.module_name.rpartition(".")[0])
        for child in parent.modules():
            if type(child) in (nn.Linear, Conv1D) and child not in seen:
                seen.add(child)
                yield child
    head = module.get_output_embeddings()
    if type(head) is nn.Linear and head not in seen:
        yield head


def _fits(layer: Any) -> bool:
    """Tell whether a linear layer's weight can be held in groups of 4 bits."""
    num_out, num_in = _weight_of(layer).shape
    return num_in % _GROUPS[-1] == 0 and num_out % _INT4_MULTIPLE == 0


def _weight_of(layer: Any) -> torch.Tensor:
    """Return the weight of a linear layer, [out_features, in_features]; GPT-2 has them turned."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if type(layer) is Conv1D else weight


@torch.inference_mode()
def _replace(layer: Any, make: Callable[[torch.Tensor], PackedWeight]) -> None:
    dtype = layer.weight.dtype
    layer.__dict__[_PACK] = make(_weight_of(layer).contiguous())
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
