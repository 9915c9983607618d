"""BlockWeights: a matrix [out, in] as whole numbers in blocks of columns, each block with a scale.

The layouts of GGUF files' blocks fit it without a loss: a weight is `level * scale + minimum`.
Levels of 2 to 8 bits lie in planes, which take as many bits together as a level has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from kvchat_kernels.linear.block_order import GROUPS, alternating, in_order
from kvchat_kernels.linear.grids import Grid, numbers_of, scales_of

# Columns whose levels lie together.
COLUMNS = 32
# The bits of the planes of levels of so many bits; the first plane has the lowest bits. Of 32
# columns a plane of `n` bits takes 4 * n bytes: byte `i` has columns i, i + 4 * n and so on, the
# first in its lowest bits.
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
# The level of 4 bits that stands for 0 in weights without minimums and without codes.
CENTRE = 8
# Columns that share a step, which whole scales and minimums are counted in.
STEP_COLUMNS = 256
# Columns of a scale beside floats of 8 bits.
FLOAT_COLUMNS = 128
# The bytes of activations that alternate: 4 columns of parts of 8 bits, or 2 of 16.
WORD = 4
# Powers of two, and floats of 4 bits of exponent, without signs.
FLOATS_OF_8_BITS = (torch.float8_e8m0fnu, torch.float8_e4m3fn)
# The least scale of a rounded block; one of zeros has it.
LEAST_SCALE = 1e-7


class Rounding(Enum):
    """How activations are rounded beside a matrix: whole numbers, with a scale for 32 columns.

    SHORT   16 bits, beside weights whose levels are multiplied as 16 bits
    BYTES   16 bits as two bytes, 256 * high + low, beside weights of 4 bits without codes:
            processors multiply bytes of 4 and 8 bits four at a time
    HALVES  the same with the sums of halves of blocks, beside weights whose levels are multiplied
            as bytes without signs
    BYTE    8 bits, beside weights of 4 bits without codes in a large model
    COARSE  8 bits with the sums of halves of blocks, beside other weights of up to 6 bits in a
            large model, whose levels are multiplied as bytes without signs
    """

    SHORT = "16 bits"
    BYTES = "two bytes"
    HALVES = "two bytes and sums of halves"
    BYTE = "8 bits"
    COARSE = "8 bits and sums of halves"

    @property
    def num_parts(self) -> int:
        return 2 if self in (Rounding.BYTES, Rounding.HALVES) else 1

    @property
    def word(self) -> int:
        """How many columns of activations alternate, and bytes of the levels beside them."""
        return WORD // 2 if self is Rounding.SHORT else WORD

    @property
    def most(self) -> float:
        """The largest level. Both parts of a level in bytes are at most 127.

        Those of 16 bits are the same: so weights of a small model give the same numbers on every
        processor.
        """
        return 127.0 if self.has_8_bits else 127.0 * 257

    @property
    def has_sums_of_halves(self) -> bool:
        return self in (Rounding.SHORT, Rounding.HALVES, Rounding.COARSE)

    @property
    def has_8_bits(self) -> bool:
        return self in (Rounding.BYTE, Rounding.COARSE)

    @property
    def is_beside_unsigned(self) -> bool:
        """Whether the weights' levels are multiplied as bytes without signs."""
        return self in (Rounding.HALVES, Rounding.COARSE)


