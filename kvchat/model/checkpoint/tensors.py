"""The tensors of a checkpoint as transformers receives them: as they are in the files, or unpacked.

Plain tensors are memory-mapped. Packed ones are unpacked when transformers takes them.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvchat.core.errors import ModelError
from kvchat.core.events import LoadProgress
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.device import dtype_name, free_bytes
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.hf.model_class import MetaModel, class_and_config
from kvchat.model.packed.experts import expert_tensors
from kvchat.model.packed.formats import PackedTensor, Packing, packing_of, unpacked
from kvchat_kernels.cpu_products import is_fast_by_torch
from kvchat_kernels.linear.blocks import BlockWeights, joined

if TYPE_CHECKING:
    from kvchat.model.gguf.tensors import GgufPlan

# Returns the names in the files of a part's tensors, by those in the part; given those of all.
Names = Callable[[Iterable[str]], Mapping[str, str]]
# The parts of experts that have tensors of their own, by their names and by Mixtral's: those of a
# layer are merged in this order.
_EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# A row that is looked up in blocks costs 0.15 ms more: a small model's step should not pay that.
_LARGE_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """Tensors by name; the dtype to load them in, None for their own; and what to say meanwhile.

    `blocks` are weights of linear layers and experts that stay in their blocks, matrices by the
    tensor's name as GgufTensors has them; `tensors` has zeros for them. `precise` and `orders` are
    as there.
    """

    tensors: Mapping[str, torch.Tensor | PackedTensor]
    dtype: torch.dtype | None
    stage: str
    blocks: dict[str, tuple[BlockWeights, ...]] = field(default_factory=dict)
    precise: Mapping[str, torch.Tensor] = field(default_factory=dict)
    orders: Mapping[str, torch.Tensor] = field(default_factory=dict)


def read_tensors(
    source: ModelSource,
    meta: MetaModel,
    dtype: torch.dtype | None,
    progress: Callable[[LoadProgress], None],
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str] = (),
    names_in: Names | None = None,
) -> CheckpointTensors:
    """Return a checkpoint's tensors for the model `meta`; `dtype` is the one asked for, if any.

    `names_in`: `meta` is a part of the checkpoint's model, whose tensors have these names there.

    What is to multiply on the device `blocks_on` stays in blocks, where these hold exactly what is
    in the file: linear layers but those of `read_elsewhere`, and experts. None unpacks all.

    Raises ModelError if packed weights are damaged, or take more memory than is free.
    """
    if source.gguf is not None:
        wanted = dtype or meta.config.dtype
        gguf = replace(source.gguf, tensors=_renamed(source.gguf.tensors, names_in))
        return _read_gguf(source, gguf, meta, wanted, progress, blocks_on, read_elsewhere)
    found = _read_safetensors(source, meta, dtype, blocks_on, read_elsewhere, names_in)
    progress(LoadProgress(found.stage, 0.0))
    return found


def _read_gguf(
    source: ModelSource,
    gguf: Any,
    meta: MetaModel,
    dtype: torch.dtype,
    progress: Any,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str],
) -> CheckpointTensors:
    from kvchat.model.gguf.tensors import stage_of

    if source.marks() != gguf.marks:
        raise ModelError(f"{source.name} changed after it was found.", "Start again.")
    stage = stage_of(gguf, dtype, blocks_on is not None)
    progress(LoadProgress(stage, 0.0))
    plan = _gguf_plan(source.name, gguf, meta, dtype, blocks_on, read_elsewhere)
    found = plan.read(lambda share: progress(LoadProgress(stage, share)))
    return CheckpointTensors(found.tensors, dtype, stage, found.blocks, found.precise, found.orders)


def memory_of_gguf(
    source: ModelSource,
    meta: MetaModel,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str],
) -> int:
    """Return the bytes of memory that the weights of a GGUF file will take, before it is read.

    `blocks_on` is as of `read_tensors`.
    """
    dtype = meta.config.dtype
    plan = _gguf_plan(source.name, source.gguf, meta, dtype, blocks_on, read_elsewhere)
    return plan.memory_bytes()


def _gguf_plan(
    name: str,
    gguf: Any,
    meta: MetaModel,
    dtype: torch.dtype,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str],
) -> "GgufPlan":
    from kvchat.model.gguf.config import architecture_of
    from kvchat.model.gguf.tensors import GgufPlan

    _, config = class_and_config(meta.config)
    module = meta.module
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    head = _tied_head(module)
    wanted = _wanted_in_blocks(module, head, dtype, blocks_on, read_elsewhere)
    for_cpu = blocks_on is not None and blocks_on.type == "cpu"
    architecture = architecture_of(gguf, name)
    return GgufPlan(gguf, architecture, config, shapes, dtype, wanted, head, for_cpu)


def _wanted_in_blocks(
    module: Any,
    head: str | None,
    dtype: torch.dtype,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str],
) -> list[tuple[str, ...]]:
    """Return the groups of names of what is to stay in blocks; `head` is a tied one."""
    if blocks_on is None:
        return []
    wanted: list[tuple[str, ...]] = []
    wanted += [(name,) for name in _linear_names(module, read_elsewhere)]
    wanted += expert_tensors(module)
    # Else the head reads the table as it is.
    if blocks_on.type == "cpu" and (head is None or (head,) in wanted):
        wanted += [(name,) for name in _large_tables(module, dtype)]
    return wanted


def _tied_head(module: Any) -> str | None:
    """Return the name of the weights of a head that are the embeddings' too; None for others."""
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not table.weight:
        return None
    return next(f"{name}.weight" for name, layer in module.named_modules() if layer is head)


