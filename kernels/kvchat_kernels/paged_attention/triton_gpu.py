"""Paged attention on a GPU: plans the kernels of a step and their parameters.

Equal to `reference.py` within rounding. Reads no device memory, and on the host only the query
lengths. So a captured step may be replayed with other context lengths and block tables in the same
tensors, and with DeviceSequences also with other query lengths within their bound. The output of a
row with a context of 0 tokens is zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvchat_kernels.coded_kv_write.reference import CodedPools
from kvchat_kernels.kv_code import Form, KvCode
from kvchat_kernels.launch import Launch, next_power_of_2
from kvchat_kernels.paged_attention.prefill_kernel import paged_attention_prefill_kernel
from kvchat_kernels.paged_attention.sequences import (
    FULL,
    AttentionSpan,
    DeviceSequences,
    Scoring,
    Sequences,
)
from kvchat_kernels.paged_attention.split_kernel import (
    merge_splits_kernel,
    paged_attention_split_kernel,
)
from kvchat_kernels.paged_attention.tile_kernel import NATIVE_E4M3
from kvchat_kernels.paged_attention.tiles import (
    MERGE_BLOCK,
    MIN_SPLIT,
    Card,
    Tile,
    merge_warps,
    over_private_tables,
    padded,
    prefill_tile,
    split_tile,
    tiles_of,
)

# Queries of up to this many tokens always use split keys; longer ones do if they fill few programs.
MAX_SPLIT_QUERY = 16
_MAX_SPLIT_CHUNK = 256
# The splits give each multiprocessor about this many programs, so one can load while one computes.
_PROGRAMS_PER_PROCESSOR = 2
_LOG2_E = math.log2(math.e)
# From this compute capability on, times 10, a GPU reads e4m3.
_E4M3_CAPABILITY = 89


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one step: the arguments of `paged_attention`, and its output.

    Keys and values are floats in the query's dtype; or numbers of a code with scales, the tensors
    of a `CodedKv`, all contiguous.
    """

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    sequences: Sequences
    scoring: Scoring
    out: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    code: KvCode | None = None

    @property
    def groups(self) -> tuple[int, int]:
        """How many numbers of a key, and of a value, share a scale; 0 without scales."""
        if self.key_scales is None or self.value_scales is None:
            return 0, 0
        key_dim, value_dim = self.dims
        return key_dim // self.key_scales.shape[3], value_dim // self.value_scales.shape[3]

    def tiles(self, card: Card) -> tuple[Tile, ...]:
        """Return the layer's tiles: for 16, 32 and 64 rows of split keys, and for a prefill."""
        tiles = tiles_of(*self.dims, self.query.dtype, card, self.code)
        return tiles if self.positions is None else over_private_tables(tiles)

    @property
    def num_kv_heads(self) -> int:
        return self.key_pool.shape[2]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.num_kv_heads

    @property
    def dims(self) -> tuple[int, int]:
        widths = self.key_pool.shape[3], self.value_pool.shape[3]
        if self.code is None:
            return widths
        return widths[0] * 8 // self.code.keys.bits, widths[1] * 8 // self.code.values.bits

    def forms(self, card: Card) -> tuple[str, str]:
        """What keys and values are stored as; "" for floats of the query's dtype."""
        if self.code is None:
            return "", ""
        forms = self.code.keys.form, self.code.values.form
        has_e4m3 = card.capability >= _E4M3_CAPABILITY
        key_form, value_form = (
            NATIVE_E4M3 if form is Form.E4M3 and has_e4m3 else form.value for form in forms
        )
        return key_form, value_form

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each sequence; for DeviceSequences the upper bound."""
        if isinstance(self.sequences, DeviceSequences):
            return (self.sequences.max_query_len,) * self.sequences.block_tables.shape[0]
        return self.sequences.query_lens

    @property
    def context_lens(self) -> torch.Tensor:
        """[num_sequences] int32 on the device."""
        if isinstance(self.sequences, DeviceSequences):
            return self.sequences.context_lens
        return self.sequences.context_lens_device

    @property
    def positions(self) -> torch.Tensor | None:
        """The positions of slots; None if all tables are shared ones."""
        return None if isinstance(self.sequences, DeviceSequences) else self.sequences.positions

    @property
    def walked_span(self) -> AttentionSpan:
        """The span that bounds which slots are read; of private tables all are."""
        return self.scoring.span if self.positions is None else FULL


def paged_attention_triton(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes.

    All tensors have one dtype, and the pools' last dimension has a stride of 1.
    """
    assert query.dtype == key_pool.dtype == value_pool.dtype
    assert key_pool.stride(-1) == value_pool.stride(-1) == 1
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(*query.shape[:2], value_pool.shape[3])
    call = AttentionCall(query, key_pool, value_pool, sequences, scoring, out)
    for launch in plan_launches(call, card_of(query.device)):
        launch.run()
    return out


