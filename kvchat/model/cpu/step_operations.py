"""StepOperations: collects the operations of a step's program, and the memory that they work in.

Block weights are multiplied with rounded activations; rounding is an operation more. The products
of a mixture's experts are for pairs of a row and an expert (`kvchat_kernels.cpu.experts`).

StepScores adds those that say how much the rows attend to each slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvchat.model.decoder.matrices import LowRank, Matrix, Norm
from kvchat_kernels.cpu import attention_kernels, experts, gates, norms, products
from kvchat_kernels.cpu.attention_task import (
    AttentionForm,
    AttentionTask,
    ScoresRecord,
    SlotScoresTask,
)
from kvchat_kernels.cpu.code import LANES, Kernel, OfTask
from kvchat_kernels.cpu.delta import OrderingTask, ordering_kernel
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.matrix_products import Product, block_product, float_product, rounding
from kvchat_kernels.cpu.norms import NormForm, NormTask
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.step import MAX_ROWS, NUM_HEADERS, set_num_rows
from kvchat_kernels.cpu.task import Numbers, Task
from kvchat_kernels.cpu.tile_products import can_use_tiles
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, Rounding
from kvchat_kernels.linear.rows import Rows, starts_columns

_CACHE_LINE = 64


class Unfit(Exception):
    """A model whose sizes no kernel takes; says why, as words after "it"."""


def check_widths(*widths: int) -> None:
    """Raise Unfit for widths that vectors do not fill."""
    if any(width % LANES for width in widths):
        raise Unfit(f"has sizes that are no multiples of {LANES}")


def floats(width: int, num_rows: int = MAX_ROWS) -> torch.Tensor:
    """Return zeros, [num_rows, width] float32; what no step writes to takes no memory.

    The dtype is said wherever memory is made: loading a model on another thread changes torch's
    default for the whole process, and kernels wrote beyond memory of 16 bits.
    """
    return _zeros(num_rows, width, np.float32)


def _zeros(num_rows: int, width: int, kind: Any) -> torch.Tensor:
    """Return zeros as numpy makes them, of pages that the system gives at the first write.

    torch writes them. Most steps have few of MAX_ROWS rows: pairs of 8 experts with 2,048 columns
    took 30 MiB that no decode step needs.
    """
    num_bytes = num_rows * width * np.dtype(kind).itemsize
    # Tiles read up to a line behind a row.
    memory = np.zeros(num_bytes + 2 * _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    numbers = memory[start : start + num_bytes].view(kind)
    return torch.from_numpy(numbers.reshape(num_rows, width))


@dataclass(frozen=True, slots=True)
class RoundedForm:
    """How activations are rounded, and whether many rows lie as tiles read them."""

    rounding: Rounding
    is_tiled: bool


class Activations:
    """Floats [rows, width], and the same rounded where block weights read them."""

    def __init__(self, width: int, num_rows: int) -> None:
        self.floats = floats(width, num_rows)
        self._rounded: dict[RoundedForm, Rows] = {}

    def rounded(self, form: RoundedForm) -> Rows:
        rows = self._rounded.get(form)
        if rows is None:
            num_rows, width = self.floats.shape
            rows = self._rounded[form] = _zero_rows(num_rows, width, form.rounding)
        return rows


def _zero_rows(num_rows: int, width: int, rounding: Rounding) -> Rows:
    parts, num_blocks = rounding.num_parts, width // COLUMNS
    levels = _zeros(num_rows, width * parts, np.int16 if rounding is Rounding.SHORT else np.int8)
    scales, sums = (floats(num_blocks, num_rows) for _ in range(2))
    starts = _zeros(num_rows, width // starts_columns(rounding), np.int32)
    return Rows(rounding, levels.view(num_rows, parts, width), scales, sums, starts)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rows of a step, each with `top_k` of `num_experts`, which a kernel chooses.

    header       as a step's, of as many rows as there are pairs
    groups       int64 [experts that may be chosen, NUM_HEADERS], see `experts.Group`
    num_groups   int64 [1]
    """

    top_k: int
    num_experts: int
    header: Numbers
    groups: torch.Tensor
    num_groups: torch.Tensor


