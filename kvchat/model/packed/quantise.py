"""Quantises weights to 8 or 4 bits. Activations have 16 bits on a CPU, 8 beside 4 bits in a large
model, and the model's dtype on a GPU.

Replaces the forward of linear layers by an object that owns the packed weight (`PackedForward`),
and frees their own weights, one tensor after another: on a GPU the model is never there in 16 bits.
`kvchat_kernels.linear` has the layout and the products.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from kvchat.core.errors import ModelError
from kvchat.model.packed.experts import (
    EXPERT_PACKS,
    EXPERT_TENSORS,
    ExpertPacks,
    are_plain_experts,
    can_pack_experts,
    expert_packs_of,
    expert_tensors,
    expert_weights,
    pack_experts,
    pack_experts_on_gpu,
    use_packs,
)
from kvchat.model.packed.matrices import NOWHERE, Keeping, Matrix, PackedMatrices
from kvchat.model.spec import ModelSpec
from kvchat_kernels.linear.block_linear import block_linear
from kvchat_kernels.linear.blocks import (
    COLUMNS,
    BlockWeights,
    dequantised,
    joined,
    quantised_on,
    with_planes_apart,
)
from kvchat_kernels.linear.cpu import BlockProduct, FloatProduct, rounded

# Where more of the parameters than this stay as they are, the user is told.
_KEPT_SHARE_TOLD = 0.1
# A layer of a recurrent model makes few numbers if it makes one of so many inputs, or fewer.
_FEW_OUTPUTS = 16
# A model of no more packed weights has activations of 16 bits.
_MOST_EXACT_WEIGHTS = 400_000_000


class DevicePack:
    """A layer's packed weights on a GPU; they may become rows of a `merged` matrix."""

    def __init__(self, weights: BlockWeights) -> None:
        self.weights = weights
        self.merged: BlockWeights | None = None


class PackedForward:
    """Stands for the forward of a linear layer on a CPU: owns its packed weight."""

    def __init__(self, layer: Any, pack: BlockProduct) -> None:
        self.pack = pack
        self._bias = None if layer.bias is None else layer.bias.float()
        num_in = layer.in_features if type(layer) is nn.Linear else layer.nx
        self._missing = pack.weights.num_in - num_in

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in_features]; a step in a prompt's middle asks the head for no row."""
        flat = x.reshape(-1, x.shape[-1]).float()
        if self._missing:
            flat = pad(flat, [0, self._missing])
        out = self.pack(flat)
        out = out if self._bias is None else out.add_(self._bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.pack.weights.num_out)


class RowsApart(nn.Module):
    """Stands for a linear layer on a CPU whose rows are in several matrices, a layer of each.

    `order`: where each of its rows is in these, one below the other, int64 [out].
    """

    def __init__(self, layer: nn.Linear, matrices: Sequence[BlockWeights], order: torch.Tensor):
        super().__init__()
        self.order = order
        self.parts = nn.ModuleList()
        for weights in matrices:
            dtype, num_in = layer.weight.dtype, layer.in_features
            part = nn.Linear(num_in, weights.num_out, bias=False, device="meta", dtype=dtype)
            use_instead(part, PackedForward(part, BlockProduct(weights)))
            self.parts.append(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., in_features]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)[..., self.order]


class DeviceForward:
    """The same on a GPU. The bias is the layer's, which goes to the GPU after the weight."""

    def __init__(self, layer: Any, pack: DevicePack) -> None:
        self.pack = pack
        self._layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(x, self.pack.weights, self._layer.bias)


