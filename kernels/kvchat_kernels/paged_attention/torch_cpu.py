"""Paged attention on a CPU, with torch alone; README.md says why it is built this way.

Knows torch's CPU kernels and their speeds. Equal to `reference.py` within rounding.
"""

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences
from kvchat_kernels.paged_attention.span import AttentionSpan

# Rows are taken in slabs with at most this many bytes of scores, so that they stay in the caches
# between the two products and the softmax: larger slabs took up to twice as long per score.
_SLAB_BYTES = 1 << 22
# The fused kernel starts sooner than two products and a softmax, which in bfloat16 are the faster
# from about this many keys on. It is meant for few rows.
_SHORT_CONTEXT = 1024
_FEW_ROWS = 16


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
    compute_dtype = _compute_dtype(query.dtype)
    outputs = []
    start = 0
    for index, query_len in enumerate(sequences.query_lens):
        rows = query[start : start + query_len].to(compute_dtype)
        first = span.first_visible(sequences.context_lens[index] - query_len)
        key = _gather(key_pool, sequences, index, first).to(compute_dtype)
        value = _gather(value_pool, sequences, index, first).to(compute_dtype)
        num_keys = key.shape[0]
        prefers_fused = num_keys < _SHORT_CONTEXT or (
            query_len == 1 and compute_dtype == torch.float32
        )
        if softcap is None and query_len <= _FEW_ROWS and prefers_fused:
            group = query.shape[1] // key.shape[1]
            mask = _additive_mask(sequences, index, span, first, group, compute_dtype)
            outputs.append(_attend_fused(rows, key, value, mask, scale, sinks))
        elif softcap is None and query_len == 1:
            outputs.append(_attend_one(rows, key, value, scale, sinks))
        else:
            outputs.append(_attend_many(rows, key, value, span, first, scale, softcap, sinks))
        start += query_len
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(query.dtype)


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
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend few rows by torch's fused kernel: [num_rows, num_heads, value_dim].

    The query heads that share a KV head are that head's rows, row by row within each; `mask` is
    added to their scores. The aten operator behind scaled_dot_product_attention is called by its
    own name because only it returns the log-sum-exp, which sinks need.
    """
    num_rows, num_heads, _ = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    query, key, value = _equal_head_dims(query, key, value)
    rows = query.view(num_rows, num_kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows.reshape(1, num_kv_heads, -1, query.shape[-1]),
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
    )
    out = out.reshape(num_heads, num_rows, -1).transpose(0, 1)[..., :value_dim]
    if sinks is not None:
        share = torch.sigmoid(lse.reshape(num_heads, num_rows).t() - sinks.float())
        out = out * share[..., None].to(out.dtype)
    return out


def _additive_mask(
    sequences: PagedSequences,
    index: int,
    span: AttentionSpan,
    first: int,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return what keeps a sequence's rows from what they may not see, None for a single row.

    [group * num_rows, num_keys] in `dtype`, minus infinity where hidden. Made once a step and not
    once a layer.
    """
    num_rows, end = sequences.query_lens[index], sequences.context_lens[index]
    if num_rows == 1:
        return None
    key = (index, span, group, dtype)
    mask = sequences.masks.get(key)
    if mask is None:
        positions = torch.arange(first, end)
        hidden = ~span.mask(positions[-num_rows:], positions)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        mask = sequences.masks[key] = mask.repeat(group, 1)
    return mask


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend a single row to many keys by two products: [1, num_heads, value_dim].

    The first is keys times queries and not queries times keys: it then reads the keys in the order
    in which they lie.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    rows = query.view(num_kv_heads, -1, query.shape[-1]).transpose(1, 2)
    scores = rows.new_empty(num_kv_heads, key.shape[0], rows.shape[2])
    scores = torch.baddbmm(scores, key.transpose(0, 1), rows, beta=0, alpha=scale).transpose(1, 2)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return torch.bmm(weights, value.transpose(0, 1)).view(1, num_heads, -1)


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


def _attend_many(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: AttentionSpan,
    first: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend the rows at the end of `key`'s positions: [num_rows, num_heads, value_dim].

    `key` and `value` begin at position `first`. Slab by slab; each sees the keys up to its own last
    row, from the first one any of its rows may see.
    """
    num_rows, num_heads, _ = query.shape
    key, value = (tensor.transpose(0, 1).contiguous() for tensor in (key, value))
    start = first + key.shape[1] - num_rows
    most_rows = max(1, _SLAB_BYTES // (num_heads * key.shape[1] * key.itemsize))
    num_slabs = -(-num_rows // most_rows)
    slab_rows = -(-num_rows // num_slabs)
    outputs = []
    for row in range(0, num_rows, slab_rows):
        rows = query[row : row + slab_rows]
        begin = span.first_visible(start + row)
        end = start + row + len(rows)
        visible = slice(begin - first, end - first)
        mask = _hidden(span, begin, end, len(rows))
        outputs.append(
            _attend_slab(rows, key[:, visible], value[:, visible], mask, scale, softcap, sinks)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _hidden(span: AttentionSpan, begin: int, end: int, num_rows: int) -> torch.Tensor:
    """Return what the last `num_rows` positions before `end` may not see, of those from `begin` on.

    [num_rows, num_columns] bool, true where hidden. Without a window or chunks only the last
    columns can be, and only they are there.
    """
    if span.window is None and span.chunk is None:
        begin = end - num_rows
    positions = torch.arange(begin, end)
    return ~span.mask(positions[-num_rows:], positions)


def _attend_slab(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Two products with a softmax between them; key and value are [num_kv_heads, num_keys, dim]."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, value_dim = value.shape
    rows = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    rows = rows.reshape(num_kv_heads, -1, head_dim)
    # Scaled inside the product, where it costs no rounding and no pass over the scores.
    scores = rows.new_empty(num_kv_heads, rows.shape[1], num_keys)
    scores = torch.baddbmm(scores, rows, key.transpose(1, 2), beta=0, alpha=scale)
    scores = scores.view(num_heads, num_rows, num_keys)
    if softcap is not None:
        scores = scores.float().div_(softcap).tanh_().mul_(softcap)
    scores[..., num_keys - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(num_heads, 1, 1).expand(-1, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys].to(value.dtype)
    out = torch.bmm(weights.reshape(num_kv_heads, -1, num_keys), value)
    out = out.view(num_kv_heads, -1, num_rows, value_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads, value_dim)
