"""Attention of a few rows to long contexts: keys are split among programs, then results merged.

The kernels read lengths and tables from device memory and compute the splits on the device, so a
captured launch stays correct when they change. README.md derives the division.
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
def divide_keys(
    query_starts_ptr, context_lens_ptr, num_sequences, num_splits, min_query_len, max_query_len,
    span, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Return [B] the number of splits of each sequence, and the scalar length of a split in slots.

    Sequences with fewer than `min_query_len` or more than `max_query_len` new tokens get none. All
    splits of a step have the same length, so a long sequence gets many. In total there are at most
    `num_splits` + the number of handled sequences. With a window or chunks, slots are positions.
    """
    sequence = tl.arange(0, BLOCK_B)
    there = sequence < num_sequences
    start = tl.load(query_starts_ptr + sequence, mask=there, other=0)
    query_len = tl.load(query_starts_ptr + sequence + 1, mask=there, other=0) - start
    context_len = tl.load(context_lens_ptr + sequence, mask=there, other=0)
    first = first_visible(tl.maximum(context_len - query_len, 0), span)
    is_ours = there & (query_len >= min_query_len) & (query_len <= max_query_len)
    num_keys = tl.where(is_ours, context_len - first, 0)
    fair = tl.cdiv(tl.sum(num_keys, 0), num_splits)
    split_len = tl.maximum(tl.cdiv(fair, BLOCK_N) * BLOCK_N, MIN_SPLIT)
    return tl.cdiv(num_keys, split_len), split_len


@triton.jit
def slots_of_split(nth, split_len, query_len, context_len, span):
    """Return the slots [begin, end) of a sequence's nth split."""
    first = first_visible(tl.maximum(context_len - query_len, 0), span)
    begin = first + nth * split_len
    return begin, tl.minimum(begin + split_len, context_len)


