"""The functions that both attention kernels use: find a program's rows, walk tiles of their keys.

M   rows of a program: (token, query head of the group) pairs, token by token
N   keys of a tile
K   key dim, padded to a power of two; V likewise the value dim

Parameters that belong together are named tuples. Build one in the argument list of a call, and by
field names: Triton turns the constants of an assigned tuple into tensors, and its cache of compiled
kernels does not notice when fields change places.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

NATIVE_E4M3 = "native e4m3"
_INT4, _E4M3 = tl.constexpr("int4"), tl.constexpr("e4m3")
_NATIVE_E4M3 = tl.constexpr(NATIVE_E4M3)


class Span(NamedTuple):
    """Which positions before its own a row sees; 0 without a window, or without chunks."""

    WINDOW: Any
    CHUNK: Any


class Table(NamedTuple):
    """The slots of one sequence.

    blocks_ptr      the ids of its blocks, in slot order
    positions_ptr   the positions of its slots; None if its table is a shared one
    """

    blocks_ptr: Any
    positions_ptr: Any
    BLOCK_SIZE: Any


class Pool(NamedTuple):
    """The keys, or the values, of one KV head in all blocks.

    ptr          points at the head's first element
    scales_ptr   points at the head's first scale, one for GROUP numbers of a code; None for floats
    FORM         what is stored: int8, int4, e4m3, or e4m3 that the GPU reads; "" for floats
    BLOCK_DIM    DIM, padded to a power of two
    """

    ptr: Any
    scales_ptr: Any
    stride_block: Any
    stride_slot: Any
    DIM: Any
    GROUP: Any
    FORM: Any
    BLOCK_DIM: Any


class Scoring(NamedTuple):
    """How products of queries and keys become scores, which are in units of log2."""

    scale: Any
    cap: Any
    HAS_SOFTCAP: Any
    PRECISION: Any


@triton.jit
def find_part(counts, part):
    """Return which sequence the part of a step belongs to, and the part's number within it.

    counts   [B], how many parts each sequence has
    part     a number below the sum of `counts`
    """
    is_before = tl.cumsum(counts, 0) <= part
    sequence = tl.sum(is_before.to(tl.int32), 0)
    return sequence, part - tl.sum(tl.where(is_before, counts, 0), 0)


@triton.jit
def new_tokens(query_starts_ptr, sequence):
    """Return a sequence's first new token among those of the step, and the number of its own."""
    first_token = tl.load(query_starts_ptr + sequence)
    return first_token, tl.load(query_starts_ptr + sequence + 1) - first_token


