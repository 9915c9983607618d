"""Unpacks quantised weights: pure functions from the tensors of a file to float32 weights.

Each takes what one public format stores and computes what that format says the weight is. Formats
of whole numbers in groups give them as `Grouped`, which a layer can also multiply with as they are.
Callers have checked shapes and dtypes. `formats.py` knows the formats' names.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvchat_kernels.linear.blocks import CENTRE, COLUMNS, FLOAT_COLUMNS, BlockWeights
from kvchat_kernels.linear.cpu import read_blocks

# Returns a matrix in blocks, which alternate where that is asked for, as a CPU reads them.
MakeBlocks = Callable[[bool], BlockWeights]
# The values of four bits: one sign, two exponent bits, one mantissa bit (E2M1).
_FP4_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (*_FP4_HALF, *(-value for value in _FP4_HALF))
_BITS_PER_WORD = 32


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` numbers of `bits` bits in each row of words, as uint8.

    `words` is [rows, num_words] int32 or uint32: a stream of bits, lowest first. `bits` is 2 to 8.
    """
    words = words.contiguous().view(-1).view(words.shape)  # a turned column keeps odd strides
    if 8 % bits == 0:
        data = words.view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        numbers = (data.unsqueeze(-1) >> shifts).bitwise_and_(2**bits - 1)
        return numbers.flatten(-2)[:, :count]
    # 32 numbers fill `bits` words exactly; a number may begin in one word and end in the next.
    missing = -words.shape[-1] % bits
    groups = torch.nn.functional.pad(words.view(torch.int32), (0, missing))
    groups = groups.unflatten(-1, (-1, bits)).long().bitwise_and_(0xFFFFFFFF)
    columns = []
    for number in range(_BITS_PER_WORD):
        word, offset = divmod(number * bits, _BITS_PER_WORD)
        column = groups[..., word] >> offset
        if offset + bits > _BITS_PER_WORD:
            column |= groups[..., word + 1] << (_BITS_PER_WORD - offset)
        columns.append(column.bitwise_and_(2**bits - 1).to(torch.uint8))
    return torch.stack(columns, dim=-1).flatten(-2)[:, :count]


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight of whole numbers, with a scale and more for each group of a row's columns.

    levels     [rows, columns] uint8, each of `bits` bits
    scales     [rows, groups]; a weight is (level - zero) * scale + offset
    zeros      as `scales`, whole numbers; None for 0
    offsets    as `scales`; None for 0
    group_of   [columns] int64; None for groups of one size, one after the other
    """

    levels: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """Return the weight [rows, columns] in float32."""
        weight = grouped(self.levels, self.zeros, self.scales, self.group_of)
        if self.offsets is None:
            return weight
        groups = weight.unflatten(1, (self.scales.shape[1], -1))
        return groups.add_(self.offsets.float().unsqueeze(-1)).flatten(1)

    def blocks(self) -> BlockWeights | None:
        """Return the same weight in blocks of 32 columns; None where they cannot hold it.

        Half precision is used where it holds every scale and minimum exactly.
        """
        (num_rows, num_columns), num_groups = self.levels.shape, self.scales.shape[1]
        if self.bits not in (4, 8) or self.group_of is not None:
            return None
        if num_columns % (COLUMNS * num_groups):
            return None
        scales, centre = self.scales.float(), CENTRE if self.bits == 4 else 128
        minimums = None
        if self.offsets is not None:
            # Levels of 8 bits are signed in blocks.
            minimums = self.offsets.float() + (scales * centre if self.bits == 8 else 0)
        elif self.zeros is None or not bool((self.zeros == centre).all()):
            zeros = torch.zeros_like(scales) if self.zeros is None else self.zeros.float()
            minimums = scales * (-zeros if self.bits == 4 else centre - zeros)
        parts = [scales] if minimums is None else [scales, minimums]
        if all(torch.equal(part.half().float(), part) for part in parts):
            parts = [part.half() for part in parts]
        per_group = num_columns // num_groups // COLUMNS
        parts = [part.repeat_interleave(per_group, dim=1).contiguous() for part in parts]
        if self.bits == 8:
            levels = (self.levels ^ 128).contiguous().view(torch.int8)
        else:
            half = COLUMNS // 2
            halves = self.levels.reshape(num_rows, -1, COLUMNS)
            levels = (halves[..., :half] | (halves[..., half:] << 4)).flatten(1).contiguous()
        return BlockWeights(
            self.bits, COLUMNS, levels, parts[0], parts[1] if len(parts) > 1 else None
        )


def grouped(
    levels: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    group_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (levels - zeros) * scales, a zero and a scale for each group of a row's columns.

    `levels` is [rows, columns]; `zeros` (None for 0) and `scales` are [rows, groups]. `group_of` is
    [columns] int64; None for groups of one size, one after the other.
    """
    if group_of is not None:
        levels = levels.unsqueeze(-1)
        zeros = None if zeros is None else zeros.index_select(1, group_of)
        scales = scales.index_select(1, group_of)
    else:
        levels = levels.unflatten(1, (scales.shape[1], -1))
    zero = 0.0 if zeros is None else zeros.float().unsqueeze(-1)
    return torch.sub(levels, zero).mul_(scales.float().unsqueeze(-1)).flatten(1)