@dataclass(frozen=True, slots=True)
class Layout:
    """How blocks lie in memory, which compiled code is made for. `scales`: their dtype.

    `are_floats`: levels are floats of 8 bits, which are multiplied with floats in order.
    `rounding`: how activations are rounded on a CPU. `zero`, `codes` and `unit` are as of
    BlockWeights. `rest`: how many blocks of 32 columns an interleaved row has behind its groups of
    8; None: any number.
    """

    bits: int
    block: int
    scales: torch.dtype
    has_minimums: bool
    is_interleaved: bool
    rounding: Rounding = Rounding.SHORT
    zero: int = 0
    codes: tuple[int, ...] | None = None
    unit: float = 1.0
    are_floats: bool = False
    rest: int | None = None
    grid: Grid | None = None
    has_row_steps: bool = False

    @property
    def are_nibbles(self) -> bool:
        """Whether levels have 4 bits, and are multiplied as they are."""
        return self.bits == 4 and self.codes is None

    @property
    def has_planes(self) -> bool:
        """Whether levels are read from planes, or looked up, to be multiplied."""
        return self.grid is not None or (self.bits != 8 and not self.are_nibbles)

    @property
    def part(self) -> int:
        """The columns whose levels lie together and have one scale."""
        return min(self.block, COLUMNS)

    @property
    def groups(self) -> Sequence[int]:
        """How many blocks alternate, in groups that follow each other in a row."""
        rest = 0 if self.are_groups_whole else self.rest
        return [size for size in GROUPS if size == GROUPS[0] or rest is None or rest & size]

    @property
    def are_groups_whole(self) -> bool:
        """Whether rows are whole runs of STEP_COLUMNS columns."""
        has_steps = self.scales in (torch.int8, torch.uint8) or self.grid is not None
        return has_steps or self.block == STEP_COLUMNS or self.rest == 0

    @property
    def has_minimums_of_parts(self) -> bool:
        """Whether a block of COLUMNS columns has several minimums."""
        return self.has_minimums and self.part < COLUMNS

    @property
    def is_centred(self) -> bool:
        """Whether levels are 4 bits of which CENTRE stands for 0."""
        return self.are_nibbles and not self.has_minimums

    @property
    def block_bytes(self) -> int:
        """The bytes of the levels of COLUMNS columns."""
        return COLUMNS * self.bits // 8


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A matrix in blocks of `block` columns; owns its tensors, contiguous and on one device.

    bits       of a level: a number of PLANES
    levels     int8 of 8 bits, else uint8 [out, in * bits / 8]; or float8_e4m3fn [out, in]
    scales     float16, float32 or floats of 8 bits [out, in / block], or int8 with `steps`; or
               uint8 with `steps`: a scale in the low bits, a minimum above
    minimums   as `scales`; None: a level of 0 stands for 0, in 4 bits without codes the level 8,
               unless scales have them
    steps      None, or float16 [out, in / 256, 1 or 2]: what whole scales are multiplied with,
               and whole minimums; or float32 [out, 1], what a row's scales are, e4m3
    zero       what is subtracted from each level of fewer than 8 bits
    codes      None, or what each level of 3 or 4 bits stands for, -128 to 127
    unit       a power of two, what all scales are multiplied with

    rounding   of activations on a CPU; None: BYTES beside levels of 4 bits without codes, else
               SHORT

    grid       None, or what levels of 8 bits are looked up in: then `levels` are its records, and
               `scales` what the scales in these are multiplied with, float16 [out, in / 256]
    are_planes_apart    whether a row has all bytes of a plane one behind another, as kernels of a
               GPU read them (`with_planes_apart`)

    Blocks have 16, 32 or 256 columns, of floats FLOAT_COLUMNS. Levels may be interleaved
    (`interleaved`), as compiled code for a CPU reads them. Records of a grid always lie so.
    """

    bits: int
    block: int
    levels: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    steps: torch.Tensor | None = None
    is_interleaved: bool = False
    rounding: Rounding | None = None
    zero: int = 0
    codes: tuple[int, ...] | None = None
    unit: float = 1.0
    grid: Grid | None = None
    are_planes_apart: bool = False

    def __post_init__(self) -> None:
        assert self.bits in PLANES
        sizes = (FLOAT_COLUMNS,) if self.are_floats else (COLUMNS, COLUMNS // 2, STEP_COLUMNS)
        assert self.block in sizes
        assert not self.are_floats or (self.bits == 8 and self.scales.dtype == torch.float32)
        of_scale = self.block if self.grid is None else STEP_COLUMNS
        assert self.scales.shape == (self.num_out, self.num_in // of_scale)
        assert self.codes is None or (self.bits <= 4 and not self.zero)
        assert self.codes is None or len(self.codes) == 1 << self.bits
        assert not (self.zero and (self.bits == 8 or self.layout.are_nibbles))
        has_minimums, has_steps = self.has_minimums, self.steps is not None
        assert not (self.layout.are_nibbles and self.block != COLUMNS)
        has_row_steps = self.layout.has_row_steps
        assert has_steps == (self.scales.dtype in (torch.int8, torch.uint8) or has_row_steps)
        if has_row_steps:
            assert self.scales.dtype == torch.float8_e4m3fn
        elif self.steps is not None:
            assert self.num_in % STEP_COLUMNS == 0
            assert self.steps.dtype == torch.float16
            shape = (self.num_out, self.num_in // STEP_COLUMNS, 1 + has_minimums)
            assert self.steps.shape == shape, self.steps.shape
        assert all(part.is_contiguous() for part in self.parts().values()), "code reads memory"

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the tensors there are by their names; rows are their first dimension."""
        parts = {name: getattr(self, name) for name in ("levels", "scales", "minimums", "steps")}
        return {name: part for name, part in parts.items() if part is not None}

    def made_of(self, parts: Mapping[str, torch.Tensor]) -> "BlockWeights":
        """Return weights of this layout of other tensors, named as in `parts`."""
        levels, scales = parts["levels"], parts["scales"]
        minimums, steps = parts.get("minimums"), parts.get("steps")
        return replace(self, levels=levels, scales=scales, minimums=minimums, steps=steps)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "BlockWeights":
        """Return weights whose tensors are `change` of each of these."""
        return self.made_of({name: change(part) for name, part in self.parts().items()})

    @property
    def layout(self) -> Layout:
        are_nibbles = self.bits == 4 and self.codes is None
        return Layout(
            self.bits,
            self.block,
            self.scales.dtype,
            self.has_minimums,
            self.is_interleaved,
            self.rounding or (Rounding.BYTES if are_nibbles else Rounding.SHORT),
            self.zero,
            self.codes,
            self.unit,
            self.are_floats,
            self.num_in // COLUMNS % GROUPS[0] if self.is_interleaved else None,
            self.grid,
            self.steps is not None and self.steps.dtype == torch.float32,
        )

    @property
    def are_floats(self) -> bool:
        return self.levels.dtype == torch.float8_e4m3fn

    @property
    def has_minimums(self) -> bool:
        return self.minimums is not None or self.scales.dtype == torch.uint8

    @property
    def num_out(self) -> int:
        return self.levels.shape[0]

    @property
    def num_in(self) -> int:
        if self.grid is not None:
            return self.levels.shape[1] // self.grid.num_bytes * STEP_COLUMNS
        return self.levels.shape[1] * 8 // self.bits

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def __deepcopy__(self, memo: object) -> "BlockWeights":
        return self  # nothing ever changes it

    @property
    def device(self) -> torch.device:
        return self.levels.device

    def to(self, device: torch.device) -> "BlockWeights":
        """Return the matrix on `device`."""
        return self.changed(lambda part: part.to(device))

    def rows(self, start: int, end: int) -> "BlockWeights":
        """Return rows [`start`, `end`); they share memory with these."""
        return self.changed(lambda part: part[start:end])


