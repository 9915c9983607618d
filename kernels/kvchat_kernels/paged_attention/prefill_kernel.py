"""Attention of many rows: one program per tile of rows loops over all keys that the rows see.

Tiles and the order of arithmetic are FlashAttention-2's (Dao, 2023). Keys are found through block
tables, and a tile's rows are all query heads of one KV head.
"""

import triton
import triton.language as tl

from kvchat_kernels.paged_attention.tile_kernel import (
    Pool,
    Scoring,
    Span,
    Table,
    attend_keys,
    find_part,
    first_visible,
    load_positions,
    load_rows,
    mean_of,
    new_tokens,
    no_keys,
)


@triton.jit
def count_tiles(
    query_starts_ptr, num_sequences, min_query_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return [B] the number of row tiles of each sequence, 0 for those of few new tokens."""
    index = tl.arange(0, BLOCK_B)
    there = index < num_sequences
    starts = tl.load(query_starts_ptr + index, mask=there, other=0)
    query_lens = tl.load(query_starts_ptr + index + 1, mask=there, other=0) - starts
    return tl.where(query_lens >= min_query_len, tl.cdiv(query_lens * GROUP, BLOCK_M), 0)


@triton.jit
def visible_slots(
    start, first_row, num_rows, span, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the slots visible to some row of a tile, [begin, end), and those visible to all of its
    rows, [all_begin, all_end), in the order begin, all_begin, all_end, end.

    start   the position of the sequence's first new token. Slots are positions
    """
    lowest = start + first_row // GROUP
    highest = start + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    begin = first_visible(lowest, span) // BLOCK_N * BLOCK_N
    end = highest + 1
    all_begin = tl.cdiv(first_visible(highest, span), BLOCK_N) * BLOCK_N
    all_begin = tl.minimum(all_begin, end)
    all_end = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, all_begin)
    return begin, all_begin, all_end, end


@triton.jit
def add_sink(top, weight, sinks_ptr, head, is_row):
    """Return the rows' sums of weights, [M], with that of each row's sink."""
    sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
    # Scores are in units of log2. A sink far above them makes the sum infinite, the mean 0.
    return weight + tl.exp2(sink * 1.4426950408889634 - top)


@triton.jit
def store_rows(out_ptr, offset, is_row, mean, VALUE_DIM: tl.constexpr):
    """Store the rows' outputs, in the output's dtype; `offset` [M] is that of each row."""
    dim = tl.arange(0, mean.shape[1])
    tl.store(
        out_ptr + offset[:, None] + dim[None, :],
        mean.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (dim[None, :] < VALUE_DIM),
    )


@triton.jit(
    do_not_specialize=["num_sequences", "min_query_len", "tables_stride", "positions_stride"]
)
def paged_attention_prefill_kernel(
    query_ptr, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, out_ptr, tables_ptr,
    positions_ptr, query_starts_ptr, context_lens_ptr, scale, cap, num_sequences, min_query_len,
    query_stride_token, query_stride_head, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, out_stride_token, out_stride_head,
    tables_stride, positions_stride, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Attend one tile of rows of one KV head; skips sequences of under `min_query_len` new tokens.

    Grid: (KV heads, row tiles of all handled sequences). The last tiles of a sequence see the most
    keys; they start first, so that no long tile runs alone at the end.
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    counts = count_tiles(query_starts_ptr, num_sequences, min_query_len, GROUP, BLOCK_M, BLOCK_B)
    if tile >= tl.sum(counts, 0):
        return
    sequence, nth = find_part(counts, tile)
    first_row = nth * BLOCK_M
    first_token, query_len = new_tokens(query_starts_ptr, sequence)
    start = tl.load(context_lens_ptr + sequence) - query_len
    num_rows = query_len * GROUP
    row = first_row + tl.arange(0, BLOCK_M)
    position = start + row // GROUP
    begin, all_begin, all_end, end = visible_slots(
        start, first_row, num_rows, Span(WINDOW=WINDOW, CHUNK=CHUNK), GROUP, BLOCK_M, BLOCK_N
    )
    FIRST_PART: tl.constexpr = (
        2 if positions_ptr is not None else 0 if WINDOW > 0 or CHUNK > 0 else 1
    )
    if positions_ptr is not None:
        # Any slot may be empty, and where a window begins only a search tells: mask all of them.
        all_end = 0
        positions_ptr += sequence.to(tl.int64) * positions_stride
        position = load_positions(positions_ptr, position, end)
    query = load_rows(
        query_ptr, row, first_token, num_rows, kv_head, query_stride_token, query_stride_head,
        GROUP, KEY_DIM, BLOCK_K,
    )  # fmt: skip
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    key_ptr += kv_head * key_stride_head
    value_ptr += kv_head * value_stride_head
    if key_scales_ptr is not None:
        key_scales_ptr += kv_head * (KEY_DIM // KEY_GROUP)
        value_scales_ptr += kv_head * (VALUE_DIM // VALUE_GROUP)
    softmax = no_keys(BLOCK_M, BLOCK_V)
    # Three ranges: a window's start (masked), keys that every row sees, the diagonal (masked).
    for part in tl.static_range(FIRST_PART, 3):
        softmax = attend_keys(
            softmax, query, position,
            begin if part == 0 else (all_begin if part == 1 else all_end),
            all_begin if part == 0 else (all_end if part == 1 else end),
            Table(blocks_ptr=table_ptr, positions_ptr=positions_ptr, BLOCK_SIZE=BLOCK_SIZE),
            Pool(ptr=key_ptr, scales_ptr=key_scales_ptr, stride_block=key_stride_block,
                 stride_slot=key_stride_slot, DIM=KEY_DIM, GROUP=KEY_GROUP, FORM=KEY_FORM,
             BLOCK_DIM=BLOCK_K),
            Pool(ptr=value_ptr, scales_ptr=value_scales_ptr, stride_block=value_stride_block,
                 stride_slot=value_stride_slot, DIM=VALUE_DIM, GROUP=VALUE_GROUP,
                 FORM=VALUE_FORM, BLOCK_DIM=BLOCK_V),
            Span(WINDOW=WINDOW, CHUNK=CHUNK),
            Scoring(scale=scale, cap=cap, HAS_SOFTCAP=HAS_SOFTCAP, PRECISION=PRECISION),
            BLOCK_N, MASKED=part != 1,
        )  # fmt: skip
    total, top, weight = softmax
    head = kv_head * GROUP + row % GROUP
    is_row = row < num_rows
    if HAS_SINKS:
        weight = add_sink(top, weight, sinks_ptr, head, is_row)
    mean = mean_of(total, weight)
    offset = (first_token + row // GROUP).to(tl.int64) * out_stride_token + head * out_stride_head
    store_rows(out_ptr, offset, is_row, mean, VALUE_DIM)