def gptq(
    words: torch.Tensor,
    zero_words: torch.Tensor,
    scales: torch.Tensor,
    group_of: torch.Tensor | None,
    bits: int,
    zero_offset: int,
) -> Grouped:
    """Return a GPTQ weight, [out, in].

    words        [in * bits / 32, out] int32, packed along the inputs
    zero_words   [groups, out * bits / 32] int32, packed along the outputs
    scales       [groups, out]
    zero_offset  1 for the first version of the format, which stores each zero less one
    """
    num_out, num_in = scales.shape[1], len(words) * _BITS_PER_WORD // bits
    levels = unpack_bits(words.t(), bits, num_in)
    zeros = unpack_bits(zero_words, bits, num_out).float().add_(zero_offset)
    return Grouped(levels, bits, scales.t(), zeros.t(), group_of=group_of)


def awq(words: torch.Tensor, zero_words: torch.Tensor, scales: torch.Tensor) -> Grouped:
    """Return an AWQ weight of the gemm layout, [out, in]: 4 bits, packed along the outputs.

    `words` is [in, out / 8] int32, `zero_words` [groups, out / 8], `scales` [groups, out].
    """
    levels, zeros = _unpack_awq(words), _unpack_awq(zero_words)
    return Grouped(levels.t().contiguous(), 4, scales.t(), zeros.t())


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns]: a word holds the even columns of its eight, then the odd ones."""
    numbers = unpack_bits(words, 4, 8 * words.shape[1])
    return numbers.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)


def packed_integers(
    words: torch.Tensor,
    zero_words: torch.Tensor | None,
    scales: torch.Tensor,
    group_of: torch.Tensor | None,
    bits: int,
    num_in: int,
) -> Grouped:
    """Return a weight of compressed-tensors' pack-quantized layout, [out, in].

    `words` is [out, in * bits / 32] int32, `zero_words` [out * bits / 32, groups], `scales`
    [out, groups]. Levels and zeros are stored with the same offset, which makes them positive.
    """
    middle = 2 ** (bits - 1)
    levels = unpack_bits(words, bits, num_in)
    if zero_words is None:
        zeros = torch.full_like(scales, middle)
    else:
        zeros = unpack_bits(zero_words.t(), bits, len(scales)).t()
    return Grouped(levels, bits, scales, zeros, group_of=group_of)


def affine(
    words: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int, count: int
) -> Grouped:
    """Return a weight of MLX's layout, [rows, count]: level * scale + offset for each group.

    `words` is [rows, count * bits / 32] uint32; `scales` and `offsets` are [rows, groups].
    """
    return Grouped(unpack_bits(words, bits, count), bits, scales, offsets=offsets)


def scaled(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], zeros: torch.Tensor | None
) -> torch.Tensor:
    """Return (values - zeros) * scales, a scale for each block of rows and columns.

    `values` is [..., rows, columns] in 8 bits; `scales` and `zeros` are [..., ceil(rows /
    block[0]), ceil(columns / block[1])].
    """
    column_of = torch.arange(values.shape[-1]) // block[1]
    weight = values.float()
    for part, combine in ((zeros, torch.Tensor.sub_), (scales, torch.Tensor.mul_)):
        if part is None:
            continue
        wide = part.float().index_select(-1, column_of)
        for number in range(wide.shape[-2]):
            rows = slice(number * block[0], (number + 1) * block[0])
            combine(weight[..., rows, :], wide[..., number : number + 1, :])
    return weight


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return scales that are stored as their exponents plus 127, one byte each."""
    return torch.exp2(exponents.float().sub_(127))


def fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return 4-bit floating-point values, two a byte and the lower bits first, times their scales.

    `packed` is [..., rows, columns / 2] uint8, `scales` [..., rows, groups] float32.
    """
    weight = _lookup(packed, torch.tensor(_FP4), low_first=True)
    groups = weight.unflatten(-1, (scales.shape[-1], -1))
    return groups.mul_(scales.unsqueeze(-1)).flatten(-2)


def mxfp4_experts(
    blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return gpt-oss's experts, [experts, in, out] in `dtype`, one expert at a time.

    `blocks` is [experts, out, groups, 16] uint8, `exponents` [experts, out, groups] uint8.
    """
    num_experts, num_out, num_groups, num_bytes = blocks.shape
    weight = torch.empty(num_experts, 2 * num_bytes * num_groups, num_out, dtype=dtype)
    for expert in range(num_experts):
        rows = blocks[expert].flatten(1)
        weight[expert] = fp4(rows, powers_of_two(exponents[expert])).t()
    return weight


