"""The tile sizes, warps and stages of the attention kernels: fixed tables, without tuning runs.

A test compiles every tile for Hopper.
"""

from dataclasses import dataclass

import torch

# Above this the accumulator and one pair of tiles do not fit in a program's registers and memory.
MAX_HEAD_DIM = 256
# The smallest split, in keys: with shorter ones merging costs more than the parallelism gains.
MIN_SPLIT = 256


# Splits that the merge handles at once: all of a single sequence on 8 KV heads and 132 processors.
MERGE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and keys of a program's tile, its warps, and the depth of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(dim: int) -> int:
    """Return the power of two that a head dim is padded to; tensor cores need at least 16."""
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
        # Tensor cores do not compute full float32, so small tiles whose operands fit in registers.
        # With a third stage Triton 3.6 spills two registers at head dim 128.
        return Tile(16, 16, 4, 2)
    # With four stages, two programs of a decode still fit in a multiprocessor's shared memory.
    num_stages = 4 if block_m == 16 else 3
    if widest <= 64:
        return Tile(block_m, 128 if block_m == 16 else 64, 4, num_stages)
    if widest <= 128:
        return Tile(block_m, 64, 4, num_stages)
    return Tile(block_m, 32, 4 if block_m <= 32 else 8, num_stages)


def prefill_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of the prefill kernel."""
    widest = max(padded(key_dim), padded(value_dim))
    if dtype == torch.float32:
        # With a second stage Triton 3.7 spills two registers if values are wider than keys.
        return Tile(16, 16, 8, 2 if widest <= 128 else 1)
    return Tile(128, 64 if widest <= 128 else 32, 8, 3)


def merge_warps(value_dim: int) -> int:
    """Return the number of warps of the merge kernel."""
    return 4 if padded(value_dim) <= 128 else 8
