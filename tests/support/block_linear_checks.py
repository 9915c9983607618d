"""What products with block weights must do, by the Triton kernels and by plain torch.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.linear import block_linear as module
from kvchat_kernels.linear.block_linear import MAX_ROWS, block_linear
from kvchat_kernels.linear.blocks import (
    COLUMNS,
    FLOATS_OF_8_BITS,
    STEP_COLUMNS,
    BlockWeights,
    dequantised,
    with_planes_apart,
)
from kvchat_kernels.linear.file_formats import FLOATS, UNEVEN
from support.rounding import assert_as_exact, poisoned_memory


@dataclass(frozen=True)
class Kind:
    """Bits, columns of a block, dtype of the scales, whether there are minimums, and the rest of
    BlockWeights.

    Whole scales have steps; `has_row_steps`: a step for each row.
    """

    bits: int
    block: int
    dtype: torch.dtype
    has_minimums: bool = False
    zero: int = 0
    codes: tuple[int, ...] | None = None
    unit: float = 1.0
    are_floats: bool = False
    has_row_steps: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        flags = {
            "minimums": self.has_minimums,
            f"{len(self.codes or ())} codes": self.codes,
            f"zero {self.zero}": self.zero,
            "floats": self.are_floats,
            "row steps": self.has_row_steps,
        }
        return " ".join([f"{self.bits}x{self.block} {dtype}", *(k for k, v in flags.items() if v)])

    @property
    def has_steps(self) -> bool:
        return self.dtype in (torch.int8, torch.uint8)

    @property
    def num_steps(self) -> int:
        """The steps of 256 columns."""
        return 1 + (self.has_minimums or self.dtype == torch.uint8)

    @property
    def columns(self) -> int:
        """What a number of columns is a multiple of."""
        return max(self.block, STEP_COLUMNS if self.has_steps else COLUMNS)


# The first are those of 4 and 8 bits, rounded here too; then planes, codes and floats of files.
KINDS = (
    Kind(4, 32, torch.float16, True),
    Kind(4, 32, torch.float32, True),
    Kind(4, 32, torch.float16),
    Kind(8, 32, torch.float16),
    Kind(8, 32, torch.float32, True),
    Kind(8, 16, torch.float32),
    Kind(4, 32, torch.int8, True),
    Kind(8, 32, torch.int8, True),
    Kind(8, 16, torch.int8),
    Kind(6, 16, torch.int8, zero=32),
    Kind(3, 16, torch.int8, zero=4),
    Kind(2, 16, torch.uint8),
    Kind(5, 32, torch.int8, True),
    Kind(5, 32, torch.float16, zero=16),
    Kind(5, 32, torch.float16, True),
    Kind(2, 256, torch.float16, zero=1),
    Kind(4, 32, torch.float16, codes=UNEVEN),
    Kind(4, 32, torch.int8, codes=UNEVEN),
    Kind(4, 32, torch.float8_e8m0fnu, codes=FLOATS, unit=0.5),
    Kind(4, 16, torch.float8_e4m3fn, codes=FLOATS, unit=0.5),
    Kind(4, 16, torch.float8_e4m3fn, codes=FLOATS, unit=0.5, has_row_steps=True),
    Kind(4, 16, torch.float32, codes=FLOATS, unit=0.5),
    Kind(3, 32, torch.int8, codes=UNEVEN[::2]),
    Kind(3, 16, torch.int8, codes=UNEVEN[::2]),
    Kind(8, 128, torch.float32, are_floats=True),
)
ROUNDED_KINDS, FILE_KINDS = KINDS[:9], KINDS[9:]


def random_blocks(shape: tuple[int, int], kind: Kind, device: str) -> BlockWeights:
    """Every level that a file may hold; scales so that weights are about 1."""
    num_out, num_in = shape
    levels = torch.randint(0, 256, (num_out, num_in * kind.bits // 8), dtype=torch.uint8)
    if kind.are_floats:
        levels = levels.where(levels & 0x7F < 0x7F, 0).view(torch.float8_e4m3fn)  # no NaN
    elif kind.bits == 8:
        levels = levels.view(torch.int8)
    size = max(map(abs, kind.codes)) if kind.codes else 448 if kind.are_floats else 1 << kind.bits
    scales = torch.randn(num_out, num_in // kind.block) / max(2, size / 2)
    minimums = torch.randn_like(scales) if kind.has_minimums else None
    steps = None
    if kind.has_steps:
        sizes = torch.tensor([1 / 1000, 1 / 32][: kind.num_steps])
        steps = torch.rand(num_out, num_in // STEP_COLUMNS, kind.num_steps) * sizes
        scales, minimums = scales.mul(1000), None if minimums is None else minimums.mul(32)
        scales = scales.clamp(-128, 127)
    if kind.dtype == torch.uint8:
        scales = torch.randint(0, 256, scales.shape)
    if kind.dtype in FLOATS_OF_8_BITS:
        scales = scales.abs()
    if kind.has_row_steps:
        steps = torch.rand(num_out, 1)
    return with_planes_apart(
        BlockWeights(
            kind.bits,
            kind.block,
            levels.to(device),
            scales.to(kind.dtype).to(device),
            None if minimums is None else minimums.to(kind.dtype).to(device),
            None if steps is None else steps.to(_step_dtype(kind)).to(device),
            zero=kind.zero,
            codes=kind.codes,
            unit=kind.unit,
        )
    )


def _step_dtype(kind: Kind) -> torch.dtype:
    return torch.float32 if kind.has_row_steps else torch.float16


def empty_blocks(shape: tuple[int, int], kind: Kind) -> BlockWeights:
    """Weights of a kind that take no memory."""
    few = random_blocks((1, kind.columns), kind, "cpu")
    times = shape[1] // kind.columns

    def sized(part: torch.Tensor) -> torch.Tensor:
        width = 1 if part.dtype == torch.float32 and part is few.steps else part.shape[1] * times
        return torch.empty(shape[0], width, *part.shape[2:], dtype=part.dtype, device="meta")

    return few.changed(sized)


def check_block_linear(
    kind: Kind,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
    device: str = "cpu",
) -> None:
    """A product of `sizes`: rows, inputs, outputs, is as exact as with the unpacked weights."""
    torch.manual_seed(sum(sizes))
    num_rows, in_size, out_size = sizes
    padded = -(-in_size // kind.columns) * kind.columns
    in_size = padded if kind.columns > COLUMNS else in_size
    weights = random_blocks((out_size, padded), kind, device)
    rows = torch.randn(num_rows, in_size).to(dtype).to(device)
    bias = torch.randn(out_size).to(dtype).to(device) if has_bias else None
    unpacked = dequantised(weights)[:, :in_size]
    if num_rows > 1:
        unpacked = unpacked.to(dtype)
    oracle = rows.double() @ unpacked.double().T + (bias.double() if bias is not None else 0)
    plain = rows.float() @ unpacked.float().T + (bias.float() if bias is not None else 0)

    with poisoned_memory():
        out = block_linear(rows, weights, bias, impl="triton")

    assert_as_exact(out, plain.to(dtype), oracle)


def check_many_rows_by_tiles(impl: str, device: str = "cpu") -> None:
    """More rows than the kernel takes multiply with unpacked tiles: the last one is smaller."""
    kind = KINDS[0]
    torch.manual_seed(0)
    weights = random_blocks((75, 96), kind, device)
    rows, bias = torch.randn(MAX_ROWS + 3, 90).to(device), torch.randn(75).to(device)
    own_bytes, module._TILE_BYTES = module._TILE_BYTES, 20 * 96 * 4
    try:
        out = block_linear(rows, weights, bias, impl=impl)
    finally:
        module._TILE_BYTES = own_bytes
    expected = rows.double() @ dequantised(weights)[:, :90].double().T + bias.double()
    assert torch.allclose(out.double(), expected, atol=1e-4)


def check_rows_beside_others(device: str = "cpu") -> None:
    """From 2 rows on, a row's product is the same to the bit, whatever else is computed."""
    torch.manual_seed(1)
    weights = random_blocks((40, 320), KINDS[0], device)
    rows = torch.randn(16, 300).half().to(device)
    together = block_linear(rows, weights, impl="triton")
    for count in (2, 5, 11):
        assert torch.equal(block_linear(rows[:count], weights, impl="triton"), together[:count])