@triton.jit
def first_visible(position, span):
    """Return the lowest position that each query position sees; both scalars or both blocks."""
    first = position * 0
    if span.WINDOW > 0:
        first = tl.maximum(first, position - span.WINDOW + 1)
    if span.CHUNK > 0:
        first = tl.maximum(first, position // span.CHUNK * span.CHUNK)
    return first


@triton.jit
def load_blocks(table, slot, end):
    """Return the ids of the blocks that have each slot of the table, 0 for slots from `end` on."""
    ids = tl.load(table.blocks_ptr + slot // table.BLOCK_SIZE, mask=slot < end, other=0)  # [N]
    # A pool exceeds 2^31 elements at 4 GB of bfloat16: widen the id before it is multiplied.
    return ids.to(tl.int64)


@triton.jit
def load_positions(positions_ptr, slot, end):
    """Return the positions of a private table's slots: -1 for empty ones and from `end` on."""
    return tl.load(positions_ptr + slot, mask=slot < end, other=-1)


@triton.jit
def load_rows(
    query_ptr, row, first_token, num_rows, kv_head, query_stride_token, query_stride_head,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
def offsets_in(pool, blocks, of_block):
    """Return [N] the offset of each slot's first number, from that of the head."""
    return blocks * pool.stride_block + of_block * pool.stride_slot


@triton.jit
def load_tile(
    keys, values, key_offset, value_offset, key_dim, value_dim, there, MASKED: tl.constexpr
):
    """Return the keys [K, N] and values [N, V] at these offsets as stored, 0 for padding.

    key_dim, value_dim   the ranges [K] and [V]: made in a loop, Triton makes them at each turn
    MASKED               whether some slots may not be `there`, [N]; theirs are then 0 too
    """
    key_there = key_dim[:, None] < keys.DIM
    value_there = value_dim[None, :] < values.DIM
    if MASKED:
        # Slots after the end may hold any value, including NaN, and 0 * NaN is NaN.
        key_there = key_there & there[None, :]
        value_there = value_there & there[:, None]
    key_byte = bytes_of(key_dim, keys.GROUP, keys.FORM)
    value_byte = bytes_of(value_dim, values.GROUP, values.FORM)
    key = tl.load(keys.ptr + key_offset[None, :] + key_byte[:, None], mask=key_there, other=0.0)
    value = tl.load(
        values.ptr + value_offset[:, None] + value_byte[None, :], mask=value_there, other=0.0
    )
    return key, value


@triton.jit
def bytes_of(dim, GROUP: tl.constexpr, FORM: tl.constexpr):
    """Return which byte of a head has each of its numbers: of 4 bits, two."""
    if FORM == _INT4:
        return dim // GROUP * (GROUP // 2) + dim % (GROUP // 2)
    return dim


@triton.jit
def place_of_scale(offset, GROUP: tl.constexpr, FORM: tl.constexpr):
    """Return the number of the scale of the group that begins `offset` bytes from the first."""
    return offset // (GROUP // 2 if FORM == _INT4 else GROUP)


@triton.jit
def levels_of(numbers, dim, GROUP: tl.constexpr, FORM: tl.constexpr):
    """Return stored numbers as float32, without their scales.

    `dim` is the place of each in its head, with as many dimensions as `numbers`.
    """
    if FORM == _INT4:
        shift = (dim % GROUP) // (GROUP // 2) * 4
        return (((numbers.to(tl.int32) >> shift) & 15) - 8).to(tl.float32)
    if FORM == _NATIVE_E4M3:
        return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if FORM == _E4M3:  # as float16, whose exponents are 8 more
        bits = numbers.to(tl.int16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers.to(tl.float32)


@triton.jit
def restored_keys(numbers, pool, offset, dim, there, dtype: tl.constexpr):
    """Return stored keys [K, N] times their scales, rounded once to `dtype`.

    `offset` [N] is that of a key's first byte, `dim` the range [K], `there` [N] whether the key is
    loaded. Scales are laid out as the numbers, one for GROUP of them.
    """
    levels = levels_of(numbers, dim[:, None], pool.GROUP, pool.FORM)
    first = place_of_scale(offset, pool.GROUP, pool.FORM)
    if pool.GROUP == pool.DIM:  # one scale a head, of any dim
        bits = tl.load(pool.scales_ptr + first, mask=there, other=0)  # [N]
        return (levels * scales_of(bits)[None, :]).to(dtype)
    NUM_GROUPS: tl.constexpr = pool.BLOCK_DIM // pool.GROUP
    group = tl.arange(0, NUM_GROUPS)
    inside = there[None, :] & (group * pool.GROUP < pool.DIM)[:, None]
    place = pool.scales_ptr + first[None, :] + group[:, None]
    scales = scales_of(tl.load(place, mask=inside, other=0))  # [K / GROUP, N]
    parts = tl.reshape(levels, (NUM_GROUPS, pool.GROUP, numbers.shape[1]))
    return tl.reshape((parts * scales[:, None, :]).to(dtype), numbers.shape)


@triton.jit
def restored_values(numbers, pool, offset, dim, there, dtype: tl.constexpr):
    """Return stored values [N, V] times their scales, as `restored_keys`."""
    levels = levels_of(numbers, dim[None, :], pool.GROUP, pool.FORM)
    first = place_of_scale(offset, pool.GROUP, pool.FORM)
    if pool.GROUP == pool.DIM:
        bits = tl.load(pool.scales_ptr + first, mask=there, other=0)  # [N]
        return (levels * scales_of(bits)[:, None]).to(dtype)
    NUM_GROUPS: tl.constexpr = pool.BLOCK_DIM // pool.GROUP
    group = tl.arange(0, NUM_GROUPS)
    inside = there[:, None] & (group * pool.GROUP < pool.DIM)[None, :]
    place = pool.scales_ptr + first[:, None] + group[None, :]
    scales = scales_of(tl.load(place, mask=inside, other=0))  # [N, V / GROUP]
    parts = tl.reshape(levels, (numbers.shape[0], NUM_GROUPS, pool.GROUP))
    return tl.reshape((parts * scales[:, :, None]).to(dtype), numbers.shape)


@triton.jit
def score_tile(query, key, scoring):
    """Return the scores [M, N] of a tile, before any mask."""
    scores = tl.dot(query, key, input_precision=scoring.PRECISION) * scoring.scale
    if scoring.HAS_SOFTCAP:
        # cap * tanh(x) with tanh(x) = 1 - 2 / (1 + exp(2x)); the factors are in scale and cap.
        scores = scoring.cap - 2.0 * scoring.cap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit
def mask_scores(scores, position, lowest, key_position, there, span):
    """Return the scores of the keys that each row sees, -inf for the others.

    position, lowest      [M], the rows' positions and the lowest that they see
    key_position, there   [N], the keys' positions and whether the slots hold any
    """
    seen = (key_position[None, :] <= position[:, None]) & there[None, :]
    if span.WINDOW > 0 or span.CHUNK > 0:
        seen = seen & (key_position[None, :] >= lowest[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the running softmax of rows that have seen no key yet; see `attend_keys`."""
    total = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    return total, top, tl.zeros((BLOCK_M,), dtype=tl.float32)


@triton.jit
def add_tile(total, top, weight, scores, value, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Return the running softmax of the rows with one more tile of keys."""
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
    return total, new_top, weight


@triton.jit
def attend_keys(
    softmax, query, position, begin, end, table, keys, values, span, scoring, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys of slots [begin, end) of a sequence to the running softmax of a program's rows.

    softmax    total [M, V], top [M], weight [M]: the weighted values, the highest score and the sum
               of weights so far
    position   [M], the rows' positions in the sequence
    MASKED     whether some row may not see all of these keys; without it, begin and end are a whole
               number of tiles apart, and the table is a shared one
    """
    total, top, weight = softmax
    offset = tl.arange(0, BLOCK_N)
    key_dim, value_dim = tl.arange(0, keys.BLOCK_DIM), tl.arange(0, values.BLOCK_DIM)
    lowest = first_visible(position, span)
    # Load block ids one tile ahead. If they were loaded in the iteration that needs them, Triton's
    # pipeline would spend its stages on them and have only one buffer for keys and values.
    blocks = load_blocks(table, begin + offset, end)
    if table.positions_ptr is not None:
        positions = load_positions(table.positions_ptr, begin + offset, end)
    for tile in range(begin, end, BLOCK_N):
        slot = tile + offset  # [N]
        next_blocks = load_blocks(table, slot + BLOCK_N, end)
        of_block = slot % table.BLOCK_SIZE
        key_offset = offsets_in(keys, blocks, of_block)
        value_offset = offsets_in(values, blocks, of_block)
        there, key_position = slot < end, slot
        if table.positions_ptr is not None:
            there, key_position = positions >= 0, positions
            positions = load_positions(table.positions_ptr, slot + BLOCK_N, end)
        key, value = load_tile(
            keys, values, key_offset, value_offset, key_dim, value_dim, there, MASKED
        )
        if keys.scales_ptr is not None:
            key = restored_keys(key, keys, key_offset, key_dim, there, query.dtype)
            value = restored_values(value, values, value_offset, value_dim, there, query.dtype)
        scores = score_tile(query, key, scoring)
        if MASKED:
            scores = mask_scores(scores, position, lowest, key_position, there, span)
        total, top, weight = add_tile(total, top, weight, scores, value, scoring.PRECISION, MASKED)
        blocks = next_blocks
    return total, top, weight


@triton.jit
def mean_of(total, weight):
    """Return [M, V] the weighted mean of the values, 0 for a row that saw no key."""
    return total / tl.where(weight == 0.0, 1.0, weight)[:, None]
