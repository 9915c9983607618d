"""The tensors of a GGUF file under transformers' names, unpacked to one dtype or in their blocks.

A tensor whose file has the wanted dtype stays mapped. Those of linear layers and of experts may
stay in blocks, for the products of `kvchat_kernels.linear`. The others are unpacked a few rows at a
time into the one copy that the model then uses, so that the memory needed is the model's own size
and a little. Formats that have a layout there are unpacked by its compiled code, the others in
numpy by the package gguf; both give exactly the numbers that llama.cpp defines.
"""

import mmap
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.core.text import format_bytes
from kvchat.model.device import dtype_name, free_bytes
from kvchat.model.gguf.architectures import Architecture
from kvchat.model.gguf.file import GgufModel, GgufTensor
from kvchat.model.gguf.forms import GENERAL, Form, forms_of
from kvchat.model.gguf.grid_blocks import GRID_FORMATS, grid_bytes, read_grids
from kvchat_kernels.linear.blocks import (
    BlockWeights,
    can_move_columns,
    joined,
    reordered,
    with_columns,
)
from kvchat_kernels.linear.cpu import read_blocks, unpack
from kvchat_kernels.linear.gguf_blocks import (
    BLOCK_FORMATS,
    block_weights,
    held_bytes,
)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A chunk of this many elements is unpacked at once. numpy takes about 20 bytes for each.
_CHUNK_ELEMENTS = 1 << 19
_LAYER_NUMBER = re.compile(r"layers\.(\d+)\.")


def natural_dtype(gguf: GgufModel) -> torch.dtype:
    """Return the dtype of most weights: blocks are unpacked to bfloat16.

    bfloat16 also for float16 in Gemma's families, whose activations exceed float16's range.
    """
    sizes: dict[torch.dtype, int] = {}
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            dtype = _PLAIN.get(kind_name(tensor), torch.bfloat16)
            sizes[dtype] = sizes.get(dtype, 0) + prod(tensor.shape)
    dtype = max(sizes, key=sizes.__getitem__, default=torch.bfloat16)
    is_gemma = gguf.architecture.startswith("gemma")
    return torch.bfloat16 if is_gemma and dtype == torch.float16 else dtype


def kind_name(tensor: GgufTensor) -> str:
    """Return the block format's name, such as Q4_K."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(tensor.kind).name


def block_formats(gguf: GgufModel) -> str:
    """Return the names of the matrices' formats, that of the most bytes first."""
    return ", ".join(_sizes_of_formats(gguf))


def bits_of_formats(gguf: GgufModel) -> str:
    """Return the same with the bits that a weight of each takes, and those of all together."""
    sizes = _sizes_of_formats(gguf)
    each = [f"{name} {8 * size / count:.4g}" for name, (size, count) in sizes.items()]
    size, count = (sum(numbers) for numbers in zip(*sizes.values(), strict=True))
    return f"{', '.join(each)}; together {8 * size / count:.3g} bits a weight"


def _sizes_of_formats(gguf: GgufModel) -> dict[str, tuple[int, int]]:
    """Return the bytes and the weights of the matrices in each format, the most bytes first."""
    sizes: dict[str, tuple[int, int]] = {}
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            size, count = sizes.get(kind_name(tensor), (0, 0))
            sizes[kind_name(tensor)] = size + tensor.num_bytes, count + prod(tensor.shape)
    return dict(sorted(sizes.items(), key=lambda item: item[1][0], reverse=True))


def stage_of(gguf: GgufModel, dtype: torch.dtype, keeps_blocks: bool) -> str:
    """Return what loading does, in words, with the memory that it takes."""
    size = unpacked_bytes(gguf, dtype)
    if not size:
        return "loading weights"
    if keeps_blocks:
        return f"loading weights in blocks of {block_formats(gguf)}"
    return f"unpacking {block_formats(gguf)} to {format_bytes(size)} of {dtype_name(dtype)}"


