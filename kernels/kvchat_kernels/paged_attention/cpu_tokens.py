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
MOST_RUNS = 8
# From about this many tokens on the fused kernel reads a copy sooner than the pool, the copying
# included: it goes through the tokens head by head, and the copy is in the caches by then.
WORTH_COPYING = 2048


@dataclass(frozen=True, slots=True)
class Tokens:
    """Runs of tokens in position order: [num_tokens, num_heads, head_dim] each, views where may be.

    They belong to the pool: read only. `count` is the number of tokens of all runs. `are_copies`
    where they had to be gathered or made another dtype.
    """

    runs: tuple[torch.Tensor, ...]
    count: int
    are_copies: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0].dtype

    def joined(self, sequences: PagedSequences, name: str) -> torch.Tensor:
        """Return all tokens as one tensor; a copy in the step's scratch memory `name` where there
        are several runs, or many tokens that still lie in the pool.
        """
        first = self.runs[0]
        if len(self.runs) == 1 and (self.are_copies or self.count < WORTH_COPYING):
            return first
        out = scratch(sequences.scratch, name, (self.count, *first.shape[1:]), first.dtype)
        return torch.cat(self.runs, out=out)

    def by_head(self, sequences: PagedSequences, name: str, size: int) -> torch.Tensor:
        """Return a copy [num_heads, size, head_dim], in the step's scratch memory `name`; zeros
        behind the last token.
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
    """Return the memory called `name` as a tensor of `shape`, with any content."""
    num_elements = math.prod(shape)
    memory = room.get((name, dtype))
    if memory is None or memory.numel() < num_elements:
        memory = room[name, dtype] = torch.empty(num_elements, dtype=dtype)
    return memory[:num_elements].view(shape)
