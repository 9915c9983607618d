"""Paged attention on a CPU, with torch's kernels; README.md gives the reasons and the times.

Equal to `reference.py` within rounding.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import pad

from kvchat_kernels.cpu_products import few_sizes, multiplies_in
from kvchat_kernels.paged_attention.cpu_tokens import (
    Gathering,
    attend_gathered,
    gathering,
    scratch,
    tokens_from,
)
from kvchat_kernels.paged_attention.sequences import AttentionSpan, PagedSequences

# Rows are processed in slabs of at most this many bytes of scores, which then stay in the caches
# between the products and the softmax: larger slabs took up to twice as long per score.
_SLAB_BYTES = 1 << 22
# The fused kernel has less overhead than two products and a softmax. For several rows the products
# are faster from about this many keys on.
_SHORT_CONTEXT = 1024
FEW_ROWS = 16
# In low precision the fused kernel attends every row with at most this many bytes of keys.
_FEW_KEY_BYTES = 5 << 16
# If no query heads share a KV head, the fused kernel multiplies one row at a time, several times
# slower than several rows. Then it is used only up to this many keys of all heads.
_FEW_KEYS_OF_ALL_HEADS = 2048


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
    whole = query if query.dtype == compute_dtype else query.to(compute_dtype)
    num_kv_heads, key_dim = key_pool.shape[2:]
    choice = KernelChoice(query.shape[1], num_kv_heads, key_dim, compute_dtype, span)
    sequences = choice.split(sequences)
    outputs = []
    start = 0
    for index, query_len in enumerate(sequences.query_lens):
        rows = whole[start : start + query_len]
        first = span.first_visible(sequences.context_lens[index] - query_len)
        prefers_fused = softcap is None and choice.prefers_fused(sequences, index)
        if softcap is None and query_len == 1 and not prefers_fused:
            found = gathering(sequences, index, first, key_pool, value_pool)
            outputs.append(_attend_long(rows, key_pool, value_pool, found, scale, sinks))
            start += query_len
            continue
        key = tokens_from(key_pool, sequences, index, first, compute_dtype)
        value = tokens_from(value_pool, sequences, index, first, compute_dtype)
        if prefers_fused:
            group = query.shape[1] // key_pool.shape[2]
            mask = additive_mask(sequences, index, span, first, group, compute_dtype)
            joined = key.joined(sequences, "keys"), value.joined(sequences, "values")
            outputs.append(attend_fused(rows, *joined, mask, scale, sinks))
        else:
            size = _size_of(key.count, compute_dtype)
            by_head = key.by_head(sequences, "keys", size), value.by_head(sequences, "values", size)
            end = sequences.context_lens[index]
            slabs = Slabs(span, first, end, scale, softcap, sinks, sequences.scratch)
            outputs.append(slabs.attend(rows, *by_head))
        start += query_len
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if out.dtype == query.dtype else out.to(query.dtype)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    # float16 arithmetic is emulated on CPUs: 4x slower than float32, conversion included.
    return torch.float32 if dtype == torch.float16 else dtype


def _attend_long(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    found: Gathering,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    keys, values = key_pool.flatten(0, 1), value_pool.flatten(0, 1)
    rooms = found.keys, found.values
    return attend_gathered(query, keys, values, found.places, found.num_keys, *rooms, scale, sinks)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Chooses the rows that torch's fused kernel attends, for layers of one shape without softcap.

    In low precision the choice depends only on the row's own position: the kernel and the products
    round differently, and a token's result must not depend on the other tokens of the step.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    dtype: torch.dtype
    span: AttentionSpan

    def prefers_fused(self, sequences: PagedSequences, index: int) -> bool:
        """Return whether the kernel attends a sequence's rows; the sequence comes from `split`."""
        num_rows, end = sequences.query_lens[index], sequences.context_lens[index]
        if self.dtype != torch.float32:
            return self._is_short(end - 1)
        num_keys = end - self.span.first_visible(end - num_rows)
        return num_rows == 1 or (num_rows <= FEW_ROWS and num_keys < _SHORT_CONTEXT)

    def split(self, sequences: PagedSequences) -> PagedSequences:
        """Split sequences so that all rows of each use the same kernel; cached for the step."""
        if self.dtype == torch.float32 or sequences.num_tokens == len(sequences.query_lens):
            return sequences
        found = sequences.plans.get(self)
        if found is None:
            found = sequences.plans[self] = self._split(sequences)
        assert isinstance(found, PagedSequences)
        return found

    def _split(self, sequences: PagedSequences) -> PagedSequences:
        parts: list[tuple[int, int, int]] = []  # index, rows, end
        lengths = zip(sequences.query_lens, sequences.context_lens, strict=True)
        for index, (num_rows, end) in enumerate(lengths):
            for _, group in groupby(range(end - num_rows, end), self._is_short):
                rows = list(group)
                parts.append((index, len(rows), rows[-1] + 1))
        if len(parts) == len(sequences.query_lens):
            return sequences
        indices, query_lens, ends = zip(*parts, strict=True)
        tables = sequences.block_tables[list(indices)]
        return PagedSequences(query_lens, ends, tables, sequences.block_size)

    def _is_short(self, position: int) -> bool:
        """Return whether a row has so few keys that the fused kernel is faster."""
        if not multiplies_in(self.dtype):
            return True  # products would convert every element
        num_keys = position + 1 - self.span.first_visible(position)
        if self.num_heads == self.num_kv_heads:
            return num_keys * self.num_kv_heads <= _FEW_KEYS_OF_ALL_HEADS
        return num_keys * self.num_kv_heads * self.key_dim * self.dtype.itemsize <= _FEW_KEY_BYTES


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
                 share a KV head, one head after another; None for a single row

    TorchScript compiles this function too, so it uses only what TorchScript supports.
    """
    num_rows, num_heads = query.shape[0], query.shape[1]
    num_kv_heads, value_dim = value.shape[1], value.shape[2]
    query, key, value = _equal_head_dims(query, key, value)
    # The operator behind scaled_dot_product_attention: only it returns the log-sum-exp, which sinks
    # need.
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        _rows_by_head(query, num_kv_heads),
        key[None].transpose(1, 2),
        value[None].transpose(1, 2),
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
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
    first: int,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return a sequence's mask, [group * num_rows, num_keys] in `dtype`; None for a single row.

    It is 0 where visible and minus infinity where hidden. Cached for the step.
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


@dataclass(frozen=True, slots=True)
class Slabs:
    """Attention of many rows in slabs, over the keys of positions [`first`, `end`).

    `room` holds the buffers of scores and weights, which slabs and layers reuse.
    """

    span: AttentionSpan
    first: int
    end: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    room: dict[Hashable, torch.Tensor]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend the rows of the last positions: [num_rows, num_heads, value_dim].

        `key` and `value` are [num_kv_heads, num_keys, dim], with zeros after the last key. Each
        slab uses the keys from the first that any of its rows sees to its last row's.
        """
        num_rows, num_heads, _ = query.shape
        start = self.end - num_rows
        slab_rows = _slab_rows(num_rows, num_heads * key.shape[1] * key.itemsize, key.dtype)
        outputs = []
        for row in range(0, num_rows, slab_rows):
            rows = query[row : row + slab_rows]
            begin = self.span.first_visible(start + row)
            end = start + row + len(rows)
            size = _size_of(end - begin, key.dtype)
            visible = slice(begin - self.first, begin - self.first + size)
            hidden = _hidden(self.span, begin, end, len(rows))
            part = key[:, visible], value[:, visible]
            outputs.append(self._attend_slab(rows, *part, hidden, end - begin))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_slab(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden: torch.Tensor,
        end: int,
    ) -> torch.Tensor:
        """Attend one slab: two products and a softmax over `end` keys, followed by zeros."""
        count = query.shape[0]
        query = pad(query, [0, 0, 0, 0, 0, _size_of(count, query.dtype) - count])
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads, num_keys, value_dim = value.shape
        rows = query.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(num_kv_heads, -1, head_dim)
        shape = (num_kv_heads, rows.shape[1], num_keys)
        # Scale inside the product, which costs no extra rounding and no pass over the scores.
        scores = scratch(self.room, "scores", shape, rows.dtype)
        scores.baddbmm_(rows, key.transpose(1, 2), beta=0, alpha=self.scale)
        scores = scores.view(num_heads, num_rows, num_keys)
        if self.softcap is not None:
            scores = scores.float().div_(self.softcap).tanh_().mul_(self.softcap)
        scores[:, :count, end - hidden.shape[1] : end].masked_fill_(hidden, float("-inf"))
        scores[..., end:].fill_(float("-inf"))
        weights = self._weights(scores).to(value.dtype)
        out = torch.bmm(weights.reshape(num_kv_heads, -1, num_keys), value)
        out = out.view(num_kv_heads, -1, num_rows, value_dim).permute(2, 0, 1, 3)
        return out[:count].reshape(count, num_heads, value_dim)

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the softmax of scores [num_heads, num_rows, num_keys] over keys and sink."""
        if self.sinks is None:
            weights = scratch(self.room, "weights", scores.shape, scores.dtype)
            return torch.softmax(scores, dim=-1, out=weights)
        num_heads, num_rows, num_keys = scores.shape
        column = self.sinks.to(scores.dtype).view(num_heads, 1, 1).expand(-1, num_rows, 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :num_keys]


def _size_of(count: int, dtype: torch.dtype) -> int:
    """Return the padded number of rows or keys for products of `count`."""
    return count if dtype == torch.float32 else few_sizes(count)


def _slab_rows(num_rows: int, row_bytes: int, dtype: torch.dtype) -> int:
    """Return the number of rows per slab; in low precision a power of two, to have few sizes."""
    most_rows = max(1, _SLAB_BYTES // row_bytes)
    if dtype != torch.float32:
        return 1 << (most_rows.bit_length() - 1)
    num_slabs = -(-num_rows // most_rows)
    return -(-num_rows // num_slabs)


def _hidden(span: AttentionSpan, begin: int, end: int, num_rows: int) -> torch.Tensor:
    """Return which positions of [`begin`, `end`) are hidden from the last `num_rows` of them.

    [num_rows, num_columns] bool, true where hidden. Without a window or chunks only the last
    `num_rows` columns can be hidden, and only those are returned.
    """
    if span.window is None and span.chunk is None:
        begin = end - num_rows
    positions = torch.arange(begin, end)
    return ~span.mask(positions[-num_rows:], positions)
