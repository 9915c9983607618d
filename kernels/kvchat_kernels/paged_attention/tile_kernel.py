"""The functions that both attention kernels use for a tile of keys: find, load, score, add.

M   rows of the tile: (token, query head of the group) pairs, token by token
N   keys of the tile
K   key dim, padded to a power of two; V likewise the value dim
"""

import triton
import triton.language as tl


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the lowest position that each query position sees; both scalars or both blocks."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def load_blocks(table_ptr, slot, end, BLOCK_SIZE: tl.constexpr):
    """Return the ids of the blocks that have each slot of the table, 0 for slots from `end` on."""
    ids = tl.load(table_ptr + slot // BLOCK_SIZE, mask=slot < end, other=0)  # [N]
    # A pool exceeds 2^31 elements at 4 GB of bfloat16: widen the id before it is multiplied.
    return ids.to(tl.int64)


@triton.jit
def load_positions(positions_ptr, slot, end):
    """Return the positions of a private table's slots: -1 for empty ones and from `end` on."""
    return tl.load(positions_ptr + slot, mask=slot < end, other=-1)


@triton.jit
def load_rows(
    query_ptr,
    row,
    first_token,
    num_rows,
    kv_head,
    query_stride_token,
    query_stride_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the queries of a program's rows, zero for padding rows and dimensions."""
    dim = tl.arange(0, BLOCK_K)
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    offset = token * query_stride_token + head * query_stride_head
    there = (row[:, None] < num_rows) & (dim[None, :] < KEY_DIM)
    return tl.load(query_ptr + offset[:, None] + dim[None, :], mask=there, other=0.0)  # [M, K]


@triton.jit
def scales_of(bits):
    """Return bfloat16 scales, given as int16 bits, in float32: exact on every device."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def restored_keys(
    numbers,
    scales_ptr,
    offset,
    there,
    dtype: tl.constexpr,
    KEY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return int8 keys [K, N] times their scales, rounded once to `dtype`.

    `offset` [N] is that of a key's first number, `there` [N] whether the key is loaded. Scales are
    laid out as the numbers, one for GROUP of them.
    """
    if GROUP == KEY_DIM:  # one scale a head, of any dim
        bits = tl.load(scales_ptr + offset // GROUP, mask=there, other=0)  # [N]
        return (numbers.to(tl.float32) * scales_of(bits)[None, :]).to(dtype)
    NUM_GROUPS: tl.constexpr = BLOCK_K // GROUP
    group = tl.arange(0, NUM_GROUPS)
    place = (offset // GROUP)[None, :] + group[:, None]
    inside = there[None, :] & (group * GROUP < KEY_DIM)[:, None]
    scales = scales_of(tl.load(scales_ptr + place, mask=inside, other=0))  # [K / GROUP, N]
    parts = tl.reshape(numbers, (NUM_GROUPS, GROUP, BLOCK_N)).to(tl.float32) * scales[:, None, :]
    return tl.reshape(parts.to(dtype), (BLOCK_K, BLOCK_N))


@triton.jit
def restored_values(
    numbers,
    scales_ptr,
    offset,
    there,
    dtype: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return int8 values [N, V] times their scales, as `restored_keys`."""
    if GROUP == VALUE_DIM:
        bits = tl.load(scales_ptr + offset // GROUP, mask=there, other=0)  # [N]
        return (numbers.to(tl.float32) * scales_of(bits)[:, None]).to(dtype)
    NUM_GROUPS: tl.constexpr = BLOCK_V // GROUP
    group = tl.arange(0, NUM_GROUPS)
    place = (offset // GROUP)[:, None] + group[None, :]
    inside = there[:, None] & (group * GROUP < VALUE_DIM)[None, :]
    scales = scales_of(tl.load(scales_ptr + place, mask=inside, other=0))  # [N, V / GROUP]
    parts = tl.reshape(numbers, (BLOCK_N, NUM_GROUPS, GROUP)).to(tl.float32) * scales[:, :, None]
    return tl.reshape(parts.to(dtype), (BLOCK_N, BLOCK_V))


@triton.jit
def attend_keys(
    total,
    top,
    weight,
    query,
    position,
    begin,
    end,
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
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys of slots [begin, end) of a sequence to the running softmax of a program's rows.

    total, top, weight   [M, V], [M], [M]: weighted values, highest score, sum of weights so far
    position             [M], the rows' positions in the sequence
    positions_ptr        the positions of the sequence's slots; None if its table is a shared one
    MASKED               whether some row may not see all of these keys; without it, begin and end
                         are a whole number of tiles apart, and the table is a shared one

    `key_ptr` and `value_ptr` point at the KV head's first element, and so do the pointers to
    scales, which are None if keys and values are floats. Scores are in units of log2.
    """
    offset = tl.arange(0, BLOCK_N)
    key_dim, value_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    lowest = first_visible(position, WINDOW, CHUNK)
    # Load block ids one tile ahead. If they were loaded in the iteration that needs them, Triton's
    # pipeline would spend its stages on them and have only one buffer for keys and values.
    blocks = load_blocks(table_ptr, begin + offset, end, BLOCK_SIZE)
    if positions_ptr is not None:
        positions = load_positions(positions_ptr, begin + offset, end)
    for tile in range(begin, end, BLOCK_N):
        slot = tile + offset  # [N]
        next_blocks = load_blocks(table_ptr, slot + BLOCK_N, end, BLOCK_SIZE)
        of_block = slot % BLOCK_SIZE
        key_offset = blocks * key_stride_block + of_block * key_stride_slot
        value_offset = blocks * value_stride_block + of_block * value_stride_slot
        there, key_position = slot < end, slot
        if positions_ptr is not None:
            there, key_position = positions >= 0, positions
            positions = load_positions(positions_ptr, slot + BLOCK_N, end)
        key_there = key_dim[:, None] < KEY_DIM
        value_there = value_dim[None, :] < VALUE_DIM
        if MASKED:
            # Slots after the end may hold any value, including NaN, and 0 * NaN is NaN.
            key_there = key_there & there[None, :]
            value_there = value_there & there[:, None]
        key = tl.load(key_ptr + key_offset[None, :] + key_dim[:, None], mask=key_there, other=0.0)
        value = tl.load(
            value_ptr + value_offset[:, None] + value_dim[None, :], mask=value_there, other=0.0
        )
        if key_scales_ptr is not None:
            key = restored_keys(
                key,
                key_scales_ptr,
                key_offset,
                there,
                query.dtype,
                KEY_DIM,
                KEY_GROUP,
                BLOCK_K,
                BLOCK_N,
            )
            value = restored_values(
                value,
                value_scales_ptr,
                value_offset,
                there,
                query.dtype,
                VALUE_DIM,
                VALUE_GROUP,
                BLOCK_V,
                BLOCK_N,
            )
        scores = tl.dot(query, key, input_precision=PRECISION) * scale  # [M, N]
        if HAS_SOFTCAP:
            # cap * tanh(x) with tanh(x) = 1 - 2 / (1 + exp(2x)); the factors are in scale and cap.
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
        if MASKED:
            seen = (key_position[None, :] <= position[:, None]) & there[None, :]
            if WINDOW > 0 or CHUNK > 0:
                seen = seen & (key_position[None, :] >= lowest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
        if MASKED:
            # For a row without a visible key so far, -inf - -inf would be NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        total = tl.dot(weights.to(value.dtype), value, total, input_precision=PRECISION)
        top = new_top
        blocks = next_blocks
    return total, top, weight
