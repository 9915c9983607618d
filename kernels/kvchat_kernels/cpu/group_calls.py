"""Stored groups of columns, read outside of a step's program: into blocks, or as floats.

`linear/group_reading.py` calls this, where anything can be compiled and groups are sound.
"""

from typing import Any

import numpy as np
import torch

from kvchat_kernels.cpu import calls
from kvchat_kernels.cpu.group_factors import (
    NUM_COUNTS,
    FactorForm,
    FactorsTask,
    factors_kernel,
    looking_kernel,
    plain_factors_kernel,
)
from kvchat_kernels.cpu.group_floats import FloatForm, FloatsTask, group_floats_kernel
from kvchat_kernels.cpu.group_levels import LevelsTask, group_levels_kernel
from kvchat_kernels.cpu.maths import Stored, stored_as
from kvchat_kernels.cpu.program import Operation
from kvchat_kernels.cpu.step import NUM_HEADERS
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights
from kvchat_kernels.linear.stored_groups import WORD_BITS, StoredGroups, WordOrder

# Rows, or words of AWQ, of a unit: so many that the words of a line of memory are read together.
_LINES_OF_UNIT = {WordOrder.ROWS: 32, WordOrder.TURNED: 64, WordOrder.AWQ: 32}
_FACTOR_ROWS = 64
_FLOAT_ROWS = 16
# Bytes of levels that floats are made of at once.
_LEVELS_AT_ONCE = 1 << 20
# Below this many weights a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 18
_HEADER = np.ones(NUM_HEADERS, np.int64)


def read(stored: StoredGroups, is_interleaved: bool) -> BlockWeights:
    """Return a matrix that `fits_blocks` in blocks."""
    scales, minimums, factors = _factors_of(stored)
    levels = _empty_levels(stored, stored.num_out)
    copy = _copy_of(stored, levels, slice(0, _num_lines(stored)), is_interleaved)
    calls.run([factors, copy], (stored.num_out * stored.num_in) // _WEIGHTS_PER_THREAD)
    return BlockWeights(
        stored.bits, COLUMNS, levels, scales, minimums, is_interleaved=is_interleaved
    )


def read_floats(stored: StoredGroups, group_of: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix [out, in] of whole blocks; `group_of` has the group of each column."""
    num_out, num_in = stored.num_out, stored.num_in
    factors = torch.empty(2, num_out, stored.num_groups, dtype=torch.float32)
    kernel = plain_factors_kernel(_form_of(stored))
    write = _factor_operation(stored, kernel, scales=factors[0], minimums=factors[1])
    calls.run([write], (num_out * stored.num_groups) // _WEIGHTS_PER_THREAD)
    out = torch.empty(num_out, num_in, dtype=dtype)
    rows = num_out // _num_lines(stored)  # of a line
    step = max(1, _LEVELS_AT_ONCE * 8 // (num_in * stored.bits * rows))
    room = _empty_levels(stored, min(step * rows, num_out))
    for start in range(0, _num_lines(stored), step):
        lines = slice(start, min(start + step, _num_lines(stored)))
        copy = _copy_of(stored, room, lines, False)
        tile = slice(lines.start * rows, lines.stop * rows)
        floats = _floats_of(stored, room, factors[:, tile], group_of, out[tile])
        calls.run([copy, floats], ((tile.stop - tile.start) * num_in) // _WEIGHTS_PER_THREAD)
    return out


def _floats_of(
    stored: StoredGroups,
    levels: torch.Tensor,
    factors: torch.Tensor,
    group_of: torch.Tensor,
    out: torch.Tensor,
) -> Operation:
    """Return the operation that makes floats of levels."""
    task = FloatsTask(
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
    form = FloatForm(stored.bits, stored.offsets is not None, is_ordered, _stored_as(out.dtype))
    kernel = group_floats_kernel(form)
    return Operation(kernel, task, _HEADER, -(-len(out) // _FLOAT_ROWS))


def _copy_of(stored: StoredGroups, levels: torch.Tensor, lines: slice, is_interleaved: bool) -> Any:
    """Return the operation that writes the levels of some lines."""
    words, chunk = stored.words, _LINES_OF_UNIT[stored.order]
    num_lines = lines.stop - lines.start
    task = LevelsTask(
        num_lines=num_lines,
        num_blocks=stored.num_in // COLUMNS,
        words=words[lines] if stored.order is WordOrder.ROWS else words[:, lines],
        word_row=words.shape[1] * (WORD_BITS // 8),
        levels=levels,
        chunk=chunk,
    )
    kernel = group_levels_kernel(stored.order, stored.bits, is_interleaved)
    return Operation(kernel, task, _HEADER, -(-num_lines // chunk), waits=False)


def _factors_of(stored: StoredGroups) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Return room for scales and minimums, and the operation that writes them.

    None for minimums that blocks without them have.
    """
    form, num_units = _form_of(stored), -(-stored.num_out // _FACTOR_ROWS)
    counts = np.zeros((num_units, NUM_COUNTS), np.int64)
    look = _factor_operation(stored, looking_kernel(form), counts=counts)
    calls.run([look], (stored.num_out * stored.num_groups) // _WEIGHTS_PER_THREAD)
    are_odd, rounded_scales, rounded_minimums = (bool(n) for n in counts.sum(axis=0))
    has_minimums = are_odd or form.offsets is not None
    is_half = not (rounded_scales or (has_minimums and rounded_minimums))
    shape = (stored.num_out, stored.num_in // COLUMNS)
    dtype = torch.float16 if is_half else torch.float32
    scales = torch.empty(shape, dtype=dtype)
    minimums = torch.empty(shape, dtype=dtype) if has_minimums else None
    kernel = factors_kernel(form, has_minimums, is_half)
    write = _factor_operation(stored, kernel, scales=scales, minimums=minimums)
    return scales, minimums, write


def _form_of(stored: StoredGroups) -> FactorForm:
    offsets = None if stored.offsets is None else _stored_as(stored.offsets.dtype)
    scales, has_zeros = _stored_as(stored.scales.dtype), stored.zeros is not None
    return FactorForm(stored.order, stored.bits, scales, has_zeros, offsets)


def _factor_operation(stored: StoredGroups, kernel: Any, **written: Any) -> Any:
    """Return the operation that reads the factors of groups; it writes some of its task."""
    memory: dict[str, Any] = {
        "scale": stored.scales,
        "offset": stored.offsets,
        "zero": stored.zeros,
    }
    steps: dict[str, Any] = {}
    for name, part in memory.items():
        if part is not None:
            of_row, of_group = (step * part.itemsize for step in part.stride())
            if stored.order is not WordOrder.ROWS:
                of_row, of_group = of_group, of_row
            steps |= {f"{name}_row": of_row, f"{name}_group": of_group}
    task = FactorsTask(
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
    return Operation(kernel, task, _HEADER, num_units)


def _stored_as(dtype: torch.dtype) -> Stored:
    stored = stored_as(dtype)
    assert stored is not None, dtype
    return stored


def _num_lines(stored: StoredGroups) -> int:
    """Return how many lines of words there are: rows, or of AWQ 8 rows."""
    return stored.words.shape[1] if stored.order is WordOrder.AWQ else stored.num_out


def _empty_levels(stored: StoredGroups, num_rows: int) -> torch.Tensor:
    """Return room for the levels of rows, as BlockWeights has them."""
    kind = torch.uint8 if stored.bits == 4 else torch.int8
    return torch.empty(num_rows, stored.num_in * stored.bits // 8, dtype=kind)