def unpacked_bytes(gguf: GgufModel, dtype: torch.dtype) -> int:
    """Return the bytes of memory that unpacking takes; tensors that stay mapped take none."""
    return sum(
        prod(tensor.shape) * dtype.itemsize
        for tensor in gguf.tensors.values()
        if _PLAIN.get(kind_name(tensor)) != dtype
    )


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """A module's tensors by name, and those that stay in blocks.

    A tensor that stays in blocks is in `tensors` too, as zeros that take no memory. `blocks` are
    the matrices of each: one, or those of experts, [experts * rows, in], gate before up, or some,
    one below the other, and `orders` has where each row of the tensor is in them. `precise` are
    norms, biases, filters of convolutions and other small tensors in float32, where `tensors` has
    fewer bits.
    """

    tensors: dict[str, torch.Tensor]
    blocks: dict[str, tuple[BlockWeights, ...]]
    precise: dict[str, torch.Tensor] = field(default_factory=dict)
    orders: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a tensor of the module is made from: the file's tensors, and their form if not plain.

    A tensor of one number may be in the metadata instead: `number`.
    """

    parts: list[GgufTensor]
    form: Form | None = None
    number: float | None = None

    def fits_blocks(self, shape: torch.Size, config: Any, for_cpu: bool) -> bool:
        """Whether the file's rows are those of a tensor of this shape, in blocks we have.

        Where they are those of several tensors, one matrix is made of them if all have one format.
        """
        form, parts = self.form, self.parts
        known = BLOCK_FORMATS | GRID_FORMATS
        if self.number is not None or any(kind_name(p) not in known for p in parts):
            return False
        if form is not None and form.are_experts:
            if len(shape) != 3 or any(len(part.shape) != 3 for part in parts):
                return False
            num_out, num_in = (shape[2], shape[1]) if form.is_turned else (shape[1], shape[2])
            sides = {(part.shape[0], part.shape[2]) for part in parts}
            return sum(part.shape[1] for part in parts) == num_out and sides == {(shape[0], num_in)}
        own = tuple(reversed(shape)) if form is not None and form.is_turned else tuple(shape)
        if form is None or form.order is None:
            are_rows = len(parts) == 1 and parts[0].shape == own
        else:
            are_rows = len({part.kind for part in parts}) == 1 or (form.may_differ and for_cpu)
            are_rows = are_rows and len({part.shape[1:] for part in parts}) == 1
            are_rows = are_rows and sum(part.shape[0] for part in parts) == own[0]
        if form is not None and form.columns is not None:
            are_rows = are_rows and can_move_columns(form.columns(own[-1], config))
        is_plain = form is None or (form.places is None and form.make is None)
        return is_plain and are_rows and len(own) == 2 and parts[0].shape[1:] == own[1:]


@dataclass(frozen=True)
class GgufPlan:
    """What a module with state of these `shapes` takes from a GGUF file, on the CPU.

    dtype       that of what does not stay in blocks
    wanted      names of tensors that may stay in blocks: those of a group all or none, as the
                tensors of a layer's experts must
    tied_head   the head whose weights are the table of embeddings: it multiplies with the table's
                blocks; None for another
    for_cpu     interleaved where that is possible, as products on a CPU have them
    """

    gguf: GgufModel
    architecture: Architecture
    config: Any
    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype
    wanted: Collection[tuple[str, ...]]
    tied_head: str | None
    for_cpu: bool

    def read(self, tick: Callable[[float], None]) -> GgufTensors:
        """Return the tensors; one that the file lacks is left out.

        Raises ModelError if memory is too small, and ModelUnsupported for a block format that
        cannot be unpacked.
        """
        dtype, sources, free = self.dtype, self._sources, free_bytes(torch.device("cpu"))
        if self._needed_bytes > free:
            form = "" if self.kept else f" as {dtype_name(dtype)}"
            raise ModelError(
                f"The weights take {format_bytes(self._needed_bytes)} of memory{form}, and "
                f"{format_bytes(free)} are free.",
                "Use a smaller model.",
            )
        done, total = 0, sum(t.num_bytes for found in sources.values() for t in found.parts) or 1
        state: dict[str, torch.Tensor] = {}
        precise: dict[str, torch.Tensor] = {}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            reader, in_full = (_Reader(self, each, pool) for each in (dtype, torch.float32))
            for name, source in sources.items():
                shape = self.shapes[name]
                is_small = _is_small(name, shape) and dtype != torch.float32
                tensor = (in_full if is_small else reader).read(name, source, shape)
                if tensor.shape != shape and tensor.numel() == prod(shape):
                    tensor = tensor.reshape(shape)
                if is_small:
                    precise[name] = tensor.clone()  # not the mapped file, which may change
                state[name] = tensor.to(dtype)
                done += sum(part.num_bytes for part in source.parts)
                tick(done / total)
        if self._table is not None and self.tied_head is not None:
            reader.keep_again(self.tied_head, self._table)
        return GgufTensors(state, reader.blocks, precise, reader.orders)

    def memory_bytes(self) -> int:
        """Return the bytes of memory of what `read` returns, mapped tensors included."""
        parts = [part for source in self._sources.values() for part in source.parts]
        mapped = sum(part.num_bytes for part in parts if _PLAIN.get(kind_name(part)) == self.dtype)
        known = {part.name for name in self.kept for part in self._sources[name].parts}
        table = self._table
        of_head = 0
        if table is not None and table.name not in known:
            of_head = _held_bytes(table, None, self.config, self.for_cpu)
        return self._needed_bytes + mapped + of_head

    @cached_property
    def _table(self) -> GgufTensor | None:
        """The table of embeddings, if the head multiplies with its blocks; else None."""
        head, table = self.tied_head, self.gguf.tensors.get("token_embd.weight")
        if head is None or (head,) not in self.wanted or head in self._sources or table is None:
            return None
        fits = _Source([table]).fits_blocks(self.shapes[head], self.config, self.for_cpu)
        return table if fits else None

    @cached_property
    def kept(self) -> frozenset[str]:
        """The names of the tensors that stay in blocks, of groups that can do so as a whole."""
        names = {name for group in self.wanted for name in group if name in self._sources}
        fitting = {
            name
            for name in names
            if self._sources[name].fits_blocks(self.shapes[name], self.config, self.for_cpu)
        }
        return frozenset(
            name for group in self.wanted if fitting.issuperset(group) for name in group
        )

    @cached_property
    def _needed_bytes(self) -> int:
        """The bytes of memory that reading takes; tensors that stay mapped take none."""
        needed = 0
        for name, source in self._sources.items():
            for part in source.parts:
                if name in self.kept:
                    needed += _held_bytes(part, source.form, self.config, self.for_cpu)
                elif _PLAIN.get(kind_name(part)) != self.dtype:
                    needed += prod(part.shape) * self.dtype.itemsize
        return needed

    @cached_property
    def _sources(self) -> dict[str, _Source]:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        gguf, architecture = self.gguf, self.architecture
        archs = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
        names = get_tensor_name_map(archs[gguf.architecture], gguf.get("block_count"))
        found = {}
        for name in self.shapes:
            number = _listed(name, architecture, gguf)
            if number is not None:
                found[name] = _Source([], number=number)
                continue
            form = next(forms_of(name, (*architecture.forms, *GENERAL), gguf.tensors), None)
            if form is not None:
                found[name] = _Source([gguf.tensors[stored] for stored in form.names(name)], form)
                continue
            known = names.get_name(
                re.sub("^model[.]", architecture.prefix, name), try_suffixes=(".weight", ".bias")
            )
            # Parameters without ".weight" in their name have it in files, or their own there.
            stored = (each for each in (known, f"{known}.weight", name) if each in gguf.tensors)
            if (first := next(stored, None)) is not None:
                found[name] = _Source([gguf.tensors[first]])
        return found


def _is_small(name: str, shape: torch.Size) -> bool:
    """Whether a tensor is one row, such as a norm, a convolution by channels, or Mamba's decays."""
    is_by_channels = len(shape) == 3 and shape[1] == 1
    return len(shape) == 1 or is_by_channels or name.endswith(".A_log")


