"""Reads stored groups of columns by compiled code, each tensor once: into blocks, or as floats.

The plain forms are `Grouped.blocks` and `Grouped.weight` of `kvchat/model/packed/unpacking.py`.
"""

import logging
from functools import cache
from typing import Any

import numpy as np
import torch

from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights
from kvchat_kernels.linear.stored_groups import WORD_BITS, StoredGroups, WordOrder

_log = logging.getLogger(__name__)

# Rows, or words of AWQ, of a unit: so many that the words of a line of memory are read together.
_LINES_OF_UNIT = {WordOrder.ROWS: 32, WordOrder.TURNED: 64, WordOrder.AWQ: 32}
_FACTOR_ROWS = 64
_FLOAT_ROWS = 16
# Bytes of levels that floats are made of at once.
_LEVELS_AT_ONCE = 1 << 20
# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 18


def read_groups(stored: StoredGroups, is_interleaved: bool = False) -> BlockWeights | None:
    """Return a matrix in blocks that hold it exactly; half precision is used where it holds all.

    None where blocks cannot hold its groups, and where nothing can be compiled. Reads no memory
    but that of the tensors, whatever these contain.
    """
    reader = _reader()
    if reader is None or not stored.is_sound() or not stored.fits_blocks():
        return None
    return reader.read(stored, is_interleaved)


