"""ForwardBatch: the inputs of one forward pass, built from the pieces of several sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvchat_kernels.launch import each_on_device, on_device
from kvchat_kernels.paged_attention import PagedSequences, Sequences
from kvchat_kernels.state_buffer import StateBuffer


class StepAbandoned(Exception):
    """A step was given up between two products: some of its KV is written, no logits are there."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The new tokens of several sequences, one after another, without padding.

    token_ids      [num_tokens] int64
    positions      [num_tokens] int64, absolute position of each token in its sequence
    slot_mapping   [num_tokens] int64, where each token's KV is written
    sequences      lengths and block tables; context lengths include the new tokens.
                   DeviceSequences where the same tensors are refilled for every step
    logit_rows     [num_rows] int64, the rows of the batch to compute logits for
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sequences: Sequences
    logit_rows: torch.Tensor

    def __post_init__(self) -> None:
        assert self.token_ids.shape == self.positions.shape == self.slot_mapping.shape
        assert self.token_ids.shape[0] == self.sequences.num_tokens


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """The new tokens of one sequence: `token_ids` follow `start` tokens whose KV is in `blocks`.

    `blocks` are the sequence's block ids in position order, with room for the new tokens. The
    forward pass computes logits for the last `num_logit_rows` new tokens. `state` is that of the
    recurrent layers after the `start` tokens, for a model that has such layers.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_logit_rows: int
    state: StateBuffer | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        """Return the slot of each new token's KV, in order."""
        return [
            self.blocks[position // block_size] * block_size + position % block_size
            for position in range(self.start, self.end)
        ]


def build_batch(
    pieces: Sequence[SequencePiece], block_size: int, device: torch.device
) -> ForwardBatch:
    """Concatenate the pieces into one batch without padding, with its tensors on `device`."""
    positions = [position for piece in pieces for position in range(piece.start, piece.end)]
    rows: list[int] = []
    start = 0
    for piece in pieces:
        end = start + len(piece.token_ids)
        rows.extend(range(end - piece.num_logit_rows, end))
        start = end

    token_ids = [token for piece in pieces for token in piece.token_ids]
    slots = [slot for piece in pieces for slot in piece.slots(block_size)]
    tensors = each_on_device((token_ids, positions, slots, rows), torch.int64, device)
    return ForwardBatch(
        token_ids=tensors[0],
        positions=tensors[1],
        slot_mapping=tensors[2],
        sequences=PagedSequences(
            query_lens=tuple(len(piece.token_ids) for piece in pieces),
            context_lens=tuple(piece.end for piece in pieces),
            block_tables=_block_tables(pieces, block_size, device),
            block_size=block_size,
        ),
        logit_rows=tensors[3],
    )


def _block_tables(
    pieces: Sequence[SequencePiece], block_size: int, device: torch.device
) -> torch.Tensor:
    """Return [num_sequences, max_blocks] int32: the blocks of each context, padded with 0."""
    lengths = [-(-piece.end // block_size) for piece in pieces]
    width = max(lengths)
    table = [
        list(piece.blocks[:length]) + [0] * (width - length)
        for piece, length in zip(pieces, lengths, strict=True)
    ]
    return on_device(table, torch.int32, device)