def _linear_names(module: nn.Module, read_elsewhere: Collection[str]) -> frozenset[str]:
    """Return the names of the weights of the linear layers that are called."""
    layers = module.named_modules()
    return frozenset(
        f"{name}.weight"
        for name, layer in layers
        if type(layer) in (nn.Linear, Conv1D) and name not in read_elsewhere
    )


def _large_tables(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the names of the tables of embeddings that are worth unpacking row by row."""
    tables = (
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)
    )
    return [
        f"{name}.weight"
        for name, part in tables
        if part.weight.numel() * dtype.itemsize >= _LARGE_TABLE_BYTES
    ]


def _read_safetensors(
    source: ModelSource,
    meta: MetaModel,
    dtype: torch.dtype | None,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str],
    names_in: Names | None,
) -> CheckpointTensors:
    tensors = mapped_tensors(source)
    packing = packing_of(read_json(source.config_file) or {}, source.name)
    if packing is None:
        return CheckpointTensors(_renamed(tensors, names_in), dtype, "loading weights")
    if dtype is None:
        own = getattr(meta.config, "dtype", None)
        dtype = own if isinstance(own, torch.dtype) else torch.bfloat16
    loose = _renamed(unpacked(tensors, packing, dtype, source.name), names_in)
    blocks: dict[str, tuple[BlockWeights, ...]] = {}
    if blocks_on is not None:
        blocks = _in_blocks(loose, meta, blocks_on, read_elsewhere)
        blocks |= _experts_in_blocks(loose, meta, blocks_on)
    shapes = {name: part.shape for name, part in meta.module.state_dict().items()}
    for name in blocks:
        shape = loose[name].shape if name in loose else shapes[name]
        loose[name] = torch.zeros((), dtype=dtype).expand(shape)
    stage = _size_said(loose, packing, dtype, source.name)
    if blocks and not any(isinstance(tensor, PackedTensor) for tensor in loose.values()):
        stage = f"loading {packing.title} weights in blocks"
    return CheckpointTensors(loose, dtype, stage, blocks)


def _in_blocks(
    tensors: Mapping[str, torch.Tensor | PackedTensor],
    meta: MetaModel,
    blocks_on: torch.device,
    read_elsewhere: Collection[str],
) -> dict[str, tuple[BlockWeights, ...]]:
    """Return the layers and experts whose packed weights blocks hold exactly."""
    takes_floats = _takes_floats(tensors, blocks_on)
    groups: list[tuple[str, ...]] = [
        (n,) for n in sorted(_linear_names(meta.module, read_elsewhere))
    ]
    groups += expert_tensors(meta.module)
    found: dict[str, tuple[BlockWeights, ...]] = {}
    for names in groups:
        parts = {}
        for name in names:
            tensor = tensors.get(name)
            blocks = None
            if isinstance(tensor, PackedTensor):
                blocks = tensor.blocks(for_cpu=blocks_on.type == "cpu")
            if blocks is None or (blocks.are_floats and not takes_floats):
                break
            parts[name] = (blocks,)
        else:
            found |= parts
    return found


def _takes_floats(
    tensors: Mapping[str, torch.Tensor | PackedTensor], blocks_on: torch.device
) -> bool:
    """Whether floats of 8 bits stay so: a Xeon with AMX reads prompts 4 times as fast in 16."""
    if blocks_on.type != "cpu":
        return True
    packed = [tensor for tensor in tensors.values() if isinstance(tensor, PackedTensor)]
    is_short = sum(tensor.num_bytes for tensor in packed) > free_bytes(torch.device("cpu"))
    return is_short or not is_fast_by_torch(torch.bfloat16)


def _experts_in_blocks(
    tensors: dict[str, torch.Tensor | PackedTensor], meta: MetaModel, blocks_on: torch.device
) -> dict[str, tuple[BlockWeights, ...]]:
    """Return the matrices of plain experts that have a tensor each, and take these out."""
    takes_floats, for_cpu = _takes_floats(tensors, blocks_on), blocks_on.type == "cpu"
    found: dict[str, tuple[BlockWeights, ...]] = {}
    for gate_up, down in expert_tensors(meta.module):
        count, num_out, num_in = meta.module.get_parameter(down).shape
        names = _expert_names(tensors, gate_up.rpartition(".")[0], count)
        matrices = [
            _joined_blocks([tensors.get(name) for name in part], takes_floats, for_cpu)
            for part in names
        ]
        shapes = ((num_in, num_out), (num_in, num_out), (num_out, num_in))
        wanted = [(count * rows, columns) for rows, columns in shapes]
        if [each and (each.num_out, each.num_in) for each in matrices] != wanted:
            continue
        gate, up, last = (each for each in matrices if each is not None)
        found |= {gate_up: (gate, up), down: (last,)}
        for part in names:
            for name in part:
                del tensors[name]
    return found


def _expert_names(tensors: Container[str], owner: str, count: int) -> list[list[str]]:
    """Return the names of the tensors of a layer's experts, for each part; empty for other forms.

    `owner` has them in the module; in files it may have Mixtral's name.
    """
    for place in (owner, owner.replace(".mlp.", ".block_sparse_moe.")):
        for parts in _EXPERT_PARTS:
            names = [[f"{place}.{index}.{part}.weight" for index in range(count)] for part in parts]
            if names[0][0] in tensors:
                return names
    return []


def _joined_blocks(
    parts: Sequence[torch.Tensor | PackedTensor | None], takes_floats: bool, for_cpu: bool
) -> BlockWeights | None:
    """Return matrices one below another in blocks; None where some have none, or others."""
    blocks = []
    for part in parts:
        each = part.blocks(for_cpu) if isinstance(part, PackedTensor) else None
        if each is None or (each.are_floats and not takes_floats):
            return None
        blocks.append(each)
    return joined(blocks) if len({each.layout for each in blocks}) == 1 else None


def _renamed(tensors: Mapping[str, Any], names_in: Names | None) -> dict[str, Any]:
    """Return the tensors of a part by their names there; those of a whole model as they are."""
    if names_in is None:
        return dict(tensors)
    return {name: tensors[stored] for name, stored in names_in(tensors).items()}


def stored_names(source: ModelSource) -> list[str]:
    """Return the names of all tensors in a checkpoint's files."""
    if source.gguf is not None:
        return list(source.gguf.tensors)
    names: list[str] = []
    for path in source.weight_files:
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    return names


def stays_packed(source: ModelSource, dtype: torch.dtype, for_cpu: bool) -> bool:
    """Return whether most packed weights of a safetensors checkpoint are not unpacked.

    Unpacked are floats of 8 bits where torch multiplies faster in 16.
    """
    packing = packing_of(read_json(source.config_file) or {}, source.name)
    if packing is None:
        return False
    tensors = unpacked(mapped_tensors(source), packing, dtype, source.name)
    packed = {name: part for name, part in tensors.items() if isinstance(part, PackedTensor)}
    takes_floats = not (for_cpu and is_fast_by_torch(torch.bfloat16))
    staying = [
        part.num_bytes
        for part in packed.values()
        if part.may_fit_blocks() and (takes_floats or not part.are_bytes)
    ]
    return 2 * sum(staying) > sum(part.num_bytes for part in packed.values())


def mapped_tensors(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return every tensor of the weight files, memory-mapped: data is read at first use.

    If two files hold a tensor of the same name, the later file wins, as in transformers.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in source.weight_files:
        with safe_open(path, framework="pt") as file:
            tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return tensors


def _size_said(
    tensors: Mapping[str, torch.Tensor | PackedTensor],
    packing: Packing,
    dtype: torch.dtype,
    name: str,
) -> str:
    """Return the stage's name with the memory; raises ModelError if that is more than is free."""
    packed = [tensor for tensor in tensors.values() if isinstance(tensor, PackedTensor)]
    num_bytes = sum(tensor.num_bytes for tensor in packed)
    if num_bytes > free_bytes(torch.device("cpu")):
        raise ModelError(
            f"The {packing.title} weights of {name} take {num_bytes >> 20:,} MiB unpacked, more "
            "than is free.",
            "Use a smaller model.",
        )
    return f"unpacking {packing.title} to {dtype_name(dtype)}, {num_bytes >> 20:,} MiB"


# What transformers reports of the weights that it has read


def refuse_gaps(source: ModelSource, report: dict[str, Any]) -> None:
    """Raise ModelError for missing tensors, which transformers would initialise at random."""
    gaps = sorted(report["missing_keys"]) + sorted(key[0] for key in report["mismatched_keys"])
    if gaps:
        raise ModelError(
            f"{source.name} lacks {len(gaps)} of its model's tensors, {gaps[0]} for one, or has "
            "them in other shapes.",
            "Is the download complete, and does config.json belong to these weights?",
        )


def leftovers(source: ModelSource, unexpected: Collection[str]) -> tuple[str, ...]:
    """Return a note on tensors that the model does not use, if there are any.

    transformers has already removed those that the model class declares as expected.
    """
    if not unexpected:
        return ()
    return (
        f"{source.name} has {len(unexpected)} tensors its model does not use, {min(unexpected)} "
        "for one. Where answers are poor, config.json may not belong to these weights.",
    )
