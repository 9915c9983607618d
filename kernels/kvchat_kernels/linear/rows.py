"""Rows: activations of one matrix product, rounded in blocks of 32 columns."""

from dataclasses import dataclass

import torch

from kvchat_kernels.linear.block_order import alternating, in_order
from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, Rounding

# The least that a block's largest value counts as, as in the compiled code.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Rows:
    """Activation rows in blocks of 32 columns.

    levels          int16 or int8 [num_rows, parts, in], whose blocks alternate as `alternating`
                    has them; of two parts, a level is 256 * the first + the second
    scales, sums    float32 [num_rows, in / 32]; a sum is that of a block's levels times its scale
    starts          int32 [num_rows, in / 32]: the sum of the levels times -CENTRE, where sums of
                    products begin whose levels of weights are CENTRE too high. Where a rounding
                    has sums of halves [num_rows, in / 16]: the sum of the levels of each half
    """

    rounding: Rounding
    levels: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    starts: torch.Tensor

    def __len__(self) -> int:
        return len(self.levels)

    def operands(self) -> dict[str, torch.Tensor]:
        """Return the tensors by the names that the tasks of kernels have for them."""
        scales, sums = self.scales, self.sums
        return {"x": self.levels, "x_scales": scales, "x_sums": sums, "x_starts": self.starts}

    def values(self) -> torch.Tensor:
        """Return what the levels stand for, float32 [num_rows, in]."""
        return (self.whole_levels() * self.scales[..., None]).view(len(self), -1)

    def whole_levels(self) -> torch.Tensor:
        """Return the levels in order, int32 [num_rows, in / 32, 32]."""
        word = self.rounding.word
        first, *second = (in_order(part, COLUMNS, word).int() for part in self.levels.unbind(1))
        return first * 256 + second[0] if second else first


def empty_rows(num_rows: int, num_in: int, rounding: Rounding) -> Rows:
    """Return room for rows, not written yet; `num_in` is a multiple of 32."""
    levels = torch.empty(num_rows, rounding.num_parts, num_in, dtype=level_dtype(rounding))
    scales, sums = torch.empty(2, num_rows, num_in // COLUMNS, dtype=torch.float32).unbind()
    starts = torch.empty(num_rows, num_in // starts_columns(rounding), dtype=torch.int32)
    return Rows(rounding, levels, scales, sums, starts)


def starts_columns(rounding: Rounding) -> int:
    """Return how many columns one of `starts` is of."""
    return COLUMNS // 2 if rounding.has_sums_of_halves else COLUMNS


def rounded_plainly(x: torch.Tensor, rounding: Rounding) -> Rows:
    """Round rows [num_rows, in] float32 by operators of torch."""
    blocks = x.view(len(x), -1, COLUMNS)
    largest = blocks.abs().amax(dim=-1).clamp_(min=_LEAST)
    levels = (blocks * (rounding.most / largest)[..., None]).round_().int()
    scales = largest / rounding.most
    totals = levels.sum(dim=-1, dtype=torch.int32)
    high = (levels + 128) >> 8
    parts = (high, levels - high * 256) if rounding.num_parts == 2 else (levels,)
    dtype = level_dtype(rounding)
    stored = torch.stack([alternating(part.to(dtype), rounding.word) for part in parts], 1)
    starts = totals * -CENTRE
    if rounding.has_sums_of_halves:
        halves = levels.unflatten(-1, (2, COLUMNS // 2)).sum(dim=-1, dtype=torch.int32)
        starts = halves.view(len(x), -1)
    return Rows(rounding, stored, scales, totals * scales, starts)


def level_dtype(rounding: Rounding) -> torch.dtype:
    """Return how levels are stored."""
    return torch.int16 if rounding is Rounding.SHORT else torch.int8