def read_floats(stored: StoredGroups, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a matrix [out, in] in float32, bfloat16 or float16, rounded once from float32.

    Beside it there are its scales and zeros in float32, and 1 MiB of levels. None where columns are
    no whole blocks of 32, and where nothing can be compiled. Reads no memory but the tensors'.
    """
    reader = _reader()
    if reader is None or not stored.is_sound() or stored.num_in % COLUMNS:
        return None
    if not reader.writes(dtype):
        return None
    group_of = stored.groups_of_columns()
    return None if group_of is None else reader.read_floats(stored, group_of, dtype)


@cache
def _reader() -> "_Reader | None":
    """Return what runs compiled kernels; None, logged once, where nothing can be compiled."""
    try:
        return _Reader()
    except (ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError for its own faults
        _log.warning("packed weights are read without compiled code: %s", error)
        return None


class _Reader:
    """Runs the kernels; importing llvmlite waits until one is needed."""

    def __init__(self) -> None:
        from kvchat_kernels.cpu import group_factors, group_floats, group_levels
        from kvchat_kernels.cpu.code import has_feature
        from kvchat_kernels.cpu.maths import stored_as
        from kvchat_kernels.cpu.program import Operation, Program
        from kvchat_kernels.cpu.step import NUM_HEADERS

        self._factors: Any = group_factors
        self._levels, self._floats = group_levels, group_floats
        self._stored_as: Any = stored_as
        self._operation: Any = Operation
        self._program: Any = Program
        self._header = np.ones(NUM_HEADERS, np.int64)
        has_feature("")  # raises what compiling raises

    def writes(self, dtype: torch.dtype) -> bool:
        """Whether `read_floats` makes matrices of this dtype."""
        return self._stored_as(dtype) is not None

    def read(self, stored: StoredGroups, is_interleaved: bool) -> BlockWeights:
        scales, minimums, factors = self._factors_of(stored)
        levels = _empty_levels(stored, stored.num_out)
        copy = self._copy_of(stored, levels, slice(0, _num_lines(stored)), is_interleaved)
        self._run([factors, copy], stored.num_out * stored.num_in)
        return BlockWeights(
            stored.bits, COLUMNS, levels, scales, minimums, is_interleaved=is_interleaved
        )

    def read_floats(
        self, stored: StoredGroups, group_of: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        num_out, num_in = stored.num_out, stored.num_in
        factors = torch.empty(2, num_out, stored.num_groups, dtype=torch.float32)
        kernel = self._factors.plain_factors_kernel(self._form_of(stored))
        write = self._factor_operation(stored, kernel, scales=factors[0], minimums=factors[1])
        self._run([write], num_out * stored.num_groups)
        out = torch.empty(num_out, num_in, dtype=dtype)
        rows = num_out // _num_lines(stored)  # of a line
        step = max(1, _LEVELS_AT_ONCE * 8 // (num_in * stored.bits * rows))
        room = _empty_levels(stored, min(step * rows, num_out))
        for start in range(0, _num_lines(stored), step):
            lines = slice(start, min(start + step, _num_lines(stored)))
            copy = self._copy_of(stored, room, lines, False)
            tile = slice(lines.start * rows, lines.stop * rows)
            floats = self._floats_of(stored, room, factors[:, tile], group_of, out[tile])
            self._run([copy, floats], (tile.stop - tile.start) * num_in)
        return out

    def _floats_of(
        self,
        stored: StoredGroups,
        levels: torch.Tensor,
        factors: torch.Tensor,
        group_of: torch.Tensor,
        out: torch.Tensor,
    ) -> Any:
        """Return the operation that makes floats of levels."""
        task = self._floats.FloatsTask(
            num_out=len(out),
            num_blocks=out.shape[1] // COLUMNS,
            num_groups=stored.num_groups,
            levels=levels,
            scales=factors[0],
            second=factors[1],
            group_of=group_of,
            out=out,
            chunk=_FLOAT_ROWS,
        )
        blocks = group_of.view(-1, COLUMNS)
        is_ordered = torch.equal(blocks, blocks[:, :1].expand_as(blocks))
        form = self._floats.FloatForm(
            stored.bits, stored.offsets is not None, is_ordered, self._stored_as(out.dtype)
        )
        kernel = self._floats.group_floats_kernel(form)
        return self._operation(kernel, task, self._header, -(-len(out) // _FLOAT_ROWS))

    def _copy_of(
        self, stored: StoredGroups, levels: torch.Tensor, lines: slice, is_interleaved: bool
    ) -> Any:
        """Return the operation that writes the levels of some lines."""
        words, chunk = stored.words, _LINES_OF_UNIT[stored.order]
        num_lines = lines.stop - lines.start
        task = self._levels.LevelsTask(
            num_lines=num_lines,
            num_blocks=stored.num_in // COLUMNS,
            words=words[lines] if stored.order is WordOrder.ROWS else words[:, lines],
            word_row=words.shape[1] * (WORD_BITS // 8),
            levels=levels,
            chunk=chunk,
        )
        kernel = self._levels.group_levels_kernel(stored.order, stored.bits, is_interleaved)
        return self._operation(kernel, task, self._header, -(-num_lines // chunk), waits=False)

    def _factors_of(self, stored: StoredGroups) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return room for scales and minimums, and the operation that writes them.

        None for minimums that blocks without them have.
        """
        form, num_units = self._form_of(stored), -(-stored.num_out // _FACTOR_ROWS)
        counts = np.zeros((num_units, self._factors.NUM_COUNTS), np.int64)
        look = self._factor_operation(stored, self._factors.looking_kernel(form), counts=counts)
        self._run([look], stored.num_out * stored.num_groups)
        are_odd, rounded_scales, rounded_minimums = (bool(n) for n in counts.sum(axis=0))
        has_minimums = are_odd or form.offsets is not None
        is_half = not (rounded_scales or (has_minimums and rounded_minimums))
        shape = (stored.num_out, stored.num_in // COLUMNS)
        dtype = torch.float16 if is_half else torch.float32
        scales = torch.empty(shape, dtype=dtype)
        minimums = torch.empty(shape, dtype=dtype) if has_minimums else None
        kernel = self._factors.factors_kernel(form, has_minimums, is_half)
        write = self._factor_operation(stored, kernel, scales=scales, minimums=minimums)
        return scales, minimums, write

    def _form_of(self, stored: StoredGroups) -> Any:
        offsets = None if stored.offsets is None else self._stored_as(stored.offsets.dtype)
        scales, has_zeros = self._stored_as(stored.scales.dtype), stored.zeros is not None
        return self._factors.FactorForm(stored.order, stored.bits, scales, has_zeros, offsets)

    def _factor_operation(self, stored: StoredGroups, kernel: Any, **written: Any) -> Any:
        """Return the operation that reads the factors of groups; it writes some of its task."""
        memory = {"scale": stored.scales, "offset": stored.offsets, "zero": stored.zeros}
        steps: dict[str, int] = {}
        for name, part in memory.items():
            if part is not None:
                of_row, of_group = (step * part.itemsize for step in part.stride())
                if stored.order is not WordOrder.ROWS:
                    of_row, of_group = of_group, of_row
                steps |= {f"{name}_row": of_row, f"{name}_group": of_group}
        task = self._factors.FactorsTask(
            num_out=stored.num_out,
            num_groups=stored.num_groups,
            blocks=stored.num_in // (COLUMNS * stored.num_groups),
            zero_offset=stored.zero_offset,
            chunk=_FACTOR_ROWS,
            **memory,
            **steps,
            **written,
        )
        num_units = -(-stored.num_out // _FACTOR_ROWS)
        return self._operation(kernel, task, self._header, num_units)

    def _run(self, operations: list[Any], num_weights: int) -> None:
        """Run operations on as many threads as their work pays for."""
        program = self._program(operations)
        program.prepare()
        worth = max(1, num_weights // _WEIGHTS_PER_THREAD)
        program.run(min(torch.get_num_threads(), worth))


def _num_lines(stored: StoredGroups) -> int:
    """Return how many lines of words there are: rows, or of AWQ 8 rows."""
    return stored.words.shape[1] if stored.order is WordOrder.AWQ else stored.num_out


def _empty_levels(stored: StoredGroups, num_rows: int) -> torch.Tensor:
    """Return room for the levels of rows, as BlockWeights has them."""
    kind = torch.uint8 if stored.bits == 4 else torch.int8
    return torch.empty(num_rows, stored.num_in * stored.bits // 8, dtype=kind)
