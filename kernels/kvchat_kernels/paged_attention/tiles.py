"""The tile sizes, warps and stages of the attention kernels: fixed tables, without tuning runs.

There are two tables. One is for GPUs on which a program may take 200 KB of shared memory or more
(H100, H200, B200), the other for all others from 99 KB on: RTX 30, 40 and 50, A10, L4, L40S, and
the A100, on which two programs of that table share a multiprocessor. A test compiles every tile for
the kinds of GPU that people have.
"""

from dataclasses import dataclass, replace

import torch

from kvchat_kernels.kv_code import INT8, KvCode

# Above this the accumulator and one pair of tiles do not fit in a program's registers and memory.
MAX_HEAD_DIM = 512
# The smallest split, in keys: with shorter ones merging costs more than the parallelism gains.
MIN_SPLIT = 256
# Splits that the merge handles at once: all of a single sequence on 8 KV heads and 132 processors.
MERGE_BLOCK = 32
# What a program of the large tiles, and of the small ones, may take of shared memory. These GPUs
# offer 227 KB and 99 KB.
_LARGE_BYTES, _SMALL_BYTES = 200 * 1024, 99 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and keys of a program's tile, its warps, and the depth of its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Card:
    """What the tiles and splits depend on.

    processors     the GPU's multiprocessors
    shared_bytes   shared memory that one program may take, `shared_memory_per_block_optin`
    capability     its compute capability times 10; 0 for what is no GPU
    """

    processors: int
    shared_bytes: int
    capability: int = 0

    @property
    def is_large(self) -> bool:
        return self.shared_bytes >= _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a layer's attention, the dtype of its queries, and the code of its pools, which
    without one have that dtype too.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    code: KvCode | None = None


