"""One row of a sequence attended over many keys on a CPU: gathered head by head, two products.

torch's products take batches that lie one after another and copy what does not: gathering the
tokens of each head is that copy, made by rows, from wherever blocks lie. Knows slots and products.
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.paged_attention.cpu_tokens import scratch
from kvchat_kernels.paged_attention.sequences import PagedSequences

# The library makes a product's code anew for each length, 2 to 5 ms a step: so many take turns.
_LENGTH_STEP = 64


@dataclass(frozen=True, slots=True)
class Gathering:
    """Where a sequence's tokens lie, head by head, in any pool of a kind.

    places         [num_kv_heads * length] int64, rows of a pool seen as one head of one slot each;
                   beyond `num_keys` of a head they name its first token again, which may be read
                   and is not seen
    keys, values   [num_kv_heads, length, dim] to gather to, one after the other, mostly in the
                   same memory; every layer's to overwrite
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
    """Return how a sequence's tokens from position `first` on are gathered, decided once a step."""
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
    keys, values   the pools' tokens, [num_slots, num_kv_heads, key_dim or value_dim], and then what
                   Gathering holds

    TorchScript compiles it too: it keeps to what that knows.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    rows = query.view(num_kv_heads, num_heads // num_kv_heads, query.shape[2])
    torch.index_select(keys.flatten(0, 1), 0, places, out=key_room.flatten(0, 1))
    # Scaled inside the product, where it costs no rounding; what it would be added to is not read.
    scores = torch.baddbmm(rows.new_empty(1), rows, key_room.transpose(1, 2), beta=0.0, alpha=scale)
    scores[:, :, num_keys:].fill_(float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(num_kv_heads, -1, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[:, :, :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    torch.index_select(values.flatten(0, 1), 0, places, out=value_room.flatten(0, 1))
    return torch.bmm(weights, value_room).view(1, num_heads, -1)
