"""Attention of few rows by torch's fused kernel, which reads the tokens of a sequence once a head.

In low precision torch compiles the kernel's products for each number of rows and keys and keeps
them until the process ends (20 KB each): its callers round both numbers up to few sizes.

The kernel is a private operator of torch. `attend_plainly` computes the same by public functions,
where torch has no such operator and in tests.
"""

import torch

from kvchat_kernels.paged_attention.sequences import AttentionSpan, PagedSequences


def attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend few rows by torch's fused kernel: [num_rows, num_heads, value_dim].

    query        [num_rows, num_heads, key_dim]
    key, value   [num_keys, num_kv_heads, key_dim or value_dim]
    mask         [group * num_rows, num_keys], added to the scores: the rows of the query heads that
                 share a KV head, one head after another; None if every row sees every key
    """
    num_rows, num_heads = query.shape[0], query.shape[1]
    num_kv_heads, value_dim = value.shape[1], value.shape[2]
    query, key, value = _equal_head_dims(query, key, value)
    out, lse = _attend_with_lse(
        _rows_by_head(query, num_kv_heads),
        key[None].transpose(1, 2),
        value[None].transpose(1, 2),
        mask,
        scale,
    )
    if num_rows == 1:  # already in the right order
        out = out.view(1, num_heads, -1)
    else:
        out = out.reshape(num_heads, num_rows, -1).transpose(0, 1)
    if out.shape[-1] > value_dim:
        out = out[..., :value_dim]
    if sinks is not None:
        share = torch.sigmoid(lse.reshape(num_heads, num_rows).t() - sinks.float())
        out = out * share[..., None].to(out.dtype)
    return out


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by public functions of torch: the output and its log-sum-exp [1, heads, num_rows].

    query, key, value   [1, num_heads, num_rows or num_keys, head_dim]
    """
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask.float()
    out = torch.matmul(torch.softmax(scores, dim=-1), value.float())
    return out.to(query.dtype), torch.logsumexp(scores, dim=-1)


def _attend_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # The operator behind scaled_dot_product_attention: only it returns the log-sum-exp, which sinks
    # need.
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse


_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
# The operator is private: a torch without it computes the same by public functions.
_attend_with_lse = _attend_by_torch if hasattr(torch, _OPERATOR) else attend_plainly


def _rows_by_head(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return query [num_rows, num_heads, dim] as [1, num_kv_heads, group * num_rows, dim]."""
    num_rows, num_heads, dim = query.shape[0], query.shape[1], query.shape[2]
    if num_rows == 1:
        return query.reshape(1, num_kv_heads, num_heads // num_kv_heads, dim)
    rows = query.view(num_rows, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
    return rows.reshape(1, num_kv_heads, -1, dim)


def additive_mask(
    sequences: PagedSequences,
    index: int,
    span: AttentionSpan,
    group: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return a sequence's mask, [group * num_rows, num_keys] in `dtype`; None if all is visible.

    It is 0 where visible and minus infinity where hidden. `shape` is [num_rows, num_keys], each at
    least the sequence's own number: further rows see every key of the sequence, and no row sees
    further keys. Cached for the step.
    """
    num_rows, end = sequences.query_lens[index], sequences.context_lens[index]
    first = span.first_visible(end - num_rows)
    if shape == (1, end - first):
        return None
    kind = (index, span, group, shape, dtype)
    mask = sequences.masks.get(kind)
    if mask is None:
        positions = torch.arange(first, end)
        mask = torch.zeros(shape, dtype=dtype)
        mask[:, end - first :] = float("-inf")
        hidden = ~span.mask(positions[-num_rows:], positions)
        mask[:num_rows, : end - first].masked_fill_(hidden, float("-inf"))
        mask = sequences.masks[kind] = mask.repeat(group, 1)
    return mask


def _equal_head_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad with zeros if K and V dims differ; zeros change no score, and the caller removes them."""
    missing = value.shape[-1] - key.shape[-1]
    if missing > 0:
        query = torch.nn.functional.pad(query, [0, missing])
        key = torch.nn.functional.pad(key, [0, missing])
    elif missing < 0:
        value = torch.nn.functional.pad(value, [0, -missing])
    return query, key, value