# Tiles by the padded head dim: 16 rows, 32 rows, 64 rows, prefill.
_Row = tuple[Tile, ...]
# With four stages, two programs of a decode still fit in a multiprocessor's shared memory.
_LARGE: dict[int, _Row] = {
    64: (Tile(16, 128, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: (Tile(16, 64, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    256: (Tile(16, 32, 4, 4), Tile(32, 32, 4, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 3)),
    512: (Tile(16, 16, 8, 3), Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
}
# Without instructions that read operands from shared memory, products need more registers: a
# prefill tile has half the keys or rows.
_SMALL: dict[int, _Row] = {
    64: (Tile(16, 128, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 3), Tile(128, 64, 8, 2)),
    128: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 3), Tile(128, 32, 8, 2)),
    256: (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 8, 2), Tile(64, 16, 8, 3)),
    512: (Tile(16, 16, 8, 2), Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(32, 16, 8, 2)),
}
# Tensor cores do not compute full float32, so small tiles whose operands fit in registers. With a
# third stage Triton 3.6 spills two registers at head dim 128, and with a second stage Triton 3.7
# spills two in a prefill if values are wider than keys.
_WHOLE: dict[int, _Row] = {
    64: (*[Tile(16, 16, 4, 2)] * 3, Tile(16, 16, 8, 2)),
    128: (*[Tile(16, 16, 4, 2)] * 3, Tile(16, 16, 8, 2)),
    256: (*[Tile(16, 16, 4, 2)] * 3, Tile(16, 16, 8, 1)),
    512: (Tile(16, 16, 8, 1),) * 4,
}

# The same over KV in few bits, whose tiles are restored in registers between memory and product: a
# tile has fewer keys, or more warps.
_LARGE_CODED: dict[int, _Row] = {
    64: (Tile(16, 64, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: (Tile(16, 32, 4, 4), Tile(32, 32, 4, 4), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    256: (Tile(16, 32, 8, 4), Tile(32, 32, 8, 3), Tile(64, 32, 8, 3), Tile(64, 16, 8, 3)),
    512: (Tile(16, 16, 8, 3), *[Tile(16, 16, 8, 2)] * 3),
}
# For compute capability 10.0 (B200), where Triton 3.7 spilled registers at three places of these.
# It still spills four where tables are private and heads have 512 dims, but for prefills.
_BLACKWELL_CODED = _LARGE_CODED | {
    64: (Tile(16, 64, 4, 4), Tile(32, 32, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: (Tile(16, 32, 4, 3), Tile(32, 32, 4, 4), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    512: (Tile(16, 16, 8, 2),) * 4,
}
_SMALL_CODED: dict[int, _Row] = {
    64: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 2)),
    128: (Tile(16, 32, 4, 3), Tile(32, 32, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 8, 2)),
    256: (Tile(16, 32, 8, 3), Tile(32, 32, 8, 3), Tile(32, 32, 8, 3), Tile(32, 32, 8, 2)),
    512: (Tile(16, 16, 8, 2),) * 4,
}
# Of other codes than `int8` some tiles took more registers than there are.
_WIDEST_OTHER = (Tile(16, 16, 8, 1),) * 4
_LARGE_OTHER = {
    128: (Tile(16, 32, 4, 4), Tile(32, 32, 8, 4), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    256: (Tile(16, 32, 8, 4), Tile(32, 32, 8, 3), Tile(64, 32, 8, 3), Tile(64, 32, 8, 2)),
    512: _WIDEST_OTHER,
}
_SMALL_OTHER = {
    64: (Tile(16, 64, 8, 3), Tile(32, 64, 4, 3), Tile(64, 32, 8, 3), Tile(128, 32, 8, 2)),
    128: (Tile(16, 32, 4, 3), Tile(32, 32, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 8, 1)),
    512: _WIDEST_OTHER,
}
_WHOLE_CODED: dict[int, _Row] = {
    64: (Tile(16, 16, 8, 2),) * 4,
    128: (Tile(16, 16, 8, 2),) * 4,
    256: (*[Tile(16, 16, 4, 1)] * 3, Tile(16, 16, 16, 1)),
    512: (Tile(16, 16, 8, 1),) * 4,
}


def padded(dim: int) -> int:
    """Return the power of two that a head dim is padded to; tensor cores need at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def unsupported(shape: LayerShape, card: Card) -> str | None:
    """Return why no tile fits a layer, as the end of a sentence; None if one does."""
    if max(shape.key_dim, shape.value_dim) > MAX_HEAD_DIM:
        return f"head dim {max(shape.key_dim, shape.value_dim)} is over {MAX_HEAD_DIM}"
    if shape.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"there are no kernels for {str(shape.dtype).removeprefix('torch.')}"
    if card.shared_bytes < _SMALL_BYTES:
        return (
            f"a program may take {card.shared_bytes >> 10} KiB of this GPU's shared memory, "
            f"less than the {_SMALL_BYTES >> 10} KiB that the kernels need"
        )
    return None


def tiles_of(
    key_dim: int, value_dim: int, dtype: torch.dtype, card: Card, code: KvCode | None = None
) -> _Row:
    """Return the tiles of a layer: for 16, 32 and 64 rows of split keys, and for a prefill."""
    table = _tables(dtype, card) if code is None else _coded_tables(dtype, card, code)
    return table[max(64, padded(key_dim), padded(value_dim))]


def _tables(dtype: torch.dtype, card: Card) -> dict[int, _Row]:
    if dtype == torch.float32:
        return _WHOLE
    return _LARGE if card.is_large else _SMALL


def _coded_tables(dtype: torch.dtype, card: Card, code: KvCode) -> dict[int, _Row]:
    if dtype == torch.float32:
        return _WHOLE_CODED
    if card.is_large:
        table, others = _LARGE_CODED, _LARGE_OTHER
        if card.capability == 100:
            table, others = _BLACKWELL_CODED, {512: _WIDEST_OTHER}
    else:
        table, others = _SMALL_CODED, _SMALL_OTHER
    return table if code == INT8 else table | others


def split_tile(tiles: _Row, num_rows: int) -> Tile:
    """Return the tile for `num_rows` rows of a KV head, whose keys are split among programs."""
    return tiles[0 if num_rows <= 16 else 1 if num_rows <= 32 else 2]


def prefill_tile(tiles: _Row) -> Tile:
    """Return the tile of the prefill kernel."""
    return tiles[3]


def over_private_tables(tiles: _Row) -> _Row:
    """Return the tiles for private tables: positions of keys are in registers too, so that there is
    room for half the keys beside more than 16 rows.
    """
    return tuple(
        replace(tile, block_n=max(16, tile.block_n // 2)) if tile.block_m > 16 else tile
        for tile in tiles
    )


def merge_warps(value_dim: int) -> int:
    """Return the number of warps of the merge kernel."""
    return 4 if padded(value_dim) <= 128 else 8
