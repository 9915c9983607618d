"""A sequence's keys or values on a CPU, as they lie in the pool: in few runs or scattered.

A chat's blocks follow each other but for a gap where another branch or a probe took some: reading
each run where it lies costs nothing, and copying them all cost a decode step up to half its time.
Knows pools and runs; computes nothing.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from kvchat_kernels.paged_attention.sequences import PagedSequences

# Beyond this many runs one gather is cheaper than to look at each.
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class Tokens:
    """Runs of tokens in position order: [num_tokens, num_heads, head_dim] each, views where may be.

    They belong to the pool: read only.
    """

    runs: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def joined(self) -> torch.Tensor:
        """Return all tokens as one tensor; a copy where there are several runs."""
        return self.runs[0] if len(self.runs) == 1 else torch.cat(self.runs)

    def by_head(self, sequences: PagedSequences, name: str) -> torch.Tensor:
        """Return a copy [num_heads, num_tokens, head_dim], in the step's scratch memory `name`."""
        first = self.runs[0]
        shape = (first.shape[1], len(self), first.shape[2])
        out = scratch(sequences.scratch, name, shape, first.dtype)
        start = 0
        for run in self.runs:
            out[:, start : start + len(run)].copy_(run.transpose(0, 1))
            start += len(run)
        return out


def tokens_from(
    pool: torch.Tensor, sequences: PagedSequences, index: int, first: int, dtype: torch.dtype
) -> Tokens:
    """Return a sequence's tokens from position `first` on, in `dtype`."""
    size = sequences.block_size
    runs = sequences.runs(index, first // size)
    if len(runs) > _MOST_RUNS:
        parts = [pool.index_select(0, sequences.blocks_of(index, first // size * size))]
    else:
        parts = [pool[start : start + count] for start, count in runs]
    tokens = [part.flatten(0, 1) for part in parts]
    num_unused = sum(map(len, tokens)) - (sequences.context_lens[index] - first // size * size)
    tokens[-1] = tokens[-1][: len(tokens[-1]) - num_unused]
    tokens[0] = tokens[0][first % size :]
    return Tokens(tuple(part.to(dtype) for part in tokens))


def scratch(
    room: dict[Hashable, torch.Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the memory called `name` as a tensor of `shape`, with any content."""
    num_elements = math.prod(shape)
    memory = room.get((name, dtype))
    if memory is None or memory.numel() < num_elements:
        memory = room[name, dtype] = torch.empty(num_elements, dtype=dtype)
    return memory[:num_elements].view(shape)