def _held_bytes(tensor: GgufTensor, form: Form | None, config: Any, for_cpu: bool) -> int:
    """Return the bytes of memory of a tensor that stays in blocks."""
    name, num_bytes = kind_name(tensor), tensor.num_bytes
    is_grid, moves_columns = name in GRID_FORMATS, form is not None and form.columns is not None
    if not moves_columns and (for_cpu or not is_grid):
        return grid_bytes(num_bytes, name) if is_grid else held_bytes(num_bytes, name)
    num_rows = prod(tensor.shape[:-1])  # which are alike: one is read
    row = torch.zeros(1, num_bytes // num_rows, dtype=torch.uint8)
    read = block_weights(row, name)
    if read is None:
        with ThreadPoolExecutor(1) as pool:
            read = read_grids(row, name, pool, is_interleaved=False, in_codes=not for_cpu)
    if form is not None and form.columns is not None:
        read = with_columns(read, form.columns(tensor.shape[-1], config))
    return read.num_bytes * num_rows


def _listed(name: str, architecture: Architecture, gguf: GgufModel) -> float | None:
    """Return the number that metadata list for a tensor's layer; None for other tensors."""
    key = next((key for end, key in architecture.listed.items() if name.endswith(end)), None)
    layer = _LAYER_NUMBER.search(name)
    if key is None or layer is None:
        return None
    values: Any = gguf.metadata.get(key)
    index = int(layer[1])
    if not hasattr(values, "__len__"):
        return None if values is None else float(values)
    if index >= len(values):
        raise ModelError(f"{key} in the metadata has too few numbers.", "Is the file complete?")
    return float(values[index])


class _Reader:
    """Reads tensors of GGUF files in one dtype, or in their blocks. Keeps the files mapped."""

    def __init__(self, plan: GgufPlan, dtype: torch.dtype, pool: Any) -> None:
        self.blocks: dict[str, tuple[BlockWeights, ...]] = {}
        self.orders: dict[str, torch.Tensor] = {}
        self._kept_as: dict[str, str] = {}
        self._plan = plan
        self._dtype = dtype
        self._config = plan.config
        self._pool = pool
        self._files: dict[Path, mmap.mmap] = {}
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}

    def read(self, name: str, source: _Source, shape: torch.Size) -> torch.Tensor:
        """Return a tensor as the module has it; of the same size, if not of the same shape."""
        if source.number is not None:
            return torch.full(shape, source.number, dtype=self._dtype)
        form = source.form
        if name in self._plan.kept:
            self.keep(name, source.parts, form)
            return torch.zeros((), dtype=self._dtype).expand(shape)
        if form is None:
            return self._plain(source.parts[0])
        if form.places is not None:
            return self._placed(form.places, source.parts, shape)
        if form.make is not None:
            parts = [self._unpacked(part, torch.float32) for part in source.parts]
            return form.made(name, parts, self._config).to(self._dtype).contiguous()
        parts = [self._unpacked(part, self._dtype) for part in source.parts]
        if form.order is not None:
            rows = torch.cat(parts)
            return rows[form.order(len(rows), self._config)]
        if form.columns is not None:
            return parts[0][:, form.columns(parts[0].shape[1], self._config)].contiguous()
        return parts[0].t().contiguous() if form.is_turned else parts[0]

    def keep(self, name: str, parts: list[GgufTensor], form: Form | None = None) -> None:
        """Keep tensors in blocks that `fits_blocks` allows."""
        moves_columns = form is not None and form.columns is not None
        is_interleaved = self._plan.for_cpu and not moves_columns
        matrices = tuple(self._in_blocks(part, is_interleaved) for part in parts)
        if form is not None and form.order is not None:
            order = form.order(sum(matrix.num_out for matrix in matrices), self._config)
            if len({part.kind for part in parts}) == 1:
                matrices = (reordered(joined(matrices), order),)
            else:
                self.orders[name] = order
        if form is not None and form.columns is not None:
            order = form.columns(matrices[0].num_in, self._config)
            matrices = (with_columns(matrices[0], order),)
        self.blocks[name] = matrices
        if form is None:
            self._kept_as[parts[0].name] = name

    def keep_again(self, name: str, part: GgufTensor) -> None:
        """Keep a tensor by another name too; it is held once."""
        known = self._kept_as.get(part.name)
        if known is None:
            self.keep(name, [part])
        else:
            self.blocks[name] = self.blocks[known]

    def _placed(self, places: Any, parts: list[GgufTensor], shape: torch.Size) -> torch.Tensor:
        """Return a tensor whose views hold the parts, without a further copy of it."""
        out = torch.empty(shape, dtype=self._dtype)
        for place, part in zip(places(out, self._config), parts, strict=True):
            if place.shape != part.shape:
                raise ModelError(f"{part.name} has another shape than its model's.")
            place.copy_(self._unpacked(part, self._dtype))
        return out

    def _plain(self, tensor: GgufTensor) -> torch.Tensor:
        is_norm = tensor.name.endswith("norm.weight") and ".ssm_norm." not in tensor.name
        if (offset := self._plan.architecture.norm_offset) and is_norm:
            return (self._unpacked(tensor, torch.float32) - offset).to(self._dtype)
        return self._unpacked(tensor, self._dtype)

    def _in_blocks(self, tensor: GgufTensor, is_interleaved: bool) -> BlockWeights:
        """Return a matrix, or the matrices of all experts as one."""
        rows = torch.from_numpy(self._stored(tensor)).view(prod(tensor.shape[:-1]), -1)
        name = kind_name(tensor)
        if name in GRID_FORMATS:
            read = read_grids(rows, name, self._pool, is_interleaved, not self._plan.for_cpu)
        else:
            let_go = partial(self._let_go, tensor)
            read = read_blocks(rows, name, is_interleaved, let_go)
        self._let_go(tensor)
        return read

    def _stored(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        return self._map(tensor.path)[tensor.start : tensor.start + tensor.num_bytes]

    def _unpacked(self, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
        blocks = self._stored(tensor)
        plain = _PLAIN.get(kind_name(tensor))
        if plain is not None:
            return torch.from_numpy(blocks).view(plain).view(tensor.shape).to(dtype)
        out = torch.empty(tensor.shape, dtype=dtype)
        rows = blocks.reshape(prod(tensor.shape[:-1]), -1)
        targets = out.view(len(rows), -1)
        step = max(1, _CHUNK_ELEMENTS // max(1, tensor.shape[-1]))
        spans = [slice(at, at + step) for at in range(0, len(rows), step)]
        if kind_name(tensor) in BLOCK_FORMATS:  # compiled code, on torch's threads
            for span in spans:
                read = read_blocks(torch.from_numpy(rows[span]), kind_name(tensor))
                unpack(read, targets[span])
                self._let_go(tensor, min(span.stop, len(rows)))
            return out
        for _ in self._pool.map(lambda span: _unpack(rows[span], tensor, targets[span]), spans):
            pass
        return out

    def _map(self, path: Path) -> np.ndarray[Any, Any]:
        if path not in self._maps:
            # Copy on write: torch wants memory it may write to, and the file must not change.
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._files[path] = content
            self._maps[path] = np.frombuffer(content, np.uint8)
        return self._maps[path]

    def _let_go(self, tensor: GgufTensor, num_rows: int | None = None) -> None:
        """Let the system take back the pages that hold nothing else than the first rows, or all.

        Else the process holds the file and its copy. A later read loads the page again.
        """
        all_rows = prod(tensor.shape[:-1])
        num_bytes = tensor.num_bytes * (all_rows if num_rows is None else num_rows) // all_rows
        first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (tensor.start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._files[tensor.path].madvise(mmap.MADV_DONTNEED, first, last - first)


def _unpack(blocks: np.ndarray[Any, Any], tensor: GgufTensor, out: torch.Tensor) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(blocks, GGMLQuantizationType(tensor.kind))
    except NotImplementedError as error:
        raise ModelUnsupported(
            f"{tensor.name} is in the block format {kind_name(tensor)}, which cannot be unpacked.",
            "Use a file in another format, such as Q4_K_M or Q8_0.",
        ) from error
    out.copy_(torch.from_numpy(values))