def paged_attention_coded_triton(
    query: torch.Tensor,
    pools: CodedPools,
    code: KvCode,
    sequences: Sequences,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend over KV in few bits with scales, the tensors of a `CodedKv`; otherwise as
    `paged_attention_triton`. Queries are turned where keys are, and so is the result where values
    are.

    A tile of keys or values is restored in registers, rounded once to the query's dtype.
    """
    keys, key_scales, values, value_scales = pools
    assert all(pool.is_contiguous() for pool in pools)
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = query.new_empty(*query.shape[:2], values.shape[3] * 8 // code.values.bits)
    call = AttentionCall(
        query, keys, values, sequences, scoring, out, key_scales, value_scales, code
    )
    for launch in plan_launches(call, card_of(query.device)):
        launch.run()
    return out


@cache
def card_of(device: torch.device) -> Card:
    """Return what tiles depend on; a small card for a CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return Card(4, 99 << 10)
    properties = torch.cuda.get_device_properties(device)
    usual = properties.shared_memory_per_block
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", usual)
    capability = properties.major * 10 + properties.minor
    return Card(properties.multi_processor_count, shared_bytes, capability)


def plan_launches(call: AttentionCall, card: Card) -> Iterator[Launch]:
    """Yield the kernels that together write every row of the step, in order."""
    query_lens = call.query_lens
    if isinstance(call.sequences, DeviceSequences):
        # Every sequence may be short or long at a replay, so one launch must handle all lengths.
        yield from split_launches(call, 1, max(query_lens), card)
        return
    if min(query_lens) <= MAX_SPLIT_QUERY:
        yield from split_launches(call, 1, MAX_SPLIT_QUERY, card)
    longest = max(query_lens)
    if longest > MAX_SPLIT_QUERY:
        if _fills_few_processors(call, card):
            yield from split_launches(call, MAX_SPLIT_QUERY + 1, longest, card)
        else:
            tile = prefill_tile(call.tiles(card))
            yield prefill_launch(call, MAX_SPLIT_QUERY + 1, tile, card)


def _fills_few_processors(call: AttentionCall, card: Card) -> bool:
    """Return whether the prefill kernel would leave most of the GPU idle for the long queries.

    It runs one program per tile of rows, however long the contexts are. Very long queries use it in
    any case, because the partial results of splits would be large.
    """
    if max(call.query_lens) > _MAX_SPLIT_CHUNK:
        return False
    block_m = prefill_tile(call.tiles(card)).block_m
    programs = _count_tiles(call, MAX_SPLIT_QUERY + 1, block_m) * call.num_kv_heads
    return programs * _PROGRAMS_PER_PROCESSOR <= card.processors


def _count_tiles(call: AttentionCall, min_query_len: int, block_m: int) -> int:
    lengths = call.query_lens
    return sum(-(-n * call.group // block_m) for n in lengths if n >= min_query_len)


def split_launches(
    call: AttentionCall,
    min_query_len: int,
    max_query_len: int,
    card: Card,
    tile: Tile | None = None,
    min_split: int = MIN_SPLIT,
) -> Iterator[Launch]:
    """Yield the split and merge kernels, for the sequences within the two query lengths.

    tile, min_split   override those of `tiles.py`, for tests
    """
    ours = [n for n in call.query_lens if min_query_len <= n <= max_query_len]
    max_rows = max(ours) * call.group
    tile = tile or split_tile(call.tiles(card), max_rows)
    programs = -(-max_rows // tile.block_m) * call.num_kv_heads
    num_splits = max(1, _PROGRAMS_PER_PROCESSOR * card.processors // programs)
    shape = (num_splits + len(ours), max_rows, call.num_kv_heads)
    division = {
        "partial_ptr": call.query.new_empty(*shape, call.dims[1], dtype=torch.float32),
        "lse_ptr": call.query.new_empty(shape, dtype=torch.float32),
        "query_starts_ptr": call.sequences.query_starts,
        "context_lens_ptr": call.context_lens,
        "num_sequences": len(call.query_lens),
        "num_splits": num_splits,
        "min_query_len": min_query_len,
        "max_query_len": max(ours),
        "NUM_KV_HEADS": call.num_kv_heads,
        "BLOCK_N": tile.block_n,
        "BLOCK_B": _sequence_block(call),
        "MIN_SPLIT": min_split,
    }
    split = {**_inputs(call, card), **division, "BLOCK_M": tile.block_m}
    yield _launch(paged_attention_split_kernel, (programs, shape[0]), split, tile)
    merge = {**_output(call), **division, **_shared(call, call.walked_span)}
    merge["BLOCK_S"] = MERGE_BLOCK
    warps = merge_warps(call.dims[1])
    yield Launch(merge_splits_kernel, tuple(call.query.shape[:2]), merge, warps, num_stages=2)


def prefill_launch(call: AttentionCall, min_query_len: int, tile: Tile, card: Card) -> Launch:
    """Return the prefill kernel, for all sequences of at least `min_query_len` new tokens."""
    values = {
        **_inputs(call, card),
        **_output(call),
        "num_sequences": len(call.query_lens),
        "min_query_len": min_query_len,
        "query_starts_ptr": call.sequences.query_starts,
        "context_lens_ptr": call.context_lens,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_B": _sequence_block(call),
    }
    grid = (call.num_kv_heads, _count_tiles(call, min_query_len, tile.block_m))
    return _launch(paged_attention_prefill_kernel, grid, values, tile)


def _launch(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], tile: Tile) -> Launch:
    return Launch(kernel, grid, values, tile.num_warps, tile.num_stages)


def _sequence_block(call: AttentionCall) -> int:
    return max(16, next_power_of_2(len(call.query_lens)))


def _shared(call: AttentionCall, span: AttentionSpan) -> dict[str, Any]:
    """The parameters that all kernels take."""
    return {
        "GROUP": call.group,
        "VALUE_DIM": call.dims[1],
        "WINDOW": span.window or 0,
        "CHUNK": span.chunk or 0,
        "BLOCK_V": padded(call.dims[1]),
    }


def _inputs(call: AttentionCall, card: Card) -> dict[str, Any]:
    """The parameters of the kernels that read keys. Scores are in units of log2."""
    scale, cap, softcap = call.scoring.scale * _LOG2_E, 0.0, call.scoring.softcap
    if softcap is not None:
        scale, cap = scale * 2 / softcap, softcap * _LOG2_E
    query_strides = call.query.stride()
    key_strides, value_strides = call.key_pool.stride(), call.value_pool.stride()
    return {
        **_shared(call, call.scoring.span),
        "query_ptr": call.query,
        "key_ptr": call.key_pool,
        "value_ptr": call.value_pool,
        "key_scales_ptr": _bits(call.key_scales),
        "value_scales_ptr": _bits(call.value_scales),
        "tables_ptr": call.sequences.block_tables,
        "positions_ptr": call.positions,
        "scale": scale,
        "cap": cap,
        "query_stride_token": query_strides[0],
        "query_stride_head": query_strides[1],
        "key_stride_block": key_strides[0],
        "key_stride_slot": key_strides[1],
        "key_stride_head": key_strides[2],
        "value_stride_block": value_strides[0],
        "value_stride_slot": value_strides[1],
        "value_stride_head": value_strides[2],
        "tables_stride": call.sequences.block_tables.stride(0),
        "positions_stride": call.positions.stride(0) if call.positions is not None else 0,
        "KEY_DIM": call.dims[0],
        "BLOCK_SIZE": call.sequences.block_size,
        "HAS_SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if call.query.dtype == torch.float32 else "tf32",
        "KEY_GROUP": call.groups[0],
        "VALUE_GROUP": call.groups[1],
        "KEY_FORM": call.forms(card)[0],
        "VALUE_FORM": call.forms(card)[1],
        "BLOCK_K": padded(call.dims[0]),
    }


def _bits(scales: torch.Tensor | None) -> torch.Tensor | None:
    """Return bfloat16 scales as int16, which kernels widen to float32 by a shift."""
    return scales.view(torch.int16) if scales is not None else None


def _output(call: AttentionCall) -> dict[str, Any]:
    """The parameters of the kernels that write rows."""
    return {
        "sinks_ptr": call.scoring.sinks,
        "out_ptr": call.out,
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "HAS_SINKS": call.scoring.sinks is not None,
    }
