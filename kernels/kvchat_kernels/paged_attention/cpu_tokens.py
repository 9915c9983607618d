"""A sequence's keys or values on a CPU: read in runs from the pool, or gathered head by head.

A chat's blocks are mostly adjacent, with gaps where other sequences took blocks. Reading each run
in place costs nothing; copying all runs cost up to half of a decode step. For one row over many
keys, keys and values are gathered for two matrix products, because torch's products need contiguous
batches and copy any others.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences

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

    def joined(self, sequences: PagedSequences, name: str) -> torch.Tensor:
        """Return all tokens as one tensor.

        It is a copy in the step's scratch buffer `name` for several runs, or for many tokens that
        are still in the pool.
        """
        first = self.runs[0]
        if len(self.runs) == 1 and (self.are_copies or self.count < WORTH_COPYING):
            return first
        out = scratch(sequences.scratch, name, (self.count, *first.shape[1:]), first.dtype)
        return torch.cat(self.runs, out=out)

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

    The other arguments are a Gathering's fields. TorchScript compiles this function too, so it uses
    only what TorchScript supports.
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