@triton.jit
def place_of_row(split, row, max_query_len, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """Return where a row's results begin in [splits, max_query_len * GROUP, KV heads]."""
    return (split.to(tl.int64) * max_query_len * GROUP + row) * NUM_KV_HEADS


@triton.jit
def store_split(partial_ptr, lse_ptr, place, is_row, mean, top, weight, VALUE_DIM: tl.constexpr):
    """Store the rows' mean of the values of a split, and the log2 of the sum of their weights.

    A row that sees no key of this split has weight 0: its mean is 0 and its logarithm -inf.
    """
    dim = tl.arange(0, mean.shape[1])
    tl.store(
        partial_ptr + place[:, None] * VALUE_DIM + dim[None, :],
        mean,
        mask=is_row[:, None] & (dim[None, :] < VALUE_DIM),
    )
    tl.store(lse_ptr + place, top + tl.log2(weight), mask=is_row)


# do_not_specialize: Triton would compile a new kernel when such a value is 1 or a multiple of 16.
@triton.jit(
    do_not_specialize=[
        *("num_sequences", "num_splits", "min_query_len", "max_query_len"),
        *("tables_stride", "positions_stride"),
    ]
)
def paged_attention_split_kernel(
    query_ptr, key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, positions_ptr,
    query_starts_ptr, context_lens_ptr, partial_ptr, lse_ptr, scale, cap, num_sequences, num_splits,
    min_query_len, max_query_len, query_stride_token, query_stride_head, key_stride_block,
    key_stride_slot, key_stride_head, value_stride_block, value_stride_slot, value_stride_head,
    tables_stride, positions_stride, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend the rows of one KV head of one sequence to one split of its keys.

    Grid: (row tiles * KV heads, num_splits + handled sequences). Writes the rows' weighted mean of
    the values, [splits, max_query_len * GROUP, KV heads, VALUE_DIM] float32, and the log2 of the
    sum of their weights, the same shape without the last dimension.
    """
    # Of private tables all slots are walked: where a window begins among them, only a search tells.
    WALKED_WINDOW: tl.constexpr = WINDOW if positions_ptr is None else 0
    WALKED_CHUNK: tl.constexpr = CHUNK if positions_ptr is None else 0
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row_tile = tl.program_id(0) // NUM_KV_HEADS
    split = tl.program_id(1)
    counts, split_len = divide_keys(
        query_starts_ptr, context_lens_ptr, num_sequences, num_splits, min_query_len, max_query_len,
        Span(WINDOW=WALKED_WINDOW, CHUNK=WALKED_CHUNK), BLOCK_B, BLOCK_N, MIN_SPLIT,
    )  # fmt: skip
    if split >= tl.sum(counts, 0):
        return
    sequence, nth = find_part(counts, split)
    first_token, query_len = new_tokens(query_starts_ptr, sequence)
    context_len = tl.load(context_lens_ptr + sequence)
    num_rows = query_len * GROUP
    if row_tile * BLOCK_M >= num_rows:
        return
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position = context_len - query_len + row // GROUP
    begin, end = slots_of_split(
        nth, split_len, query_len, context_len, Span(WINDOW=WALKED_WINDOW, CHUNK=WALKED_CHUNK)
    )
    if positions_ptr is not None:
        positions_ptr += sequence.to(tl.int64) * positions_stride
        position = load_positions(positions_ptr, position, context_len)
    query = load_rows(
        query_ptr, row, first_token, num_rows, kv_head, query_stride_token, query_stride_head,
        GROUP, KEY_DIM, BLOCK_K,
    )  # fmt: skip
    if key_scales_ptr is not None:
        key_scales_ptr += kv_head * (KEY_DIM // KEY_GROUP)
        value_scales_ptr += kv_head * (VALUE_DIM // VALUE_GROUP)
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    key_ptr += kv_head * key_stride_head
    value_ptr += kv_head * value_stride_head
    total, top, weight = attend_keys(
        no_keys(BLOCK_M, BLOCK_V), query, position, begin, end,
        Table(blocks_ptr=table_ptr, positions_ptr=positions_ptr, BLOCK_SIZE=BLOCK_SIZE),
        Pool(ptr=key_ptr, scales_ptr=key_scales_ptr, stride_block=key_stride_block,
             stride_slot=key_stride_slot, DIM=KEY_DIM, GROUP=KEY_GROUP, FORM=KEY_FORM,
             BLOCK_DIM=BLOCK_K),
        Pool(ptr=value_ptr, scales_ptr=value_scales_ptr, stride_block=value_stride_block,
             stride_slot=value_stride_slot, DIM=VALUE_DIM, GROUP=VALUE_GROUP, FORM=VALUE_FORM,
             BLOCK_DIM=BLOCK_V),
        Span(WINDOW=WINDOW, CHUNK=CHUNK),
        Scoring(scale=scale, cap=cap, HAS_SOFTCAP=HAS_SOFTCAP, PRECISION=PRECISION),
        BLOCK_N, MASKED=True,
    )  # fmt: skip
    mean = mean_of(total, weight)
    place = place_of_row(split, row, max_query_len, GROUP, NUM_KV_HEADS) + kv_head
    store_split(partial_ptr, lse_ptr, place, row < num_rows, mean, top, weight, VALUE_DIM)


@triton.jit
def find_sequence(query_starts_ptr, num_sequences, token, BLOCK_B: tl.constexpr):
    """Return the sequence of a step's token; `num_sequences` for a token of none."""
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(query_starts_ptr + index + 1, mask=index < num_sequences, other=2**31 - 1)
    return tl.sum((ends <= token).to(tl.int32), 0)


@triton.jit
def splits_of(sequence, counts):
    """Return the splits [begin, end) of a sequence; counts [B] as of `divide_keys`."""
    index = tl.arange(0, counts.shape[0])
    begin = tl.sum(tl.where(index < sequence, counts, 0), 0)
    return begin, begin + tl.sum(tl.where(index == sequence, counts, 0), 0)


@triton.jit
def sink_alone(sinks_ptr, head, HAS_SINKS: tl.constexpr):
    """Return the highest score and the sum of weights before any key: those of the sink if any."""
    top = tl.full((), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((), dtype=tl.float32)
    if HAS_SINKS:
        # The sink in units of log2, like the scores; its own weight is then 1.
        top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    return top, weight


@triton.jit
def add_splits(total, top, weight, means, lse):
    """Return the running mean of a row, [V] and two scalars, with S splits more.

    means [S, V] and lse [S] are as `store_split` stores them; lse is -inf where there is no split.
    """
    new_top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(lse - base)
    weight = weight * shrink + tl.sum(weights, 0)
    total = total * shrink + tl.sum(weights[:, None] * means, 0)
    return total, new_top, weight


@triton.jit(do_not_specialize=["num_sequences", "num_splits", "min_query_len", "max_query_len"])
def merge_splits_kernel(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, query_starts_ptr, context_lens_ptr, num_sequences,
    num_splits, min_query_len, max_query_len, out_stride_token, out_stride_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge one row's splits by their weights, including the sink's weight.

    Grid: (tokens of the step, query heads).
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = find_sequence(query_starts_ptr, num_sequences, token, BLOCK_B)
    if sequence >= num_sequences:
        return
    first_token, query_len = new_tokens(query_starts_ptr, sequence)
    if (query_len < min_query_len) | (query_len > max_query_len):
        return
    counts, _split_len = divide_keys(
        query_starts_ptr, context_lens_ptr, num_sequences, num_splits, min_query_len, max_query_len,
        Span(WINDOW=WINDOW, CHUNK=CHUNK), BLOCK_B, BLOCK_N, MIN_SPLIT,
    )  # fmt: skip
    begin, end = splits_of(sequence, counts)
    dim = tl.arange(0, BLOCK_V)
    row = (token - first_token) * GROUP + head % GROUP
    total = tl.zeros((BLOCK_V,), dtype=tl.float32)
    top, weight = sink_alone(sinks_ptr, head, HAS_SINKS)
    for tile in range(begin, end, BLOCK_S):
        split = tile + tl.arange(0, BLOCK_S)
        there = split < end
        place = place_of_row(split, row, max_query_len, GROUP, NUM_KV_HEADS) + head // GROUP
        lse = tl.load(lse_ptr + place, mask=there, other=float("-inf"))  # [S]
        means = tl.load(
            partial_ptr + place[:, None] * VALUE_DIM + dim[None, :],
            mask=there[:, None] & (dim[None, :] < VALUE_DIM),
            other=0.0,
        )  # [S, V]
        total, top, weight = add_splits(total, top, weight, means, lse)
    mean = total / tl.where(weight == 0.0, 1.0, weight)
    offset = token.to(tl.int64) * out_stride_token + head * out_stride_head
    tl.store(out_ptr + offset + dim, mean.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)