def mxfp4_blocks(
    blocks: torch.Tensor, exponents: torch.Tensor, is_interleaved: bool
) -> BlockWeights:
    """Return the rows of all of gpt-oss's experts, [experts * out, in], in blocks.

    Tensors are as of `mxfp4_experts`.
    """
    rows = torch.cat((exponents.unsqueeze(-1), blocks), dim=-1)
    rows = rows.view(rows.shape[0] * rows.shape[1], -1)
    return read_blocks(rows, "MXFP4 by neighbours", is_interleaved)


def fp4_blocks(
    packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None
) -> MakeBlocks | None:
    """Return what reads a matrix of `fp4` in blocks; None for no such form.

    MXFP4 has exponents for 32 columns, NVFP4 floats of 8 bits for 16 columns, and `factor` for the
    whole. Both take as many bytes as their file.
    """
    num_out, num_groups = scales.shape
    columns = 2 * packed.shape[1] // num_groups
    if scales.dtype is torch.uint8 and factor is None and columns == COLUMNS:
        by_groups = packed.view(1, num_out, num_groups, COLUMNS // 2)
        return partial(mxfp4_blocks, by_groups, scales.unsqueeze(0))
    if scales.dtype is torch.float8_e4m3fn and columns == 16 and num_groups % 4 == 0:
        return partial(nvfp4_blocks, packed, scales, factor)
    return None


def nvfp4_blocks(
    packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None, is_interleaved: bool
) -> BlockWeights:
    """Return NVFP4 [out, in / 2] and its scales [out, in / 16] in blocks."""
    num_out = len(packed)
    parts = (scales.view(torch.uint8).view(num_out, -1, 4), packed.view(num_out, -1, 32))
    rows = torch.cat(parts, dim=-1).view(num_out, -1)
    blocks = read_blocks(rows, "NVFP4 by neighbours", is_interleaved)
    if (scales.view(torch.uint8) < 0x7F).all():  # neither a sign nor NaN
        steps = None if factor is None else factor.float().reshape(1, 1).repeat(num_out, 1)
        return replace(blocks, steps=steps)
    whole = scales.float() if factor is None else scales.float() * factor.float().reshape(1, 1)
    return replace(blocks, scales=whole)


def are_float_blocks(values: torch.Tensor, block: tuple[int, int]) -> bool:
    """Return whether values beside the scales of `scaled` are blocks of floats of 8 bits."""
    is_matrix = values.dtype == torch.float8_e4m3fn and values.dim() == 2
    return is_matrix and not (values.shape[1] % FLOAT_COLUMNS or block[1] % FLOAT_COLUMNS)


def float_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], is_interleaved: bool
) -> BlockWeights:
    """Return what `are_float_blocks` allows, whose `values` stay where they are, in any case."""
    num_out, num_in = values.shape
    rows = torch.arange(num_out) // block[0]
    columns = torch.arange(0, num_in, FLOAT_COLUMNS) // block[1]
    each = scales.float()[rows[:, None], columns[None, :]]
    return BlockWeights(8, FLOAT_COLUMNS, values.contiguous(), each, None)


def blockwise_lookup(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int, count: int
) -> torch.Tensor:
    """Return `count` of bitsandbytes' 4-bit values: entries of a table of 16, a scale a block.

    `packed` is uint8, two values a byte and the upper bits first.
    """
    values = _lookup(packed.flatten(), table.float(), low_first=False)
    return _scale_blocks(values, scales, block)[:count]


def nested_scales(
    packed: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int, offset: float
) -> torch.Tensor:
    """Return bitsandbytes' scales that are themselves quantised: entries of a table of 256."""
    values = table.float()[packed.flatten().int()]
    return _scale_blocks(values, scales, block).add_(offset)


def _scale_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    each = scales.float().flatten().repeat_interleave(block)[: len(values)]
    return values.mul_(each)


def _lookup(packed: torch.Tensor, table: torch.Tensor, low_first: bool) -> torch.Tensor:
    """Return the entries that the two halves of each byte name; the last dimension doubles."""
    every = torch.arange(256)
    halves = (every & 15, every >> 4) if low_first else (every >> 4, every & 15)
    pairs = table[torch.stack(halves, dim=-1)]
    return torch.nn.functional.embedding(packed.int(), pairs).flatten(-2)
