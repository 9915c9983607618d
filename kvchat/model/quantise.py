"""Quantises weights to 8 or 4 bits for models on a CPU; activations have 16 bits.

Replaces the forward of linear layers and frees their own weights. `kvchat_kernels.linear` has the
layout and the products.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from kvchat.core.errors import ModelError
from kvchat.model.spec import ModelSpec
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, quantised
from kvchat_kernels.linear.cpu import BlockProduct, rows_of

_PACK = "_kvchat_pack"
# How far two right ways to one result may be apart: inputs that differ in their last bits are
# rounded to other levels of 16 bits.
PACKED_NOISE = 1e-3
# Where more of the parameters than this stay as they are, experts for one, the user is told.
_KEPT_SHARE_TOLD = 0.1


class SharedInputProducts:
    """The products of several packed layers with one input, side by side, in float32."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Raises ValueError for layers that are not packed or have inputs of unequal lengths."""
        packs = [pack_of(layer) for layer in layers]
        self._products = [pack for pack in packs if pack is not None]
        if len(self._products) < len(packs) or len({p.weights.num_in for p in self._products}) > 1:
            raise ValueError("layers that are not packed alike")
        self._num_in = self._products[0].weights.num_in
        self._num_out = sum(product.weights.num_out for product in self._products)
        self._biases = [None if layer.bias is None else layer.bias.float() for layer in layers]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in_features] float32 times the layers' weights, plus their biases.

        A step in the middle of a prompt asks the head for no row.
        """
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self._num_out)
        flat = x.reshape(-1, x.shape[-1])
        rows = rows_of(pad(flat, [0, self._num_in - x.shape[-1]]))
        outputs = []
        for product, bias in zip(self._products, self._biases, strict=True):
            out = product(rows)
            outputs.append(out if bias is None else out.add_(bias))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out.view(*x.shape[:-1], self._num_out)


def pack_of(layer: nn.Module) -> BlockProduct | None:
    """Return the product with a layer's packed weight, None if it has none."""
    pack: BlockProduct | None = layer.__dict__.get(_PACK)
    return pack


def is_packed(module: nn.Module) -> bool:
    """Whether any layer of a model multiplies with a packed weight."""
    return any(pack_of(layer) is not None for layer in module.modules())


def quantise(
    module: Any, spec: ModelSpec, weights: str, tick: Callable[[float], None]
) -> tuple[str, ...]:
    """Pack the linear layers of a model's decoder layers and its head, and free their weights.

    `weights` is int8 or int4. With int4 the head, whose errors nothing evens out, has 8 bits.
    Returns notes for the user on what is not packed. Raises ModelError where the device or the
    model has nothing to pack.
    """
    if module.device.type != "cpu":
        raise ModelError(f"--weights {weights} works on a CPU only.", "Leave it out.")
    head = module.get_output_embeddings()
    layers = list(_linear_layers(module, spec))
    if not layers:
        raise ModelError(
            f"{spec.architecture} has no linear layers that --weights {weights} could pack.",
            "Leave it out.",
        )
    num_packed = sum(layer.weight.numel() for layer in layers)
    for index, layer in enumerate(layers):
        _replace(layer, 8 if weights == "int8" or layer is head else 4)
        tick((index + 1) / len(layers))
    return _note_on_kept(module, num_packed)


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


def _weight_of(layer: Any) -> torch.Tensor:
    """Return the weight of a linear layer, [out_features, in_features]; GPT-2 has them turned."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if type(layer) is Conv1D else weight


@torch.inference_mode()
def _replace(layer: Any, bits: int) -> None:
    weight = _weight_of(layer)
    padded = pad(weight, [0, -weight.shape[1] % COLUMNS])
    use_packed(layer, quantised(padded, bits))


def use_packed(layer: Any, weights: BlockWeights) -> None:
    """Let a layer multiply with block weights instead of its own, which are freed.

    Columns beyond the layer's are zeros.
    """
    dtype = layer.weight.dtype
    layer.__dict__[_PACK] = BlockProduct(weights)
    # A new parameter, for the old one may be an embedding's too.
    layer.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    product = SharedInputProducts([layer])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return product(x.float()).to(x.dtype)

    layer.__dict__["forward"] = forward
