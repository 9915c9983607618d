"""StoredGroups: a matrix of whole numbers in groups of columns, as files of the hub store it.

AWQ, GPTQ, MLX and compressed-tensors pack numbers of 4 or 8 bits into words of 32 bits, each in an
order of its own, beside a scale and a zero or an offset for each group of a row's columns.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from kvchat_kernels.linear.blocks import COLUMNS

WORD_BITS = 32
_WORDS = (torch.int32, torch.uint32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The row of eight that each 4 bits of a word of AWQ belong to, the lowest first.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)


class WordOrder(StrEnum):
    """What lies in a word, lowest bits first.

    ROWS      neighbouring columns of a row; words [out, in * bits / 32], factors [out, groups]
    TURNED    the same; words [in * bits / 32, out], factors [groups, out]
    AWQ       a column of 8 rows, see AWQ_ROWS; words [in, out / 8], factors [groups, out]
    """

    ROWS = "rows"
    TURNED = "turned"
    AWQ = "awq"


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """The tensors of a file for one matrix [out, in]; a weight is (level - zero) * scale + offset.

    bits         4 or 8; of AWQ 4
    words        int32 or uint32, see WordOrder
    scales       floats, [groups, out] or [out, groups]
    zeros        words of as many bits in the same order along the rows, [groups, out * bits / 32]
                 or [out * bits / 32, groups], rounded up; None: each is the middle, or 0 beside
                 offsets
    offsets      as scales; None for 0
    zero_offset  what is added to a stored zero
    group_of     int32 or int64 [in], the group of each column; None: groups of one size, one
                 after the other
    """

    order: WordOrder
    bits: int
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    zero_offset: int = 0
    group_of: torch.Tensor | None = None

    @property
    def num_out(self) -> int:
        return self.scales.shape[0 if self.order is WordOrder.ROWS else 1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1 if self.order is WordOrder.ROWS else 0]

    @property
    def num_in(self) -> int:
        size = self.words.shape[1 if self.order is WordOrder.ROWS else 0]
        return size if self.order is WordOrder.AWQ else size * WORD_BITS // self.bits

    def fits_blocks(self) -> bool:
        """Whether blocks can hold the groups: whole ones of 32 columns, one after the other."""
        is_even = self.group_of is None and self.num_in % (COLUMNS * self.num_groups) == 0
        return is_even and self.bits in (4, 8)

    def is_sound(self) -> bool:
        """Whether all tensors have the shapes and types above: code that reads memory relies on it.

        Of `group_of` it says nothing, see `groups_of_columns`.
        """
        parts = [
            part for part in (self.words, self.scales, self.zeros, self.offsets) if part is not None
        ]
        if not all(part.dim() == 2 and part.numel() and part.is_contiguous() for part in parts):
            return False
        return self._are_types_known() and self._do_shapes_fit()

    def groups_of_columns(self) -> torch.Tensor | None:
        """Return the group of each column, int32 [in] in memory of its own; None for no groups.

        They are looked at in a copy: a file may change while it is mapped.
        """
        num_in, num_groups = self.num_in, self.num_groups
        if self.group_of is None:
            if num_in % num_groups:
                return None
            return torch.arange(num_in, dtype=torch.int32) // (num_in // num_groups)
        if self.group_of.dtype not in (torch.int32, torch.int64) or self.group_of.numel() != num_in:
            return None
        listed = self.group_of.to(torch.int64, copy=True).flatten()
        is_right = 0 <= int(listed.min()) <= int(listed.max()) < num_groups
        return listed.to(torch.int32) if is_right else None

    def _are_types_known(self) -> bool:
        words = [self.words] if self.zeros is None else [self.words, self.zeros]
        floats = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        are_known = all(part.dtype in _WORDS for part in words)
        are_known = are_known and all(part.dtype in _FLOATS for part in floats)
        on_cpu = all(part.device.type == "cpu" for part in (*words, *floats))
        return (
            are_known and on_cpu and self.bits in ((4,) if self.order is WordOrder.AWQ else (4, 8))
        )

    def _do_shapes_fit(self) -> bool:
        is_turned = self.order is not WordOrder.ROWS
        num_out, per_word = self.num_out, WORD_BITS // self.bits
        width = -(-num_out // per_word)
        if self.order is WordOrder.AWQ:
            fit = self.words.shape[1] * per_word == num_out
        else:
            fit = self.words.shape[1 if is_turned else 0] == num_out
        if self.zeros is not None:
            shape = (self.num_groups, width) if is_turned else (width, self.num_groups)
            fit = fit and tuple(self.zeros.shape) == shape
        return fit and (self.offsets is None or self.offsets.shape == self.scales.shape)
