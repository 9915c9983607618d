"""ForwardBatch: the inputs of one forward pass, built from the pieces of several sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvchat_kernels.launch import on_device
from kvchat_kernels.paged_attention import PagedSequences, Sequences
from kvchat_kernels.slot_positions import EMPTY, SlotPositions
from kvchat_kernels.state_buffer import StateBuffer

Numbers = np.ndarray[Any, np.dtype[np.int32]]


class StepAbandoned(Exception):
    """A step was given up between two products: some of its KV is written, no logits are there."""


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """Where layers with a window have their KV, if that is in window blocks of their own.

    slot_mapping and sequences as of ForwardBatch, but over window blocks. In the table of a
    sequence, `window_tables` says what stands for blocks that no row of the step sees.
    """

    slot_mapping: torch.Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The new tokens of several sequences, one after another, without padding.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64, the position of each token in its sequence
    slot_mapping   [num_tokens] int64, the pool's slot that each token's KV is written to
    sequences      lengths and block tables in slots; context lengths include the new tokens'.
                   DeviceSequences where the same tensors are refilled for every step
    logit_rows     [num_rows] int64, the rows of the batch to compute logits for
    windowed       the slots of layers with a window; None if they have those of all layers
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sequences: Sequences
    logit_rows: torch.Tensor
    windowed: WindowSlots | None = None

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.positions.shape == self.slot_mapping.shape
        assert self.token_ids.shape[0] == self.sequences.num_tokens


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """The new tokens of one sequence: `token_ids` have the positions from `start` on.

    `blocks` are the sequence's block ids in slot order, with room for the new tokens. Earlier slots
    hold the KV of the tokens before `start`: of all of them if `table_positions` is None, where
    slots are positions; otherwise of those that this names. The forward pass computes logits for
    the last `num_logit_rows` new tokens. `state` is that of the recurrent layers after the `start`
    tokens, for a model that has such layers; the last `num_guesses` tokens are guesses, which it
    does not read.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logit_rows: int
    state: StateBuffer | None = None
    table_positions: SlotPositions | None = None
    num_guesses: int = 0

    @property
    def end(self) -> int:
        """The position after the last token's."""
        return self.start + len(self.token_ids)

    @property
    def first_slot(self) -> int:
        """The slot of the first new token; the others follow it."""
        if self.table_positions is None:
            return self.start
        return self.table_positions.slot_of(self.start)

    @property
    def num_slots(self) -> int:
        """The slots of the sequence, including those of the new tokens."""
        return self.first_slot + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        """Return the pool's slot of each new token's KV, in order."""
        first = self.first_slot
        return [
            self.blocks[slot // block_size] * block_size + slot % block_size
            for slot in range(first, first + len(self.token_ids))
        ]


def build_batch(
    pieces: Sequence[SequencePiece],
    block_size: int,
    device: torch.device,
    window_blocks: torch.Tensor | None = None,
) -> ForwardBatch:
    """Concatenate the pieces into one batch without padding, with its tensors on `device`.

    `window_blocks`, [num_blocks] int32 on the host, says which window block each block has, where
    layers with a window have window blocks.
    """
    token_ids = [token for piece in pieces for token in piece.token_ids]
    num_tokens, logit_rows = len(token_ids), rows_of_logits(pieces)
    # Each begins at a multiple of 16 bytes: other alignments would compile a GPU's kernels anew.
    rest = [0] * (num_tokens % 2)
    slots = [*(slot for piece in pieces for slot in piece.slots(block_size)), *rest]
    numbers = [
        [*token_ids, *rest],
        [*(position for piece in pieces for position in range(piece.start, piece.end)), *rest],
        slots,
        [*logit_rows, *[0] * (len(slots) - len(logit_rows))],
    ]
    if window_blocks is not None:
        numbers.append(slots_in_windows(slots, block_size, window_blocks))
    of_tokens = on_device(numbers, torch.int64, device)[:, :num_tokens]
    tables = _block_tables(pieces, block_size)
    sequences = PagedSequences(
        query_lens=tuple(len(piece.token_ids) for piece in pieces),
        context_lens=tuple(piece.num_slots for piece in pieces),
        block_tables=on_device(tables, torch.int32, device),
        block_size=block_size,
        positions=_positions_of_slots(pieces, device),
    )
    windowed = None
    if window_blocks is not None:
        own = window_tables(tables, [p.first_slot // block_size for p in pieces], window_blocks)
        in_windows = on_device(own, torch.int32, device)
        windowed = WindowSlots(of_tokens[4], replace(sequences, block_tables=in_windows))
    return ForwardBatch(
        token_ids=of_tokens[0],
        positions=of_tokens[1],
        slot_mapping=of_tokens[2],
        sequences=sequences,
        logit_rows=of_tokens[3, : len(logit_rows)],
        windowed=windowed,
    )


def rows_of_logits(pieces: Sequence[SequencePiece]) -> list[int]:
    """Return the rows of a batch of these pieces that they ask logits of, in order."""
    ends = accumulate(len(piece.token_ids) for piece in pieces)
    each = zip(pieces, ends, strict=True)
    return [row for piece, end in each for row in range(end - piece.num_logit_rows, end)]


def slots_in_windows(
    slots: Sequence[int], block_size: int, window_blocks: torch.Tensor
) -> list[int]:
    """Return the same slots of layers that have window blocks, as of `build_batch`; -1 stays.

    It is numpy's work: torch's operators for it took 0.25 ms of each decode step.
    """
    places = np.asarray(slots)
    numbers = window_blocks.numpy().take(places // block_size).astype(np.int64)
    assert numbers[places >= block_size].all(), "a token has no window block"
    own: list[int] = np.where(
        places < 0, places, numbers * block_size + places % block_size
    ).tolist()
    return own


def window_tables(
    tables: Numbers, num_before: Sequence[int], window_blocks: torch.Tensor
) -> Numbers:
    """Return tables [num_sequences, max_blocks] int32 of the window blocks that blocks have.

    `num_before` counts the blocks before that of the first new token, for each sequence. The last
    of these stands for blocks that have none, which no row of the step sees: kernels of a GPU read
    some slots before the window and multiply what they find by zero, and it is a finite number
    there.
    """
    own: Numbers = window_blocks.numpy().take(tables)
    for numbers, count in zip(own, num_before, strict=True):
        if count:
            numbers[numbers == 0] = numbers[count - 1]
    return own


def _block_tables(pieces: Sequence[SequencePiece], block_size: int) -> Numbers:
    """Return [num_sequences, max_blocks] int32: the blocks of each context, padded with 0."""
    lengths = [-(-piece.num_slots // block_size) for piece in pieces]
    width = max(lengths)
    table = [
        list(piece.blocks[:length]) + [0] * (width - length)
        for piece, length in zip(pieces, lengths, strict=True)
    ]
    return np.array(table, np.int32)


def _positions_of_slots(
    pieces: Sequence[SequencePiece], device: torch.device
) -> torch.Tensor | None:
    """Return [num_sequences, max_slots] int32, padded with EMPTY; None if no table is private."""
    if all(piece.table_positions is None for piece in pieces):
        return None
    width = max(piece.num_slots for piece in pieces)
    rows = []
    for piece in pieces:
        count, own = piece.num_slots, piece.table_positions
        positions = range(count) if own is None else own.of_slots(count)
        rows.append([*positions, *[EMPTY] * (width - count)])
    return on_device(rows, torch.int32, device)
