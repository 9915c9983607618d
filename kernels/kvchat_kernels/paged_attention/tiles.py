"""Which tile sizes, warps and stages each attention kernel runs with: fixed tables, no tuning runs.

Knows head dims, dtypes and row counts. Every tile named here is compiled for Hopper by a test.
"""

from dataclasses import dataclass

import torch

# Above this the accumulator and one pair of tiles no longer fit a program.
MAX_HEAD_DIM = 256
# A split is at least this long: below it merging costs more than the parallelism brings.
MIN_SPLIT = 256


# Splits that the merge takes at once: all of a lone sequence's on 8 KV heads, on 132 processors.
MERGE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program works: rows and keys of its tile, warps, and the pipeline's depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(dim: int) -> int:
    """Return the power of two a head dim is padded to; tensor cores take no fewer than 16."""
    return max(16, 1 << (dim - 1).bit_length())


def unsupported(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Return why no tile fits a layer of these head dims and this dtype; None if one does."""
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        return f"head dim {max(key_dim, value_dim)} is over {MAX_HEAD_DIM}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"there are no kernels for {str(dtype).removeprefix('torch.')}"
    return None


def split_tile(key_dim: int, value_dim: int, dtype: torch.dtype, num_rows: int) -> Tile:
    """Return the tile for `num_rows` rows of a KV head, whose keys are split among programs."""
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    widest = max(padded(key_dim), padded(value_dim))
    if dtype == torch.float32:
        # No tensor core keeps float32 whole: small tiles, whose operands fit the registers. With a
        # third stage Triton 3.6 spills two of them at head dim 128.
        return Tile(16, 16, 4, 2)
    # With four, two programs of a decode still share a multiprocessor's memory.
    num_stages = 4 if block_m == 16 else 3
    if widest <= 64:
        return Tile(block_m, 128 if block_m == 16 else 64, 4, num_stages)
    if widest <= 128:
        return Tile(block_m, 64, 4, num_stages)
    return Tile(block_m, 32, 4 if block_m <= 32 else 8, num_stages)


def prefill_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for long chunks."""
    widest = max(padded(key_dim), padded(value_dim))
    if dtype == torch.float32:
        # With a second stage Triton 3.7 spills two registers where values are wider than keys.
        return Tile(16, 16, 8, 2 if widest <= 128 else 1)
    return Tile(128, 64 if widest <= 128 else 32, 8, 3)


def merge_warps(value_dim: int) -> int:
    """Return the warps of the merge."""
    return 4 if padded(value_dim) <= 128 else 8