def reordered(weights: BlockWeights, order: torch.Tensor) -> BlockWeights:
    """Return the rows in another order, copied."""
    return weights.changed(lambda part: part[order])


def can_move_columns(order: torch.Tensor) -> bool:
    """Whether blocks hold the same numbers in this order of columns: runs of 32 stay together."""
    return _run_starts(order, COLUMNS) is not None


def with_columns(weights: BlockWeights, order: torch.Tensor) -> BlockWeights:
    """Return the columns in an order that `can_move_columns`; not of interleaved weights.

    Where columns that share a step come apart, scales and minimums become float32. Points of a grid
    become codes.
    """
    assert not weights.is_interleaved
    if torch.equal(order, torch.arange(len(order))):
        return weights
    if weights.grid is not None:
        weights = with_codes(weights)
    if weights.block > COLUMNS:
        scales = weights.scales.repeat_interleave(weights.block // COLUMNS, dim=1)
        weights = replace(weights, scales=scales, block=COLUMNS)
    starts, of_steps = _run_starts(order, COLUMNS), _run_starts(order, STEP_COLUMNS)
    assert starts is not None
    if weights.steps is not None and (of_steps is None or weights.layout.has_row_steps):
        weights = _without_steps(weights)

    def moved(name: str, part: torch.Tensor) -> torch.Tensor:
        chosen = of_steps if name == "steps" and of_steps is not None else starts
        return part.view(len(part), len(chosen), -1)[:, chosen].view(part.shape)

    return weights.made_of({name: moved(name, part) for name, part in weights.parts().items()})


def with_codes(weights: BlockWeights) -> BlockWeights:
    """Return the weights of a grid as codes of 3 or 4 bits, with whole scales and steps."""
    assert weights.grid is not None
    numbers, weights = weights.grid.all_numbers, without_grid(weights)
    bits = 3 if len(numbers) <= 8 else 4
    codes = torch.zeros(256, dtype=torch.uint8)
    codes[torch.tensor(numbers) + 128] = torch.arange(len(numbers), dtype=torch.uint8)
    blocks = codes[weights.levels.int() + 128].view(weights.num_out, -1, COLUMNS)
    levels = in_planes(blocks, bits).view(weights.num_out, -1)
    padded = (*numbers, *[0] * ((1 << bits) - len(numbers)))
    return replace(weights, bits=bits, levels=levels, codes=padded)


def _without_steps(weights: BlockWeights) -> BlockWeights:
    """Return the same weights whose scales and minimums are float32."""
    scales, minimums = scales_and_minimums(weights)
    minimums = minimums if weights.has_minimums else None
    return replace(weights, scales=scales, minimums=minimums, steps=None, unit=1.0)


def _run_starts(order: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return which run of `size` columns each new run is; None where runs do not stay together."""
    if len(order) % size:
        return None
    runs = order.view(-1, size)
    first = runs[:, :1]
    if (first % size).any() or not torch.equal(runs, first + torch.arange(size)):
        return None
    return first[:, 0] // size


def joined(parts: Sequence[BlockWeights]) -> BlockWeights:
    """Return the rows of several matrices in one, copied.

    Raises ValueError for matrices of other layouts or numbers of columns.
    """
    first = parts[0]
    if len({(part.layout, part.num_in, part.are_planes_apart) for part in parts}) > 1:
        raise ValueError("matrices of other layouts")
    if len(parts) == 1:
        return first
    tensors = [part.parts() for part in parts]
    return first.made_of({name: torch.cat([of[name] for of in tensors]) for name in tensors[0]})


def interleaved(weights: BlockWeights, rounding: Rounding | None = None) -> BlockWeights:
    """Return weights whose levels are interleaved, copied; scales are shared.

    Of 8 blocks of 32 columns in a row, the first 4 bytes of each lie side by side (2 beside
    activations of 16 bits), then their second 4 bytes, and so on: one vector has levels of 8
    blocks, whose products with as many activations are added in lanes of their own. Blocks beyond a
    multiple of 8 are taken in groups of 4, 2 and 1. `rounding`: of activations, if not the weights'
    own.
    """
    assert not weights.is_interleaved
    weights = replace(weights, rounding=rounding or weights.rounding)
    if weights.grid is not None:
        return replace(weights, is_interleaved=True)
    kind = torch.int16 if weights.layout.rounding is Rounding.SHORT else torch.int32
    levels = weights.levels.view(-1)
    if levels.storage_offset() % kind.itemsize:
        levels = levels.clone()  # a matrix of one block may lie anywhere in a block of its file
    # Copying whole numbers of a word's size is many times as fast as copying bytes.
    words = levels.view(kind).view(weights.num_out, weights.num_in // COLUMNS, -1)
    levels = alternating(words, 1).view(levels.dtype)
    return replace(weights, levels=levels, is_interleaved=True)


def with_planes_apart(weights: BlockWeights) -> BlockWeights:
    """Return weights whose planes lie apart, copied where there are several; not interleaved ones.

    So a thread reads 16 bytes of a plane of 4 bits at once: blocks of 5 bits take 20.
    """
    assert not weights.is_interleaved
    if len(PLANES[weights.bits]) == 1 or weights.are_planes_apart:
        return weights
    blocks = weights.levels.view(weights.num_out, -1, weights.layout.block_bytes)
    planes = blocks.split([4 * bits for bits in PLANES[weights.bits]], dim=2)
    levels = torch.cat([plane.flatten(1) for plane in planes], dim=1)
    return replace(weights, levels=levels, are_planes_apart=True)


def without_grid(weights: BlockWeights) -> BlockWeights:
    """Return weights whose records are looked up: levels of 8 bits, whole scales and steps."""
    grid = weights.grid
    assert grid is not None
    records = weights.levels.view(-1, grid.num_bytes).numpy()
    levels = torch.from_numpy(numbers_of(records, grid)).view(weights.num_out, -1)
    scales = torch.from_numpy(scales_of(records, grid)).view(weights.num_out, -1)
    steps = weights.scales[..., None]
    return BlockWeights(8, grid.block, levels, scales, None, steps, unit=weights.unit)


def dequantised(weights: BlockWeights) -> torch.Tensor:
    """Return the matrix [out, in] in float32."""
    if weights.grid is not None:
        weights = without_grid(weights)
    levels, (scales, minimums) = weights.levels, scales_and_minimums(weights)
    width = weights.layout.block_bytes
    if weights.is_interleaved:
        levels = in_order(levels, width, weights.layout.rounding.word)
    num_blocks = weights.num_in // COLUMNS
    if weights.are_planes_apart:
        planes = levels.split([4 * bits * num_blocks for bits in PLANES[weights.bits]], dim=1)
        levels = torch.cat([plane.unflatten(1, (num_blocks, -1)) for plane in planes], dim=2)
    levels = whole_levels(levels.view(weights.num_out, num_blocks, width), weights.bits)
    if weights.codes is not None:
        levels = levels.new_tensor(weights.codes, dtype=torch.int8)[levels.long()]
    blocks = levels.view(*weights.scales.shape, weights.block).float()
    if weights.zero:
        blocks -= weights.zero
    blocks *= scales[..., None]
    if minimums is not None:
        blocks += minimums[..., None]
    return blocks.view(weights.num_out, weights.num_in)


def whole_levels(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Return levels [..., 32] of blocks in their planes, [..., 4 * bits]; of 8 bits as they are."""
    if bits == 8:
        return blocks
    total, low, start = None, 0, 0
    for plane in PLANES[bits]:
        data = blocks[..., start : start + 4 * plane]
        fields = [(data >> shift) & ((1 << plane) - 1) for shift in range(0, 8, plane)]
        part = torch.cat(fields, dim=-1) << low
        total = part if total is None else total | part
        low, start = low + plane, start + 4 * plane
    assert total is not None
    return total


def in_planes(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Return what `whole_levels` makes `levels` of, uint8; levels of 8 bits as they are."""
    if bits == 8:
        return levels
    parts, low, levels = [], 0, levels.to(torch.uint8)
    for plane in PLANES[bits]:
        fields = ((levels >> low) & ((1 << plane) - 1)).unflatten(-1, (8 // plane, 4 * plane))
        shifts = torch.arange(0, 8, plane, dtype=torch.uint8, device=levels.device)
        parts.append((fields << shifts[:, None]).sum(dim=-2, dtype=torch.uint8))
        low += plane
    return torch.cat(parts, dim=-1)


def scales_and_minimums(weights: BlockWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return them in float32 [out, in / block]; minimums are None where all are 0."""
    scales = weights.scales.float()
    minimums = None if weights.minimums is None else weights.minimums.float()
    if weights.scales.dtype == torch.uint8:
        scales, minimums = (weights.scales & 15).float(), (weights.scales >> 4).float()
    if weights.steps is not None and weights.layout.has_row_steps:
        scales = scales * weights.steps
    elif weights.steps is not None:
        steps = weights.steps.float().repeat_interleave(STEP_COLUMNS // weights.block, dim=1)
        scales = scales * steps[..., 0]
        minimums = None if minimums is None else minimums * steps[..., 1]
    if weights.unit != 1:
        scales = scales * weights.unit
    if weights.layout.is_centred:
        minimums = scales * -CENTRE
    return scales, minimums


def fits(num_in: int) -> bool:
    """Return whether rows of so many columns can be held in blocks."""
    return num_in % COLUMNS == 0


def quantised(weight: torch.Tensor, bits: int) -> BlockWeights:
    """Round a float matrix [out, in] to 8 or 4 bits in blocks of 32; `fits(in)` holds.

    8 bits: the largest magnitude of a block is 127. 4 bits: the smallest and the largest value of a
    block are levels 0 and 15.
    """
    num_out, num_in = weight.shape
    blocks = weight.float().contiguous().view(num_out, -1, COLUMNS)
    if bits == 8:
        scales = (blocks.abs().amax(dim=-1) / 127).clamp_(min=LEAST_SCALE).half()
        levels = (blocks / scales.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return BlockWeights(8, COLUMNS, levels.view(num_out, num_in), scales, None)
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    scales = ((high - low) / 15).clamp_(min=LEAST_SCALE).half()
    minimums = low.half()
    levels = blocks.sub(minimums.float()[..., None]).div_(scales.float()[..., None])
    levels = levels.round_().clamp_(0, 15).to(torch.uint8)
    half = COLUMNS // 2
    packed = levels[..., :half] | (levels[..., half:] << 4)
    return BlockWeights(4, COLUMNS, packed.view(num_out, num_in // 2), scales, minimums)


def part_bytes(num_out: int, num_in: int, bits: int, align: int = 1) -> list[int]:
    """Return the bytes of the parts of what `quantised` makes, each a multiple of `align`."""
    factors = 2 * num_out * (num_in // COLUMNS)
    sizes = [num_out * num_in * bits // 8, *([factors] if bits == 8 else [factors, factors])]
    return [-(-size // align) * align for size in sizes]


def made_of_bytes(
    region: torch.Tensor, num_out: int, num_in: int, bits: int, align: int = 1
) -> BlockWeights:
    """Return what `interleaved` makes of what `quantised` does, in the memory of `region`, uint8.

    The parts lie one behind another, of `part_bytes`; `fits(num_in)` holds.
    """
    parts = region.split(part_bytes(num_out, num_in, bits, align))
    levels = parts[0][: num_out * num_in * bits // 8].view(num_out, -1)
    factors = [
        part.view(torch.float16)[: num_out * (num_in // COLUMNS)].view(num_out, -1)
        for part in parts[1:]
    ]
    minimums = factors[1] if bits == 4 else None
    levels = levels.view(torch.int8) if bits == 8 else levels
    return BlockWeights(bits, COLUMNS, levels, factors[0], minimums, is_interleaved=True)


# Elements that are rounded at once: the floats of a whole head would take gigabytes.
_ELEMENTS_AT_ONCE = 1 << 24


def quantised_on(weight: torch.Tensor, bits: int, device: torch.device) -> BlockWeights:
    """Return `quantised(weight, bits)` on `device`, made there a tile after another."""
    step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    return joined([quantised(tile.to(device), bits) for tile in weight.split(step)])


def quantised_matrices(weight: torch.Tensor, bits: int, device: torch.device) -> BlockWeights:
    """Round matrices [count, out, in] on `device`, one after another: [count * out, in].

    Beside the result no more than one matrix is on the device.
    """
    count, num_out, _ = weight.shape
    whole: BlockWeights | None = None
    for index, matrix in enumerate(weight):
        packed = quantised_on(matrix, bits, device)
        if whole is None:
            whole = packed.changed(lambda part: part.new_empty(count * num_out, *part.shape[1:]))
        place = whole.rows(index * num_out, (index + 1) * num_out).parts()
        for name, part in packed.parts().items():
            place[name].copy_(part)
    assert whole is not None, "no matrix"
    return whole