class TableForward:
    """Stands for the forward of a table of embeddings on a CPU: owns its blocks, and unpacks the
    rows asked for.

    A class of its own, as Gemma's, which scales what it finds, runs on the rows found.
    """

    def __init__(self, table: nn.Embedding, weights: BlockWeights) -> None:
        self.weights = weights
        self._dtype = table.weight.dtype
        self._on_rows = None
        if type(table) is not nn.Embedding:
            # Its weight, the largest of a small model, is not copied: the rows take its place.
            no_rows = nn.Parameter(table.weight.new_empty(0, table.embedding_dim), False)
            self._on_rows = copy.deepcopy(table, {id(table.weight): no_rows})
            self._on_rows.padding_idx = None  # no place in the rows found

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., hidden] of token ids [...]; IndexError for others, as usual."""
        flat = ids.reshape(-1)
        found = unpacked_rows(self.weights, flat).to(self._dtype)
        if self._on_rows is not None:
            places = torch.arange(len(flat))
            found = torch.func.functional_call(self._on_rows, {"weight": found}, (places,))
        return found.view(*ids.shape, self.weights.num_in)


class DeviceProducts:
    """The products of several packed layers with one input on a GPU, in the input's dtype.

    Neighbours in one layout are merged: their own weights become rows of the merged ones, so that
    nothing is held twice.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """Raises ValueError for layers that are not packed or have inputs of unequal lengths."""
        packs = [pack_of(layer) for layer in layers]
        ours = [pack for pack in packs if isinstance(pack, DevicePack)]
        if len(ours) < len(packs) or len({pack.weights.num_in for pack in ours}) > 1:
            raise ValueError("layers that are not packed alike")
        pairs = list(zip(layers, ours, strict=True))
        self._products = [
            _merged(list(group)) for _, group in groupby(pairs, lambda pair: pair[1].weights.layout)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in_features] times the layers' weights, plus their biases."""
        outputs = [_multiply(x, weights, bias) for weights, bias in self._products]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _merged(pairs: list[tuple[Any, DevicePack]]) -> tuple[BlockWeights, torch.Tensor | None]:
    """Return the weights and biases of layers in one; each layer's own become rows of these."""
    packs = [pack for _, pack in pairs]
    bias = _joined_bias([layer for layer, _ in pairs], [pack.weights.num_out for pack in packs])
    known = packs[0].merged
    num_out = sum(pack.weights.num_out for pack in packs)
    if known is not None and known.num_out == num_out and all(p.merged is known for p in packs):
        return known, bias  # from an earlier product of the same layers
    weights = joined([pack.weights for pack in packs])
    start = 0
    for pack in packs:
        end = start + pack.weights.num_out
        pack.weights, pack.merged = weights.rows(start, end), weights
        start = end
    return weights, bias


