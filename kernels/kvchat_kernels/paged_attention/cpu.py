"""Paged attention on a CPU, with torch's kernels; README.md gives the reasons and the times.

A step of few rows reads its tokens where they lie (torch's fused kernel, run by run), or gathers
them head by head for two matrix products. `fused_step` decides that once for all layers of a step
that are alike; `paged_attention_cpu` serves every other step. Equal to `reference.py` within
rounding.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import pad

from kvchat_kernels.cpu_products import few_sizes, multiplies_in
from kvchat_kernels.paged_attention.cpu_fused import additive_mask, attend_fused
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import AttentionSpan, PagedSequences

# With more runs than this, one gather is cheaper than reading each run.
MOST_RUNS = 8
# From about this many tokens on, copying and reading the copy is faster for the fused kernel than
# reading the pool: it reads the tokens once per head, and the copy is then in the caches.
WORTH_COPYING = 2048


@dataclass(frozen=True, slots=True)
class Tokens:
    """Runs of tokens in position order, each [num_tokens, num_heads, head_dim].

    They are read-only views of the pool if possible. `are_copies` is true if they were gathered or
    converted to another dtype. `count` is the number of tokens of all runs.
    """

    runs: tuple[torch.Tensor, ...]
    count: int
    are_copies: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0].dtype

    def joined(self, sequences: PagedSequences, name: str, size: int) -> torch.Tensor:
        """Return `size` tokens as one tensor, with zeros after the last token.

        It is a copy in the step's scratch buffer `name` for several runs, for added zeros, or for
        many tokens that are still in the pool.
        """
        first = self.runs[0]
        is_one = len(self.runs) == 1 and size == self.count
        if is_one and (self.are_copies or self.count < WORTH_COPYING):
            return first
        out = scratch(sequences.scratch, name, (size, *first.shape[1:]), first.dtype)
        torch.cat(self.runs, out=out[: self.count])
        out[self.count :].zero_()
        return out

    def by_head(self, sequences: PagedSequences, name: str, size: int) -> torch.Tensor:
        """Return a copy [num_heads, size, head_dim] in the step's scratch buffer `name`.

        It holds zeros after the last token.
        """
        first = self.runs[0]
        shape = (first.shape[1], size, first.shape[2])
        out = scratch(sequences.scratch, name, shape, first.dtype)
        start = 0
        for run in self.runs:
            end = start + run.shape[0]
            out[:, start:end].copy_(run.transpose(0, 1))
            start = end
        out[:, start:].zero_()
        return out


def tokens_from(
    pool: torch.Tensor, sequences: PagedSequences, index: int, first: int, dtype: torch.dtype
) -> Tokens:
    """Return a sequence's tokens from position `first` on, in `dtype`."""
    count = sequences.context_lens[index] - first
    slots = sequences.runs(index, first)
    is_scattered = len(slots) > MOST_RUNS
    if is_scattered:
        offset = first % sequences.block_size
        gathered = pool.index_select(0, sequences.blocks_of(index, first - offset)).flatten(0, 1)
        runs = [gathered[offset : offset + count]]
    else:
        tokens = pool.flatten(0, 1)
        runs = [tokens[start:end] for start, end in slots]
    if pool.dtype != dtype:
        runs = [run.to(dtype) for run in runs]
    return Tokens(tuple(runs), count, are_copies=is_scattered or pool.dtype != dtype)


def scratch(
    room: dict[Hashable, torch.Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the buffer `name` of `room` as a tensor of `shape`, with undefined content."""
    num_elements = math.prod(shape)
    memory = room.get((name, dtype))
    if memory is None or memory.numel() < num_elements:
        memory = room[name, dtype] = torch.empty(num_elements, dtype=dtype)
    return memory[:num_elements].view(shape)


# Lengths are rounded up to this, because oneDNN compiles new code for each length (2 to 5 ms).
_LENGTH_STEP = 64


@dataclass(frozen=True, slots=True)
class Gathering:
    """The places of a sequence's tokens, head by head, in all pools of equal shape.

    places         [num_kv_heads * length] int64, rows of a pool seen as [slots * heads, dim]. After
                   a head's `num_keys` they repeat its first token, which is masked
    keys, values   [num_kv_heads, length, dim], buffers to gather to, first the keys, then the
                   values; mostly the same memory. Every layer overwrites them
    """

    places: torch.Tensor
    num_keys: int
    keys: torch.Tensor
    values: torch.Tensor


def gathering(
    sequences: PagedSequences,
    index: int,
    first: int,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
) -> Gathering:
    """Return the Gathering of a sequence's tokens from position `first` on, cached for the step."""
    kind = (index, first, key_pool.shape[2:], value_pool.shape[3], key_pool.dtype)
    known = sequences.plans.get(kind)
    if known is None:
        num_keys, num_heads = sequences.context_lens[index] - first, key_pool.shape[2]
        length = -(-num_keys // _LENGTH_STEP) * _LENGTH_STEP
        rooms = (
            scratch(sequences.scratch, "gathered", (num_heads, length, pool.shape[3]), pool.dtype)
            for pool in (key_pool, value_pool)
        )
        places = _places(sequences, index, first, length, num_heads)
        known = sequences.plans[kind] = Gathering(places, num_keys, *rooms)
    assert isinstance(known, Gathering)
    return known


def _places(
    sequences: PagedSequences, index: int, first: int, length: int, num_heads: int
) -> torch.Tensor:
    end, size = sequences.context_lens[index], sequences.block_size
    positions = torch.arange(first, first + length)
    positions[end - first :] = first
    blocks = sequences.block_tables[index].long()
    slots = blocks[positions // size] * size + positions % size
    return (slots * num_heads + torch.arange(num_heads)[:, None]).flatten()


def attend_gathered(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    num_keys: int,
    key_room: torch.Tensor,
    value_room: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend a single row: [1, num_heads, value_dim].

    query          [1, num_heads, key_dim]
    keys, values   the pools' tokens, [num_slots, num_kv_heads, key_dim or value_dim]

    The other arguments are a Gathering's fields.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    rows = query.view(num_kv_heads, num_heads // num_kv_heads, query.shape[2])
    torch.index_select(keys.flatten(0, 1), 0, places, out=key_room.flatten(0, 1))
    # Scale inside the product, which costs no extra rounding. With beta=0 the input is not read.
    scores = torch.baddbmm(rows.new_empty(1), rows, key_room.transpose(1, 2), beta=0.0, alpha=scale)
    scores[:, :, num_keys:].fill_(float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[:, :, :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    torch.index_select(values.flatten(0, 1), 0, places, out=value_room.flatten(0, 1))
    return torch.bmm(weights, value_room).view(1, num_heads, -1)


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
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes.

    Steps with a private table are left to the reference.
    """
    if sequences.positions is not None:
        pools = key_pool, value_pool
        return paged_attention_reference(query, *pools, sequences, span, scale, softcap, sinks)
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
        size = _size_of(key.count, compute_dtype)
        if prefers_fused:
            num_rows = _size_of(query_len, compute_dtype)
            group = query.shape[1] // num_kv_heads
            mask = additive_mask(sequences, index, span, group, (num_rows, size), compute_dtype)
            joined = key.joined(sequences, "keys", size), value.joined(sequences, "values", size)
            rows = pad(rows, [0, 0, 0, 0, 0, num_rows - query_len])
            outputs.append(attend_fused(rows, *joined, mask, scale, sinks)[:query_len])
        else:
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
    if dtype == torch.float32 or not multiplies_in(dtype):
        return count
    return few_sizes(count)


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
