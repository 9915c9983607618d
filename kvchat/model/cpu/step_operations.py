"""StepOperations: collects the operations of a step's program, and the memory that they work in.

Block weights are multiplied with rounded activations; rounding is an operation more. The products
of a mixture's experts are for pairs of a row and an expert (`kvchat_kernels.cpu.experts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvchat.model.decoder.matrices import Matrix
from kvchat_kernels.cpu import block_products, block_rows, experts, gates, products, tile_products
from kvchat_kernels.cpu.code import LANES, Kernel
from kvchat_kernels.cpu.maths import stored_as
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.step import MAX_ROWS, NUM_HEADERS, Header
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, Rounding

_NUM_PLACES = 24
_CACHE_LINE = 64
# What a product's task has a row of for each row of activations; the rest is of weights.
_OF_PAIRS = frozenset({"X", "X_SCALES", "X_SUMS", "X_STARTS", "OUT"})

Numbers = np.ndarray[Any, Any]
Task = dict[Any, Any]


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
    memory = np.zeros(num_bytes + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    numbers = memory[start : start + num_bytes].view(kind)
    return torch.from_numpy(numbers.reshape(num_rows, width))


@dataclass(frozen=True, slots=True)
class RoundedForm:
    """How activations are rounded, and whether many rows lie as tiles read them."""

    rounding: Rounding
    is_tiled: bool


class Rounded:
    """Activations [rows, width] as the kernels of block weights read them.

    `levels` are [rows, parts * width]: of two bytes all high ones lie before all low ones.
    """

    def __init__(self, width: int, rounding: Rounding, num_rows: int) -> None:
        kind = np.int16 if rounding is Rounding.SHORT else np.int8
        self.levels = _zeros(num_rows, width * rounding.num_parts, kind)
        self.scales, self.sums = (floats(width // COLUMNS, num_rows) for _ in range(2))
        self.starts = _zeros(num_rows, width // COLUMNS, np.int32)


class Activations:
    """Floats [rows, width], and the same rounded where block weights read them."""

    def __init__(self, width: int, num_rows: int) -> None:
        self.floats = floats(width, num_rows)
        self._rounded: dict[RoundedForm, Rounded] = {}

    def rounded(self, form: RoundedForm) -> Rounded:
        found = self._rounded.get(form)
        if found is None:
            num_rows, width = self.floats.shape
            found = self._rounded[form] = Rounded(width, form.rounding, num_rows)
        return found


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
    """Operations in the order in which they are added. Owns what their tasks have addresses of.

    header, head_header         of the layers, and of the rows that logits are wanted of
    of_rows, of_picked, of_head   operations with as many units as rows, as wanted rows, and as
                                their matrix has if any row is wanted
    of_sequences                those with so many units for each sequence
    """

    def __init__(self) -> None:
        self.header, self.head_header = np.zeros((2, NUM_HEADERS), np.int64)
        self.all: list[Operation] = []
        self.of_rows: list[int] = []
        self.of_picked: list[int] = []
        self.of_head: list[int] = []
        self.of_sequences: dict[int, int] = {}
        self._of_pairs: list[_PairUnits] = []
        self._pairs: dict[tuple[int, int], Pairs] = {}
        self._inputs: dict[tuple[str, int, int], Activations] = {}
        self._outputs: dict[tuple[str, int, int], torch.Tensor] = {}
        self._own: list[Any] = []

    def input(self, name: str, width: int, num_rows: int = MAX_ROWS) -> Activations:
        """Return activations that all operations share which ask for them by this name."""
        key = (name, width, num_rows)
        found = self._inputs.get(key)
        if found is None:
            found = self._inputs[key] = Activations(width, num_rows)
        return found

    def output(self, name: str, width: int, num_rows: int = MAX_ROWS) -> torch.Tensor:
        """Return memory for outputs, shared in the same way."""
        key = (name, width, num_rows)
        found = self._outputs.get(key)
        if found is None:
            found = self._outputs[key] = floats(width, num_rows)
        return found

    def pairs(self, top_k: int, num_experts: int) -> Pairs:
        """Return the pairs of mixtures of this size: one mixture of a step uses them at a time."""
        found = self._pairs.get((top_k, num_experts))
        if found is None:
            most = min(num_experts, MAX_ROWS * top_k)
            found = self._pairs[top_k, num_experts] = Pairs(
                top_k,
                num_experts,
                np.zeros(NUM_HEADERS, np.int64),
                torch.zeros(most, NUM_HEADERS, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
            )
        return found

    @property
    def has_pairs(self) -> bool:
        """Whether the program has a mixture of experts."""
        return bool(self._of_pairs)

    def set_pairs(self, units: Numbers, num_rows: int) -> None:
        """Write what depends on the number of pairs, for a step of `num_rows`."""
        for pairs in self._pairs.values():
            pairs.header[Header.NUM_ROWS] = num_rows * pairs.top_k
        for found in self._of_pairs:
            units[found.index] = min(num_rows * found.top_k, found.most) * found.each

    def add(
        self,
        kernel: Kernel,
        task: Task,
        num_units: int | None,
        *,
        header: Any = None,
        waits: bool = True,
    ) -> Numbers:
        """Add an operation; without `num_units` it has as many as rows. Returns its task."""
        numbers = self._numbers(task)
        is_head = header is self.head_header
        index = len(self.all)
        if num_units is None:
            (self.of_picked if is_head else self.of_rows).append(index)
        elif is_head:
            self.of_head.append(index)
        header = self.header if header is None else header
        self.all.append(Operation(kernel, numbers, header, num_units, waits))
        return numbers

    def add_of_sequences(self, kernel: Kernel, task: Task, each: int) -> None:
        """Add an operation with `each` units for each sequence, in order of the sequences."""
        self.of_sequences[len(self.all)] = each
        self.all.append(Operation(kernel, self._numbers(task), self.header, 0))

    def add_of_pairs(
        self,
        kernel: Kernel,
        task: Task,
        pairs: Pairs,
        *,
        most: int | None = None,
        each: int = 1,
        waits: bool = True,
    ) -> None:
        """Add an operation with `each` units for each pair, but for at most `most` pairs."""
        most = MAX_ROWS * pairs.top_k if most is None else most
        self._of_pairs.append(_PairUnits(len(self.all), pairs.top_k, most, each))
        self.all.append(Operation(kernel, self._numbers(task), pairs.header, 0, waits))

    def products(
        self,
        matrices: Sequence[Matrix],
        source: Activations,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        header: Any = None,
        pairs: Pairs | None = None,
    ) -> list[Numbers]:
        """Multiply `values`, rounded into `source`; outputs lie side by side in `out`.

        With `pairs`, rows are those of pairs, and each is multiplied with its expert's rows of the
        matrices. Returns the tasks, one a matrix.
        """
        blocks = [m.weights for m in matrices if isinstance(m.weights, BlockWeights)]
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
            kernel, task, num_units = _product(
                matrix, num_out, source, values, part, can_be_tiled=can_be_tiled
            )
            if pairs is None:
                tasks.append(self.add(kernel, task, num_units, header=header, waits=waits))
            else:
                tasks.append(self._add_group(kernel, task, num_units, pairs, waits))
            start += num_out
        self._multiply_factors(matrices, out, is_plain=header is None and pairs is None)
        return tasks

    def _multiply_factors(
        self, matrices: Sequence[Matrix], out: torch.Tensor, is_plain: bool
    ) -> None:
        """Add what multiplies the outputs of some of the matrices, which lie side by side."""
        place, start = gates.FactorPlace, 0
        for matrix in matrices:
            if matrix.factors is not None:
                if not is_plain:
                    raise Unfit("has factors where no kernel takes them")
                task: Task = {
                    place.X: out[:, start:],
                    place.STRIDE: out.stride(0) * 4,
                    place.FACTORS: matrix.factors,
                    place.WIDTH: matrix.num_out,
                }
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
        place, kernel = block_rows.Place, block_rows.rounding_kernel(form.rounding)
        if form.is_tiled:
            kernel = tile_products.tiled_rounding_kernel(form.rounding)
        rounded = source.rounded(form)
        task: Task = {
            place.NUM_BLOCKS: values.shape[1] // COLUMNS,
            place.FLOATS: values,
            place.X: rounded.levels,
            place.X_SCALES: rounded.scales,
            place.X_SUMS: rounded.sums,
            place.X_STARTS: rounded.starts,
        }
        if pairs is None:
            self.add(kernel, task, None, header=header)
        else:
            self.add_of_pairs(kernel, task, pairs)

    def _add_group(
        self, kernel: Kernel, task: Task, num_units: int, pairs: Pairs, waits: bool
    ) -> Numbers:
        """Add the product `task`, that of the expert 0, for each expert that is chosen."""
        numbers, by_expert, by_pair = self._numbers(task), *np.zeros((2, _NUM_PLACES), np.int64)
        for place, value in task.items():
            if isinstance(value, torch.Tensor):
                row_bytes = value.stride(0) * value.itemsize
                if place.name in _OF_PAIRS:
                    by_pair[place] = row_bytes
                else:
                    by_expert[place] = row_bytes * (len(value) // pairs.num_experts)
        self._own += [kernel, numbers, by_expert, by_pair]
        place = experts.GroupPlace
        group: Task = {
            place.KERNEL: kernel.address,
            place.TASK: numbers.ctypes.data,
            place.BY_EXPERT: by_expert.ctypes.data,
            place.BY_PAIR: by_pair.ctypes.data,
            place.UNITS: num_units,
            place.GROUPS: pairs.groups,
            place.NUM_GROUPS: pairs.num_groups,
        }
        most = len(pairs.groups)
        self.add_of_pairs(
            experts.group_kernel(), group, pairs, most=most, each=num_units, waits=waits
        )
        return numbers

    def _numbers(self, task: Task) -> Numbers:
        numbers = np.zeros(_NUM_PLACES, np.int64)
        for place, value in task.items():
            numbers[place] = self._number(value)
        return numbers

    def _number(self, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            self._own.append(value)
            return value.data_ptr()
        if isinstance(value, float):
            return int(np.array([value, 0], np.float32).view(np.int64)[0])
        return int(value)


def _form_of(weights: BlockWeights, can_be_tiled: bool) -> RoundedForm:
    is_tiled = can_be_tiled and tile_products.can_use_tiles(weights.layout, weights.num_in)
    return RoundedForm(weights.layout.rounding, is_tiled)


def _product(
    matrix: Matrix,
    num_out: int,
    source: Activations,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    can_be_tiled: bool,
) -> tuple[Kernel, Task, int]:
    """Return the kernel, the task and the units of a product with `num_out` rows of a matrix."""
    weights, has_bias, of_unit = matrix.weights, matrix.bias is not None, 1
    if isinstance(weights, BlockWeights):
        row_bytes = matrix.num_in * weights.bits // 8
        form = _form_of(weights, can_be_tiled)
        kernel = block_products.block_product_kernel(weights.layout, has_bias)
        task = _block_task(weights, source.rounded(form))
        if form.is_tiled:
            task[block_rows.Place.FEW] = kernel.address  # it lives as long as the process
            kernel = tile_products.tiled_product_kernel(weights.layout, has_bias)
            of_unit = tile_products.TILE_ROWS
        place: Any = block_rows.Place
    else:
        row_bytes = weights.stride(0) * weights.itemsize
        stored = stored_as(weights.dtype)
        if stored is None or matrix.num_in % products.COLUMNS:
            raise Unfit(f"has {matrix.num_in} columns of {weights.dtype}")
        kernel = products.product_kernel(stored, has_bias)
        task = _float_task(weights, values)
        place = products.Place
    chunk = products.unit_rows(num_out, row_bytes)
    chunk += -chunk % of_unit  # rows of a unit are whole tiles
    task |= {
        place.NUM_OUT: num_out,
        place.OUT: out,
        place.OUT_STRIDE: out.stride(0) * 4,
        place.CHUNK: chunk,
    }
    if has_bias:
        task[place.BIAS] = matrix.bias
    return kernel, task, -(-num_out // chunk)


def _block_task(weights: BlockWeights, x: Rounded) -> Task:
    """Return what the task of a product says of its operands."""
    place = block_rows.Place
    task: Task = {
        place.NUM_BLOCKS: weights.num_in // COLUMNS,
        place.LEVELS: weights.levels,
        place.SCALES: weights.scales,
        place.X: x.levels,
        place.X_SCALES: x.scales,
        place.X_SUMS: x.sums,
        place.X_STARTS: x.starts,
    }
    if weights.minimums is not None:
        task[place.MINIMUMS] = weights.minimums
    if weights.steps is not None:
        task[place.STEPS] = weights.steps
    return task


def _float_task(weights: torch.Tensor, x: torch.Tensor) -> Task:
    """Return what the task of a product says of its operands."""
    place = products.Place
    return {
        place.WEIGHTS: weights,
        place.NUM_IN: weights.shape[1],
        place.X: x,
        place.X_STRIDE: x.stride(0) * 4,
    }
