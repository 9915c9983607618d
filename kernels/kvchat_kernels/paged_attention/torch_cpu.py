"""Paged attention on a CPU, with torch's fused attention; README.md says why it is built this way.

Knows torch's CPU kernel and its limits. Equal to `reference.py` within rounding.
"""

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences
from kvchat_kernels.paged_attention.span import AttentionSpan

# Up to this many rows per sequence, query heads that share a KV head are stacked as rows; above it
# the fused kernel reuses keys well enough by itself and a mask per stacked row would cost memory.
_MAX_STACKED_ROWS = 16
# Scores of the unfused path are computed in slabs of at most this many elements (fp32).
_MAX_SCORE_ELEMENTS = 1 << 23


def paged_attention_cpu(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: PagedSequences,
    span: AttentionSpan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes."""
    output = query.new_empty(query.shape[0], query.shape[1], value_pool.shape[-1])
    start = 0
    for index, query_len in enumerate(sequences.query_lens):
        rows = query[start : start + query_len]
        first = span.first_visible(sequences.context_lens[index] - query_len)
        key = _gather(key_pool, sequences, index, first).to(_compute_dtype(query.dtype))
        value = _gather(value_pool, sequences, index, first).to(key.dtype)
        attend = _attend_unfused if softcap is not None else _attend_fused
        output[start : start + query_len] = attend(
            rows.to(key.dtype), key, value, span, first, scale, softcap, sinks
        )
        start += query_len
    return output


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # float16 arithmetic is emulated on CPUs: 4x slower than float32, conversion included.
    return torch.float32 if dtype == torch.float16 else dtype


def _gather(pool: torch.Tensor, sequences: PagedSequences, index: int, first: int) -> torch.Tensor:
    """Return the sequence's tokens from `first` on: [num_keys, num_kv_heads, head_dim].

    A view of the pool where the blocks are consecutive, a copy elsewhere.
    """
    block_size = sequences.block_size
    blocks = sequences.blocks_of(index, first // block_size * block_size)
    run_start = sequences.run_start(index, first // block_size)
    if run_start is not None:
        tokens = pool[run_start : run_start + len(blocks)].flatten(0, 1)
    else:
        tokens = pool.index_select(0, blocks).flatten(0, 1)
    return tokens[first % block_size : first % block_size + sequences.context_lens[index] - first]


def _attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: AttentionSpan,
    first: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [num_rows, num_heads, value_dim] for the rows at the end of `key`'s positions."""
    assert softcap is None
    num_rows = query.shape[0]
    value_dim = value.shape[-1]
    query, key, value = _equal_head_dims(query, key, value)
    context_len = first + key.shape[0]
    is_full = span.first_visible(context_len - 1) <= first
    if is_full and num_rows > _MAX_STACKED_ROWS:
        out, lse = _prefix_and_diagonal(query, key, value, scale)
    elif num_rows == 1:
        out, lse = _stacked(query, key, value, None, scale)
    else:
        visible = _visible(span, num_rows, first, context_len).to(query.dtype)
        heads = _stacked if num_rows <= _MAX_STACKED_ROWS else _side_by_side
        out, lse = heads(query, key, value, visible, scale)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float())[..., None].to(out.dtype)
    return out[..., :value_dim]


def _visible(span: AttentionSpan, num_rows: int, first: int, context_len: int) -> torch.Tensor:
    """Return the additive mask [num_rows, num_keys]: 0 where visible, -inf elsewhere."""
    keys = torch.arange(first, context_len)
    mask = torch.zeros(num_rows, len(keys))
    return mask.masked_fill_(~span.mask(keys[-num_rows:], keys), float("-inf"))


def _prefix_and_diagonal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention without a mask: all earlier keys for every row, then the causal square."""
    prefix_len = key.shape[0] - query.shape[0]
    square = _side_by_side(query, key[prefix_len:], value[prefix_len:], None, scale, is_causal=True)
    if prefix_len == 0:
        return square
    prefix = _side_by_side(query, key[:prefix_len], value[:prefix_len], None, scale)
    return _merge(prefix, square)


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over two disjoint sets of keys by their log-sum-exps."""
    weight = torch.sigmoid(one[1] - other[1])[..., None]
    out = torch.lerp(other[0].float(), one[0].float(), weight).to(one[0].dtype)
    return out, torch.logaddexp(one[1], other[1])


def _stacked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the query heads of one KV head as rows; out and log-sum-exp by row, head."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    rows = query.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if mask is not None:
        mask = mask.repeat(group, 1)
    out, lse = _flash(
        rows.reshape(1, num_kv_heads, group * num_rows, head_dim), key, value, mask, scale
    )
    out = out.view(num_kv_heads, group, num_rows, -1).permute(2, 0, 1, 3)
    lse = lse.view(num_kv_heads, group, num_rows).permute(2, 0, 1)
    return out.reshape(num_rows, num_heads, -1), lse.reshape(num_rows, num_heads)


def _side_by_side(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the query heads of one KV head as a batch that shares (not copies) the keys."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    rows = query.view(num_rows, num_kv_heads, group, head_dim).permute(2, 1, 0, 3)
    out, lse = _flash(rows, key, value, mask, scale, is_causal)
    out = out.permute(2, 1, 0, 3).reshape(num_rows, num_heads, -1)
    return out, lse.permute(2, 1, 0).reshape(num_rows, num_heads)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CPU kernel; query [batch, num_kv_heads, rows, dim], key and value [num_keys, ...].

    The aten operator behind scaled_dot_product_attention is called by its own name because only it
    returns the log-sum-exp.
    """
    batch = query.shape[0]
    key = key.transpose(0, 1)[None].expand(batch, -1, -1, -1)
    value = value.transpose(0, 1)[None].expand(batch, -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _equal_head_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad with zeros where K and V dims differ: zeros change no score and are cut off later."""
    missing = value.shape[-1] - key.shape[-1]
    pad = torch.nn.functional.pad
    if missing > 0:
        return pad(query, (0, missing)), pad(key, (0, missing)), value
    if missing < 0:
        return query, key, pad(value, (0, -missing))
    return query, key, value


def _attend_unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: AttentionSpan,
    first: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The formula with a softcap, in slabs of rows so that scores stay small."""
    context_len = first + key.shape[0]
    visible = _visible(span, query.shape[0], first, context_len)
    slab = max(1, _MAX_SCORE_ELEMENTS // (query.shape[1] * key.shape[0]))
    return torch.cat(
        [
            _attend_slab(rows, key, value, mask, scale, softcap, sinks)
            for rows, mask in zip(query.split(slab), visible.split(slab), strict=True)
        ]
    )


def _attend_slab(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1], key.shape[0]
    rows = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = rows.reshape(num_kv_heads, -1, head_dim) @ key.permute(1, 2, 0)
    scores = scores.view(num_kv_heads, -1, num_rows, num_keys).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores += mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_rows, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    weights = weights.to(value.dtype).reshape(num_kv_heads, -1, num_keys)
    out = (weights @ value.transpose(0, 1)).view(num_kv_heads, -1, num_rows, value.shape[-1])
    return out.permute(2, 0, 1, 3).reshape(num_rows, num_heads, -1)