@dataclass(frozen=True, slots=True)
class _PairUnits:
    """Units of an operation: `each` for each pair, and for at most `most` pairs."""

    index: int
    top_k: int
    most: int
    each: int


class StepOperations:
    """Operations in the order in which they are added, and the memory that they share.

    header, head_header         of the layers, and of the rows that logits are wanted of
    of_rows, of_picked, of_head   operations with as many units as rows, as wanted rows, and as
                                their matrix has if any row is wanted
    of_sequences                those with so many units for each sequence
    of_states                   those of them that change states
    """

    def __init__(self) -> None:
        self.header, self.head_header = np.zeros((2, NUM_HEADERS), np.int64)
        self.all: list[Operation] = []
        self.of_rows: list[int] = []
        self.of_picked: list[int] = []
        self.of_head: list[int] = []
        self.of_sequences: dict[int, int] = {}
        self.of_states: list[int] = []
        self._of_pairs: list[_PairUnits] = []
        self._pairs: dict[tuple[int, int], Pairs] = {}
        self._inputs: dict[tuple[str, int, int], Activations] = {}
        self._outputs: dict[tuple[str, int, int], torch.Tensor] = {}

    def input(self, name: str, width: int, num_rows: int = MAX_ROWS) -> Activations:
        """Return activations that all operations share which ask for them by this name."""
        key = (name, width, num_rows)
        activations = self._inputs.get(key)
        if activations is None:
            activations = self._inputs[key] = Activations(width, num_rows)
        return activations

    def output(self, name: str, width: int, num_rows: int = MAX_ROWS) -> torch.Tensor:
        """Return memory for outputs, shared in the same way."""
        key = (name, width, num_rows)
        memory = self._outputs.get(key)
        if memory is None:
            memory = self._outputs[key] = floats(width, num_rows)
        return memory

    def pairs(self, top_k: int, num_experts: int) -> Pairs:
        """Return the pairs of mixtures of this size: one mixture of a step uses them at a time."""
        pairs = self._pairs.get((top_k, num_experts))
        if pairs is None:
            most = min(num_experts, MAX_ROWS * top_k)
            pairs = self._pairs[top_k, num_experts] = Pairs(
                top_k,
                num_experts,
                np.zeros(NUM_HEADERS, np.int64),
                torch.zeros(most, NUM_HEADERS, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
            )
        return pairs

    @property
    def has_pairs(self) -> bool:
        """Whether the program has a mixture of experts."""
        return bool(self._of_pairs)

    def set_pairs(self, units: Numbers, num_rows: int) -> None:
        """Write what depends on the number of pairs, for a step of `num_rows`."""
        for pairs in self._pairs.values():
            set_num_rows(pairs.header, num_rows * pairs.top_k, pairs.num_experts)
        for units_of in self._of_pairs:
            units[units_of.index] = min(num_rows * units_of.top_k, units_of.most) * units_of.each

    def add(
        self,
        kernel: Kernel[OfTask],
        task: OfTask,
        num_units: int | None,
        *,
        header: Any = None,
        waits: bool = True,
    ) -> None:
        """Add an operation; without `num_units` it has as many as rows."""
        is_head = header is self.head_header
        index = len(self.all)
        if num_units is None:
            (self.of_picked if is_head else self.of_rows).append(index)
        elif is_head:
            self.of_head.append(index)
        header = self.header if header is None else header
        self.all.append(Operation(kernel, task, header, num_units, waits))

    def add_of_sequences(
        self, kernel: Kernel[OfTask], task: OfTask, each: int, *, changes_state: bool = True
    ) -> None:
        """Add an operation with `each` units for each sequence, in order of the sequences."""
        self.of_sequences[len(self.all)] = each
        if changes_state:
            self.of_states.append(len(self.all))
        self.all.append(Operation(kernel, task, self.header, 0))

    def add_of_pairs(
        self,
        kernel: Kernel[OfTask],
        task: OfTask,
        pairs: Pairs,
        *,
        most: int | None = None,
        each: int = 1,
        waits: bool = True,
    ) -> None:
        """Add an operation with `each` units for each pair, but for at most `most` pairs."""
        most = MAX_ROWS * pairs.top_k if most is None else most
        self._of_pairs.append(_PairUnits(len(self.all), pairs.top_k, most, each))
        self.all.append(Operation(kernel, task, pairs.header, 0, waits))

    def products(
        self,
        matrices: Sequence[Matrix],
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        header: Any = None,
        pairs: Pairs | None = None,
    ) -> list[Task]:
        """Multiply `values`, rounded into `source`; outputs lie side by side in `out`.

        With `pairs`, rows are those of pairs, and each is multiplied with its expert's rows of the
        matrices. Returns the tasks, one a matrix.
        """
        weights = (matrix.weights for matrix in matrices)
        blocks = [
            each for each in weights if isinstance(each, BlockWeights) and not each.are_floats
        ]
        # Rows of a pair's expert are few, or many of few pairs.
        can_be_tiled = pairs is None
        for form in dict.fromkeys(_form_of(weights, can_be_tiled) for weights in blocks):
            self._round(source, form, values, header, pairs)
        tasks, start = [], 0
        for matrix in matrices:
            if matrix.num_in != values.shape[1]:
                raise Unfit("has matrices of other widths")
            part, waits = out[:, start:], start == 0
            num_out = matrix.num_out if pairs is None else matrix.num_out // pairs.num_experts
            product = _product(matrix, num_out, source, values, part, can_be_tiled=can_be_tiled)
            tasks.append(product.task)
            if pairs is None:
                units = product.num_units
                self.add(product.kernel, product.task, units, header=header, waits=waits)
            else:
                self._add_group(product, pairs, waits)
            start += num_out
        self._multiply_factors(matrices, out, is_plain=header is None and pairs is None)
        return tasks

    def low_rank(
        self, matrix: LowRank, source: Activations, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Multiply `values` with two matrices, one after the other."""
        short = self.input("low rank", matrix.first.num_out)
        self.products((matrix.first,), source, values, short.floats)
        self.products((matrix.second,), short, short.floats, out)

    def add_adapters(
        self,
        adapters: Sequence[LowRank],
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Add to `out` what adapters, whose outputs lie side by side, make of `values`."""
        if not adapters:
            return
        addend, start = self.output("of adapters", out.shape[1]), 0
        for adapter in adapters:
            self.low_rank(adapter, source, values, addend[:, start:])
            start += adapter.num_out
        if start != out.shape[1]:
            raise Unfit("has adapters of another form")
        self.add_to(out, addend)

    def add_to(self, out: torch.Tensor, addend: torch.Tensor) -> None:
        """Add rows to others of the same width."""
        task = NormTask(stream=out, addend=addend, width=out.shape[1])
        self.add(norms.norm_kernel(NormForm(adds=True, norms=False)), task, None)

    def norm_rows(self, norm: Norm, x: torch.Tensor, out: torch.Tensor) -> None:
        """Norm rows into others of the same width, which may be the same."""
        task = NormTask(
            stream=x,
            width=x.shape[1],
            weight=norm.weight,
            out=out,
            bias=norm.bias,
            epsilon=norm.epsilon,
        )
        form = NormForm(adds=False, centres=norm.bias is not None)
        self.add(norms.norm_kernel(form), task, None)

    def reorder(self, x: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers of rows that `order` names, int32, to the beginnings of others."""
        task = OrderingTask(
            x=x,
            x_stride=x.stride(0) * 4,
            source=order,
            width=len(order),
            out=out,
            out_stride=out.stride(0) * 4,
        )
        self.add(ordering_kernel(), task, None)

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write rows to the beginnings of others."""
        self.reorder(x, torch.arange(x.shape[1], dtype=torch.int32), out)

    def _multiply_factors(
        self, matrices: Sequence[Matrix], out: torch.Tensor, is_plain: bool
    ) -> None:
        """Add what multiplies the outputs of some of the matrices, which lie side by side."""
        start = 0
        for matrix in matrices:
            if matrix.factors is not None:
                if not is_plain:
                    raise Unfit("has factors where no kernel takes them")
                task = gates.FactorsTask(
                    x=out[:, start:],
                    stride=out.stride(0) * 4,
                    factors=matrix.factors,
                    width=matrix.num_out,
                )
                self.add(gates.factors_kernel(), task, None)
            start += matrix.num_out

    def _round(
        self,
        source: Activations,
        form: RoundedForm,
        values: torch.Tensor,
        header: Any,
        pairs: Pairs | None,
    ) -> None:
        kernel, task = rounding(values, source.rounded(form), is_tiled=form.is_tiled)
        if pairs is None:
            self.add(kernel, task, None, header=header)
        else:
            self.add_of_pairs(kernel, task, pairs)

    def _add_group(self, product: Product, pairs: Pairs, waits: bool) -> None:
        """Add a product, which is that of the expert 0, for each expert that is chosen."""
        task = experts.group_task(product, pairs.num_experts, pairs.groups, pairs.num_groups)
        kernel, most = experts.group_kernel(len(product.task.numbers)), len(pairs.groups)
        self.add_of_pairs(kernel, task, pairs, most=most, each=product.num_units, waits=waits)


def _form_of(weights: BlockWeights, can_be_tiled: bool) -> RoundedForm:
    is_tiled = can_be_tiled and can_use_tiles(weights.layout, weights.num_in)
    return RoundedForm(weights.layout.rounding, is_tiled)


def _product(
    matrix: Matrix,
    num_out: int,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    can_be_tiled: bool,
) -> Product:
    """Return the product with `num_out` rows of a matrix."""
    weights, bias = matrix.weights, matrix.bias
    if isinstance(weights, BlockWeights) and not weights.are_floats:
        form = _form_of(weights, can_be_tiled)
        x, is_tiled = source.rounded(form), form.is_tiled
        return block_product(weights, x, out, bias=bias, num_out=num_out, is_tiled=is_tiled)
    if isinstance(weights, BlockWeights):
        return float_product(weights, values, out, bias=bias, num_out=num_out)
    if stored_as(weights.dtype) is None or matrix.num_in % products.COLUMNS:
        raise Unfit(f"has {matrix.num_in} columns of {weights.dtype}")
    return float_product(weights, values, out, bias=bias, num_out=num_out)


class StepScores:
    """Owns the record of the layers that are scored: `first_heads` has the place of each among the
    heads of all, by the name of its module.
    """

    def __init__(self, operations: StepOperations, first_heads: Mapping[str, int]) -> None:
        self.record = np.zeros(len(ScoresRecord), np.int64)
        self._operations = operations
        self._first_heads = first_heads

    def add(self, name: str, form: AttentionForm, task: AttentionTask) -> int | None:
        """Score a layer whose parts are attended: return the number of the operation that has as
        many units as attention; None for a layer that is not scored.
        """
        first_head = self._first_heads.get(name)
        if first_head is None:
            return None
        scored = SlotScoresTask(
            **dict(task.items()),
            slot_scores=self.record,
            first_head=first_head,
            totals=self._operations.output("totals of weights", 2 * form.num_heads),
        )
        self._operations.add(attention_kernels.totals_kernel(form), scored, None)
        self._operations.add(attention_kernels.slot_scores_kernel(form), scored, 0)
        return len(self._operations.all) - 1