def _multiply(x: torch.Tensor, weights: BlockWeights, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if bias is not None:  # a layer may be tried in float32
        bias = bias.to(x.dtype)
    return block_linear(rows, weights, bias).view(*x.shape[:-1], weights.num_out)


def _joined_bias(layers: Sequence[Any], widths: Sequence[int]) -> torch.Tensor | None:
    """Return the layers' biases in one tensor, zeros where only some layers have one."""
    if all(layer.bias is None for layer in layers):
        return None
    some = next(layer.bias for layer in layers if layer.bias is not None)
    parts = [
        some.new_zeros(width) if layer.bias is None else layer.bias.detach()
        for layer, width in zip(layers, widths, strict=True)
    ]
    return torch.cat(parts)


def pack_of(layer: nn.Module) -> BlockProduct | DevicePack | None:
    """Return what holds a layer's packed weight, None if it has none."""
    forward: object = layer.forward
    return forward.pack if isinstance(forward, PackedForward | DeviceForward) else None


def packed_table(table: nn.Module) -> BlockWeights | None:
    """Return the blocks of a table of embeddings that unpacks its rows when they are asked for."""
    forward: object = table.forward
    return forward.weights if isinstance(forward, TableForward) else None


def unpacked_rows(weights: BlockWeights, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [num_rows] of a matrix in float32 [num_rows, in]; IndexError for others."""
    # Not part[rows], which counts numbers below zero from the end.
    return dequantised(weights.changed(lambda part: part.index_select(0, rows)))


def round_activations(module: nn.Module) -> None:
    """Choose how exact activations are beside weights of 2 to 6 bits on a CPU: 8 in large models.

    With 16 bits a prompt takes up to 1.5 times as long. Small models need them: 8 change 3 % of the
    likeliest tokens in one of 135 M weights (KL 0.0022), and 1 % in one of 494 M (KL 0.0005).
    """
    products = [pack for pack in map(pack_of, module.modules()) if isinstance(pack, BlockProduct)]
    for experts in map(expert_packs_of, module.modules()):
        if isinstance(experts, ExpertPacks):
            products += experts.products
    weights = {id(product): product.weights for product in products}.values()
    if sum(part.num_out * part.num_in for part in weights) > _MOST_EXACT_WEIGHTS:
        for product in products:
            product.round_coarsely()


def num_packed_bytes(module: nn.Module) -> int:
    """Return the bytes of a model's packed weights, which are no parameters of it."""
    packs = [pack_of(layer) for layer in module.modules()]
    experts = [expert_packs_of(part) for part in module.modules()]
    total = sum(pack.weights.num_bytes for pack in packs if pack is not None)
    return total + sum(pack.num_bytes for pack in experts if pack is not None)


def is_packed(module: nn.Module) -> bool:
    """Whether any layer of a model multiplies with a packed weight."""
    return any(pack_of(layer) or expert_packs_of(layer) for layer in module.modules())


def quantise(
    module: Any,
    spec: ModelSpec,
    weights: str,
    device: torch.device,
    tick: Callable[[float], None],
    keeping: Keeping = NOWHERE,
    in_8: Collection[str] = (),
) -> tuple[str, ...]:
    """Pack the linear layers of a model's decoder layers and its head, and free their weights.

    Plain experts of mixtures too. `weights` is int8 or int4. With int4 the head, whose
    errors nothing evens out, has 8 bits, and so has what makes a few numbers of a recurrent layer's
    input: its decay and its gates act on all that the layer keeps. So have the kinds of layers
    `in_8`, see `kinds_of_layers`. The packed weights are made on
    `device`; the module is on the CPU. For a CPU `keeping` says where they may be already, or are
    to be kept. Returns notes for the user. Raises ModelError where the model has nothing to pack,
    and what `keeping.check` raises.
    """
    head = module.get_output_embeddings()
    layers = list(_linear_layers(module, spec))
    experts = list(_experts(module))
    if not layers and not experts:
        raise ModelError(
            f"{spec.architecture} has no linear layers that --weights {weights} could pack.",
            "Leave it out.",
        )
    num_packed = sum(each[0].weight.numel() for each in _by_weight(layers))
    num_packed += sum(part.numel() for found in experts for part in expert_weights(found))
    bits = 8 if weights == "int8" else 4
    done, total = 0, len(layers) + len(experts)
    names = {id(part): name for name, part in module.named_modules()}
    groups = [
        (sharing, 8 if _kind(names, sharing[0]) in in_8 else _bits_of(sharing[0], head, spec, bits))
        for sharing in _by_weight(layers)
    ]
    packed = None
    if device.type == "cpu":
        matrices = [
            _matrix(names[id(sharing[0])], _weight_of(sharing[0]), b) for sharing, b in groups
        ]
        for found in experts:
            parts = zip(EXPERT_TENSORS, expert_weights(found), strict=True)
            matrices += [_matrix(f"{names[id(found)]}.{name}", part, bits) for name, part in parts]
        packed = PackedMatrices(keeping, f"{weights} {module.dtype}", matrices)
    with packed or nullcontext():
        for sharing, own_bits in groups:
            _replace(sharing, own_bits, device, packed, names[id(sharing[0])])
            done += len(sharing)
            tick(done / total)
        for found in experts:
            if packed is None:
                pack_experts_on_gpu(found, bits, device)
            else:
                pack_experts(found, packed.pack, names[id(found)])
            done += 1
            tick(done / total)
    notes = _note_on_kept(module, num_packed)
    return (*notes, packed.note) if packed is not None and packed.note else notes


def kinds_of_layers(module: Any, spec: ModelSpec) -> dict[str, list[Any]] | None:
    """Return what `quantise` packs by kind: the last part of a name, such as `v_proj`.

    None for a model with experts, which have no names of their own.
    """
    if next(_experts(module), None) is not None:
        return None
    names = {id(part): name for name, part in module.named_modules()}
    kinds: dict[str, list[Any]] = {}
    for layer in _linear_layers(module, spec):
        kinds.setdefault(_kind(names, layer), []).append(layer)
    return kinds


def _kind(names: Mapping[int, str], layer: Any) -> str:
    return names[id(layer)].rpartition(".")[2]


def num_elements(layers: Sequence[Any]) -> int:
    """Return how many weights layers have, each of those they share once."""
    return sum(sharing[0].weight.numel() for sharing in _by_weight(layers))


@contextmanager
def multiplying_rounded(
    module: Any,
    spec: ModelSpec,
    weights: str,
    kinds: Collection[str],
    in_8: Collection[str] = (),
) -> Iterator[None]:
    """Inside this context the layers of `kinds` of a model on the CPU multiply as if packed.

    Their own weights stay. `weights` and `in_8` are as for `quantise`.
    """
    head, found = module.get_output_embeddings(), kinds_of_layers(module, spec) or {}
    tried = []
    try:
        for kind in kinds:
            for sharing in _by_weight(found[kind]):
                is_coarse = weights == "int4" and kind not in in_8
                bits = _bits_of(sharing[0], head, spec, 4) if is_coarse else 8
                product = BlockProduct(rounded(_weight_of(sharing[0]), bits))
                for layer in sharing:
                    layer.forward = PackedForward(layer, product)
                    tried.append(layer)
        yield
    finally:
        for layer in tried:
            del layer.__dict__["forward"]


@contextmanager
def multiplying_in_float32(module: Any) -> Iterator[None]:
    """Inside this context the linear layers of a model on the CPU take and give float32.

    Layers that multiply as if packed do so already. One weight at a time is there in float32.
    """
    layers = [layer for layer in module.modules() if type(layer) in (nn.Linear, Conv1D)]
    plain = [layer for layer in layers if "forward" not in layer.__dict__]
    for layer in plain:
        layer.__dict__["forward"] = partial(_float32_product, layer)
    try:
        yield
    finally:
        for layer in plain:
            del layer.__dict__["forward"]


def _float32_product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return linear(x.float(), _weight_of(layer).float(), bias)


def _bits_of(layer: Any, head: Any, spec: ModelSpec, bits: int) -> int:
    num_out, num_in = _weight_of(layer).shape
    makes_few = num_out * _FEW_OUTPUTS <= num_in
    return 8 if layer is head or (spec.state and makes_few) else bits


def _matrix(name: str, weight: torch.Tensor, bits: int) -> Matrix:
    num_in = weight.shape[-1]
    return Matrix(name, weight.numel() // num_in, num_in + -num_in % COLUMNS, bits)


def _by_weight(layers: Sequence[Any]) -> list[list[Any]]:
    """Return the layers in groups that share a weight, as those of Zamba's blocks do."""
    groups: dict[int, list[Any]] = {}
    for layer in layers:
        groups.setdefault(id(layer.weight), []).append(layer)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights by their format."""

    own: int
    int8: int
    int4: int

    def of(self, weights: str) -> int:
        return {"auto": self.own, "int8": self.int8, "int4": self.int4}[weights]


def weight_bytes(module: Any, spec: ModelSpec) -> WeightBytes:
    """Return what a model's weights take: as they are, and with what `quantise` packs packed.

    Layers that are packed already do not count.
    """
    layers = [layer for layer in _linear_layers(module, spec) if pack_of(layer) is None]
    head = module.get_output_embeddings()
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    freed = sum(layer.weight.nbytes for layer in layers if id(layer.weight) not in tables)
    in_8 = sum(_packed_bytes(_weight_of(layer), 8) for layer in layers)
    in_4 = sum(_packed_bytes(_weight_of(layer), 8 if layer is head else 4) for layer in layers)
    for part in (part for found in _experts(module) for part in expert_weights(found)):
        freed += part.nbytes
        in_8, in_4 = in_8 + _packed_bytes(part, 8), in_4 + _packed_bytes(part, 4)
    return WeightBytes(own, own - freed + in_8, own - freed + in_4)


def _packed_bytes(weight: torch.Tensor, bits: int) -> int:
    num_in = weight.shape[-1]
    num_blocks = weight.numel() // num_in * -(-num_in // COLUMNS)
    # A scale of 2 bytes a block, and a minimum in 4 bits.
    return num_blocks * (COLUMNS * bits // 8 + (2 if bits == 8 else 4))


def _note_on_kept(module: Any, num_packed: int) -> tuple[str, ...]:
    """Return a note where much of a model is not packed; tables of embeddings never are."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    num_kept = sum(p.numel() for p in module.parameters() if id(p) not in tables)
    share = num_kept / (num_kept + num_packed)
    if share < _KEPT_SHARE_TOLD:
        return ()
    return (f"{share:.0%} of the weights are in layers that cannot be packed, and stay.",)


def _linear_layers(module: Any, spec: ModelSpec) -> Iterator[nn.Linear | Conv1D]:
    """Yield what multiplies by a matrix: torch's linear layers, and GPT-2's."""
    head = module.get_output_embeddings()
    seen = {head, *(module.get_submodule(name) for name in spec.read_elsewhere)}
    if spec.state:  # recurrent layers stand beside those with attention, or are all there are
        parents = [module]
    else:
        names = (layer.module_name.rpartition(".")[0] for layer in spec.layers)
        parents = [module.get_submodule(name) for name in names]
    for parent in parents:
        for child in parent.modules():
            if type(child) in (nn.Linear, Conv1D) and child not in seen and not _is_empty(child):
                seen.add(child)
                yield child
    if type(head) is nn.Linear:
        yield head


def _is_empty(layer: nn.Linear | Conv1D) -> bool:
    """Whether a layer is of no width, as those of a mixture with no shared expert are."""
    return type(layer) is nn.Linear and 0 in (layer.in_features, layer.out_features)


def _experts(module: Any) -> Iterator[nn.Module]:
    return (part for part in module.modules() if can_pack_experts(part))


def _weight_of(layer: Any) -> torch.Tensor:
    """Return the weight of a linear layer, [out_features, in_features]; GPT-2 has them turned."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if type(layer) is Conv1D else weight


@torch.inference_mode()
def _replace(
    layers: Sequence[Any],
    bits: int,
    device: torch.device,
    packed: PackedMatrices | None,
    name: str,
) -> None:
    """Pack the one weight of these layers; on a CPU it is that of `name` in `packed`."""
    weight = _weight_of(layers[0])
    if packed is not None:
        product = BlockProduct(packed.pack(name, weight))
        for layer in layers:
            use_instead(layer, PackedForward(layer, product))
        return
    weights = quantised_on(pad(weight, [0, -weight.shape[1] % COLUMNS]), bits, device)
    for layer in layers:
        use_instead(layer, DeviceForward(layer, DevicePack(weights)))


def use_blocks(
    module: Any,
    blocks: dict[str, tuple[BlockWeights, ...]],
    device: torch.device,
    orders: Mapping[str, torch.Tensor],
) -> None:
    """Let the parts of a model on a CPU multiply with block weights on `device`.

    `blocks` has matrices by the names of the module's tensors, and `orders` those of rows, as
    GgufTensors has them. They are taken out one by one: what a part makes of them takes the place
    of these.
    """
    for gate_up, down in expert_tensors(module):
        if gate_up in blocks:
            experts = module.get_submodule(gate_up.rpartition(".")[0])
            matrices = blocks.pop(gate_up)
            on_cpu, on_gpu = EXPERT_PACKS[are_plain_experts(experts)]
            packs: Any = on_cpu if device.type == "cpu" else on_gpu
            *gate_and_up, last = (_on(device, part) for part in (*matrices, *blocks.pop(down)))
            use_packs(experts, packs(experts, gate_and_up, last))
    while blocks:
        name, matrices = blocks.popitem()
        layer = module.get_submodule(name.removesuffix(".weight"))
        weights = matrices[0]
        if name in orders:
            apart = RowsApart(layer, matrices, orders[name])
            module.set_submodule(name.removesuffix(".weight"), apart)
        elif isinstance(layer, nn.Embedding):
            use_instead(layer, TableForward(layer, weights))
        elif device.type == "cpu":
            use_instead(layer, PackedForward(layer, BlockProduct(weights)))
        else:
            use_instead(layer, DeviceForward(layer, DevicePack(_on(device, weights))))


def _on(device: torch.device, weights: BlockWeights) -> BlockWeights:
    """Return weights as products on a device read them."""
    return weights if device.type == "cpu" else with_planes_apart(weights.to(device))


def use_instead(layer: Any, forward: PackedForward | DeviceForward | TableForward) -> None:
    """Let a layer, or a table, compute by `forward`, and free its own weights.

    They stay where another layer has them too.
    """
    layer.forward = forward
    dtype = layer.weight.dtype
    # A new parameter, for the old one may be an embedding's too.
    layer.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)


def use_cpu_products(module: Any) -> None:
    """Replace the forwards of a model's linear layers, where it is in low precision on a CPU.

    Weights stay where they are and are held once. torch's own product of one row in bfloat16 takes
    two to three times as long as reading the weights.
    """
    if module.device.type != "cpu" or module.dtype == torch.float32:
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and pack_of(layer) is None:
            product = FloatProduct(layer.weight.detach(), layer.bias)
            layer.forward = product  # type: ignore[method-assign, assignment]
