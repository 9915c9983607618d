"""The order of values in interleaved rows: words of neighbouring blocks by turns.

So one vector has values of 8 blocks, and each lane those of a block of its own.
"""

from collections.abc import Iterator

import torch

# How many blocks alternate in an interleaved row, and in what is left of it.
GROUPS = (8, 4, 2, 1)


def alternating(blocks: torch.Tensor, word: int) -> torch.Tensor:
    """Return values [rows, blocks, n] as rows whose blocks alternate, [rows, blocks * n], copied.

    `word` of a block's values stay together.
    Activations beside weights of 4 bits lie so, the columns of low bits before those of high bits.
    """
    out = torch.empty_like(blocks).view(len(blocks), -1)
    for start, size, count in _groups(blocks.shape[1]):
        group = blocks[:, start : start + size * count].unflatten(1, (count, size))
        words = group.unflatten(3, (-1, word)).transpose(2, 3)
        first = start * blocks.shape[2]
        out[:, first : first + words[0].numel()].unflatten(1, words.shape[1:]).copy_(words)
    return out


def in_order(rows: torch.Tensor, width: int, word: int) -> torch.Tensor:
    """Return rows of alternating blocks as `alternating` took them, [rows, blocks, width]."""
    out = rows.new_empty(len(rows), rows.shape[1] // width, width)
    for start, size, count in _groups(out.shape[1]):
        end = start + size * count
        words = rows[:, start * width : end * width].unflatten(1, (count, -1, size, word))
        out[:, start:end] = words.transpose(2, 3).flatten(3).flatten(1, 2)
    return out


def _groups(num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of groups: the first block, the blocks of a group, and the number of groups."""
    start = 0
    for size in GROUPS:
        count = (num_blocks - start) // size
        if count:
            yield start, size, count
        start += size * count
