"""What products with block weights must do, by the Triton kernels and by plain torch.

Called where Triton interprets, with tensors on the CPU, and on a CUDA device.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.linear import block_linear as module
from kvchat_kernels.linear.block_linear import MAX_ROWS, block_linear
from kvchat_kernels.linear.blocks import COLUMNS, STEP_COLUMNS, BlockWeights, dequantised
from support.rounding import assert_as_exact, poisoned_memory


@dataclass(frozen=True)
class Kind:
    """Bits, columns of a block, dtype of the scales, and whether there are minimums.

    Scales of int8 have steps.
    """

    bits: int
    block: int
    dtype: torch.dtype
    has_minimums: bool

    @property
    def has_steps(self) -> bool:
        return self.dtype == torch.int8

    @property
    def columns(self) -> int:
        """What a number of columns is a multiple of."""
        return STEP_COLUMNS if self.has_steps else COLUMNS


KINDS = (
    Kind(4, 32, torch.float16, True),
    Kind(4, 32, torch.float32, True),
    Kind(4, 32, torch.float16, False),
    Kind(8, 32, torch.float16, False),
    Kind(8, 32, torch.float32, True),
    Kind(8, 16, torch.float32, False),
    Kind(4, 32, torch.int8, True),
    Kind(8, 32, torch.int8, True),
    Kind(8, 16, torch.int8, False),
)


def random_blocks(shape: tuple[int, int], kind: Kind, device: str) -> BlockWeights:
    """Every level that a file may hold; scales so that weights are about 1."""
    num_out, num_in = shape
    if kind.bits == 4:
        levels = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    else:
        levels = torch.randint(-128, 128, shape, dtype=torch.int8)
    scales = torch.randn(num_out, num_in // kind.block) / (8 if kind.bits == 4 else 64)
    minimums = torch.randn_like(scales) if kind.has_minimums else None
    steps = None
    if kind.has_steps:
        scales, minimums = scales.mul(1000), None if minimums is None else minimums.mul(32)
        sizes = [1 / 1000, 1 / 32][: 1 + kind.has_minimums]
        steps = torch.rand(num_out, num_in // STEP_COLUMNS, len(sizes)) * torch.tensor(sizes)
        scales = scales.clamp(-128, 127)
    return BlockWeights(
        kind.bits,
        kind.block,
        levels.to(device),
        scales.to(kind.dtype).to(device),
        None if minimums is None else minimums.to(kind.dtype).to(device),
        None if steps is None else steps.half().to(device),
    )


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
    in_size = padded if kind.has_steps else in_size
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
