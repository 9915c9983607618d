"""Attention of many rows: one program per tile of rows loops over all keys that the rows see.

Tiles and the order of arithmetic are FlashAttention-2's (Dao, 2023). Keys are found through block
tables, and a tile's rows are all query heads of one KV head.
"""

import triton
import triton.language as tl

from kvchat_kernels.paged_attention.tile_kernel import (
    attend_keys,
    first_visible,
    load_positions,
    load_rows,
)


@triton.jit(
    do_not_specialize=["num_sequences", "min_query_len", "tables_stride", "positions_stride"]
)
def paged_attention_prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    sinks_ptr,
    out_ptr,
    tables_ptr,
    positions_ptr,
    query_starts_ptr,
    context_lens_ptr,
    scale,
    cap,
    num_sequences,
    min_query_len,
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    out_stride_token,
    out_stride_head,
    tables_stride,
    positions_stride,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Attend one tile of rows of one KV head; skips sequences of under `min_query_len` new tokens.

    Grid: (KV heads, row tiles of all handled sequences). The last tiles of a sequence see the most
    keys; they start first, so that no long tile runs alone at the end.
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    index = tl.arange(0, BLOCK_B)
    there = index < num_sequences
    starts = tl.load(query_starts_ptr + index, mask=there, other=0)
    query_lens = tl.load(query_starts_ptr + index + 1, mask=there, other=0) - starts
    counts = tl.where(query_lens >= min_query_len, tl.cdiv(query_lens * GROUP, BLOCK_M), 0)
    if tile >= tl.sum(counts, 0):
        return
    is_before = tl.cumsum(counts, 0) <= tile
    sequence = tl.sum(is_before.to(tl.int32), 0)
    first_row = (tile - tl.sum(tl.where(is_before, counts, 0), 0)) * BLOCK_M

    first_token = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_token
    start = tl.load(context_lens_ptr + sequence) - query_len
    num_rows = query_len * GROUP
    row = first_row + tl.arange(0, BLOCK_M)
    position = start + row // GROUP
    # Slots visible to some row: [begin, end). Visible to all of them: [all_begin, all_end).
    lowest = start + first_row // GROUP
    highest = start + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    begin = first_visible(lowest, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    end = highest + 1
    all_begin = tl.cdiv(first_visible(highest, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
    all_begin = tl.minimum(all_begin, end)
    all_end = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, all_begin)
    FIRST_PART: tl.constexpr = (
        2 if positions_ptr is not None else 0 if WINDOW > 0 or CHUNK > 0 else 1
    )
    if positions_ptr is not None:
        # Any slot may be empty, and where a window begins only a search tells: mask all of them.
        all_end = 0
        positions_ptr += sequence.to(tl.int64) * positions_stride
        position = load_positions(positions_ptr, position, end)

    query = load_rows(
        query_ptr,
        row,
        first_token,
        num_rows,
        kv_head,
        query_stride_token,
        query_stride_head,
        GROUP,
        KEY_DIM,
        BLOCK_K,
    )
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    key_ptr += kv_head * key_stride_head
    value_ptr += kv_head * value_stride_head
    if key_scales_ptr is not None:
        key_scales_ptr += kv_head * (key_stride_head // KEY_GROUP)
        value_scales_ptr += kv_head * (value_stride_head // VALUE_GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    # Three ranges: a window's start (masked), keys that every row sees, the diagonal (masked).
    for part in tl.static_range(FIRST_PART, 3):
        total, top, weight = attend_keys(
            total,
            top,
            weight,
            query,
            position,
            begin if part == 0 else (all_begin if part == 1 else all_end),
            all_begin if part == 0 else (all_end if part == 1 else end),
            table_ptr,
            positions_ptr,
            key_ptr,
            value_ptr,
            key_scales_ptr,
            value_scales_ptr,
            scale,
            cap,
            key_stride_block,
            key_stride_slot,
            value_stride_block,
            value_stride_slot,
            BLOCK_SIZE,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_K,
            BLOCK_V,
            BLOCK_N,
            WINDOW,
            CHUNK,
            HAS_SOFTCAP,
            PRECISION,
            KEY_GROUP,
            VALUE_GROUP,
            MASKED=part != 1,
        )

    dim = tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + row % GROUP
    is_row = row < num_rows
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        # Scores are in units of log2. A sink far above them makes the sum infinite, the mean 0.
        weight += tl.exp2(sink * 1.4426950408889634 - top)
    mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    offset = (first_token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    tl.store(
        out_ptr + offset[:, None] + dim[None, :],
        mean.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dim[None, :] < VALUE_DIM),
    )
