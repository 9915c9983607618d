"""StepBuffers: the input tensors of captured steps, at fixed addresses, refilled for every step.

They hold a step's tokens, the slots and blocks of its KV, and its sampling settings. StepBuffers
pads the pieces to the shape of a captured step; padding writes to a scratch block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvchat.model.batch import (
    ForwardBatch,
    Numbers,
    SequencePiece,
    WindowSlots,
    slots_in_windows,
    window_tables,
)
from kvchat_kernels.launch import on_device
from kvchat_kernels.paged_attention import DeviceSequences
from kvchat_kernels.sampler import RowDraw, SamplerRows

_NOT_WRITTEN = -1
# The draw (greedy) of padding rows, and of pieces whose drawn tokens are not used.
_LIKELIEST = RowDraw()


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for `num_rows` sequences of `query_len` new tokens each, or shorter sequences.

    A decode step has a `query_len` of 1, a verification of k drafts k + 1.
    """

    num_rows: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len

    @property
    def num_sequences(self) -> int:
        """The most sequences of the step; if some are short, padding needs its own sequences."""
        return self.num_rows if self.query_len == 1 else 2 * self.num_rows

    def holds(self, lengths: Sequence[int]) -> bool:
        """Return whether pieces with these numbers of new tokens can be padded to this shape."""
        num_padding = self.num_tokens - sum(lengths)
        num_sequences = len(lengths) + -(-num_padding // self.query_len)
        return (
            num_padding >= 0
            and max(lengths) <= self.query_len
            and num_sequences <= self.num_sequences
        )


class _Tables:
    """Block tables on `device`, [num_rows, width] int32, at first with the scratch block alone."""

    def __init__(self, num_rows: int, width: int, scratch: int, device: torch.device) -> None:
        self.blocks = torch.full((num_rows, width), scratch, dtype=torch.int32, device=device)
        # The blocks last written to each row; the columns after them may hold old ids.
        self._known = [np.empty(0, np.int32)] * num_rows

    def fill(self, row: int, blocks: Numbers) -> None:
        """Write a row, unless it is unchanged: most steps add no block."""
        if np.array_equal(self._known[row][: len(blocks)], blocks):
            return
        ids = on_device(blocks, torch.int32, self.blocks.device)
        self.blocks[row, : len(blocks)].copy_(ids)
        self._known[row] = blocks


class StepBuffers:
    """Tensors on `device`, sized for the largest of `shapes`; a smaller shape uses their start.

    Contexts have at most `max_context` tokens. Padding tokens form sequences of their own, of at
    most `query_len` tokens, that read and write only `scratch_block`. With `window_blocks`, as of
    `build_batch`, there are slots and tables in window blocks too; there `scratch_block` is 0.
    """

    def __init__(
        self,
        shapes: Sequence[StepShape],
        block_size: int,
        max_context: int,
        scratch_block: int,
        device: torch.device,
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_context = max_context
        self.scratch_block = scratch_block
        # Rows start at multiples of 16 bytes: Triton compiles a second kernel for other alignments.
        self._max_tokens = _rounded(max(shape.num_tokens for shape in shapes), 4)
        self._max_sequences = _rounded(max(shape.num_sequences for shape in shapes) + 1, 4)
        self._width = -(-max_context // block_size)
        # _tokens: token ids, positions, slots, and those in window blocks. _lengths: each
        # sequence's first row, its context length.
        num_kinds = 3 if window_blocks is None else 4
        self._tokens = torch.zeros(num_kinds, self._max_tokens, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(2, self._max_sequences, dtype=torch.int32, device=device)
        shape = self._max_sequences, self._width
        self._tables = _Tables(*shape, scratch_block, device)
        self._window_blocks = window_blocks
        self._window_tables = None
        if window_blocks is not None:
            assert window_blocks[scratch_block] == 0
            self._window_tables = _Tables(*shape, 0, device)
        self._rows = torch.arange(self._max_tokens, device=device)
        # _shares: temperature, top-p and min-p of each row.
        self._shares = torch.zeros(3, self._max_tokens, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(self._max_tokens, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(self._max_tokens, dtype=torch.int64, device=device)
        self._draws: list[RowDraw] = []  # the content of these three
        # The blocks of each row of a table, as a list and as numbers of numpy.
        self._row_blocks: list[list[int]] = [[] for _ in range(self._max_sequences)]
        self._numbers = [np.empty(0, np.int32)] * self._max_sequences

    def batch(self, shape: StepShape) -> ForwardBatch:
        """Return the batch of a step of this shape: views of the buffers, logits for every row."""
        num_tokens, num_sequences = shape.num_tokens, shape.num_sequences
        sequences = DeviceSequences(
            num_tokens=num_tokens,
            max_query_len=shape.query_len,
            query_starts=self._lengths[0, : num_sequences + 1],
            context_lens=self._lengths[1, :num_sequences],
            block_tables=self._tables.blocks[:num_sequences],
            block_size=self.block_size,
        )
        windowed = None
        if self._window_tables is not None:
            tables = self._window_tables.blocks[:num_sequences]
            in_windows = replace(sequences, block_tables=tables)
            windowed = WindowSlots(self._tokens[3, :num_tokens], in_windows)
        return ForwardBatch(
            token_ids=self._tokens[0, :num_tokens],
            positions=self._tokens[1, :num_tokens],
            slot_mapping=self._tokens[2, :num_tokens],
            sequences=sequences,
            logit_rows=self._rows[:num_tokens],
            windowed=windowed,
        )

    def sampler_rows(self, shape: StepShape) -> SamplerRows:
        """Return the sampling settings of this shape's rows: views of the buffers.

        The positions, of the tokens drawn, are a new tensor that this call computes.
        """
        num_tokens = shape.num_tokens
        temperature, top_p, min_p = self._shares[:, :num_tokens]
        return SamplerRows(
            temperature,
            self._top_k[:num_tokens],
            top_p,
            min_p,
            self._seeds[:num_tokens],
            self._tokens[1, :num_tokens] + 1,
        )

    def has_room_for(self, pieces: Sequence[SequencePiece]) -> bool:
        """Return whether every piece's context has at most `max_context` tokens, in a shared table:
        captured steps know no others.
        """
        return all(p.end <= self.max_context and p.table_positions is None for p in pieces)

    def fill(
        self,
        pieces: Sequence[SequencePiece],
        shape: StepShape,
        draws: Sequence[RowDraw | None] = (),
        fed: torch.Tensor | None = None,
    ) -> None:
        """Fill the buffers with the pieces and pad them to `shape`, which must hold them.

        `draws` has one entry per piece; empty if the caller does not use the drawn tokens. `fed`,
        [num_pieces] int64 on the device, is what an earlier step draws: the token ids of pieces of
        one token each, in place of their own.
        """
        padding = list(self._padding(pieces, shape))
        slots = [slot for piece in pieces for slot in piece.slots(self.block_size)]
        for piece in padding:
            slots += self._scratch_slots(len(piece.token_ids))
        self._fill([*pieces, *padding], slots, shape)
        if fed is not None:
            assert all(len(piece.token_ids) == 1 for piece in pieces)
            # -1 says that a logit was NaN. The step is in vain then, but -1 has no embedding, and
            # reading beyond a tensor is an error that a CUDA process does not survive.
            torch.clamp(fed, min=0, out=self._tokens[0, : len(pieces)])
        ways = draws or [None] * len(pieces)
        rows = [way for way, piece in zip(ways, pieces, strict=True) for _ in piece.token_ids]
        self._fill_draws([way or _LIKELIEST for way in rows], shape)

    def fill_for_check(self, shape: StepShape) -> None:
        """Fill the buffers with a test step that differs from padding in every input.

        Its contexts are long and repeat the scratch block. At most one token writes each slot, so
        that equal steps leave equal KV. Its rows use different sampling settings.
        """
        first = max(0, min(self.max_context - shape.query_len, 300))
        num_blocks = -(-(first + shape.query_len) // self.block_size)
        blocks = [self.scratch_block] * num_blocks
        pieces = [
            SequencePiece(
                token_ids=[1 + (row + token) % 7 for token in range(shape.query_len)],
                start=max(0, first - 3 * row),
                blocks=blocks,
                num_logit_rows=shape.query_len,
            )
            for row in range(shape.num_rows)
        ]
        slots, taken = [], set[int]()
        for slot in (slot for piece in pieces for slot in piece.slots(self.block_size)):
            slots.append(slot if slot not in taken else _NOT_WRITTEN)
            taken.add(slot)
        self._fill(pieces, slots, shape)
        ways = (RowDraw(0.8, 40, 0.9, 0.01, 7), RowDraw(1.5, 0, 1.0, 0.0, -3), _LIKELIEST)
        self._fill_draws([ways[row % len(ways)] for row in range(shape.num_tokens)], shape)

    def _padding(
        self, pieces: Sequence[SequencePiece], shape: StepShape
    ) -> Iterator[SequencePiece]:
        """Yield sequences in the scratch block that fill the shape's unused tokens."""
        missing = shape.num_tokens - sum(len(piece.token_ids) for piece in pieces)
        while missing > 0:
            length = min(missing, shape.query_len)
            blocks = [self.scratch_block] * -(-length // self.block_size)
            yield SequencePiece([0] * length, 0, blocks, 0)
            missing -= length

    def _scratch_slots(self, count: int) -> list[int]:
        """Return slots in the scratch block for `count` padding tokens.

        More tokens than a block holds overwrite each other. Only padding reads these slots.
        """
        first = self.scratch_block * self.block_size
        return [first + index % self.block_size for index in range(count)]

    def _fill(self, pieces: Sequence[SequencePiece], slots: list[int], shape: StepShape) -> None:
        assert len(slots) == shape.num_tokens
        assert len(pieces) <= shape.num_sequences
        token_ids = [token for piece in pieces for token in piece.token_ids]
        positions = [p for piece in pieces for p in range(piece.start, piece.end)]
        numbers = [token_ids, positions, slots]
        if self._window_blocks is not None:
            numbers.append(slots_in_windows(slots, self.block_size, self._window_blocks))
        tokens = on_device(numbers, torch.int64, self._tokens.device)
        self._tokens[:, : len(slots)].copy_(tokens)
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece.token_ids))
        # Unused sequences start after the last row, with no tokens and a context of 0.
        rest = shape.num_sequences + 1 - len(pieces)
        starts += [shape.num_tokens] * (rest - 1)
        ends = [piece.end for piece in pieces] + [0] * rest
        lengths = on_device([starts, ends], torch.int32, self._lengths.device)
        self._lengths[:, : shape.num_sequences + 1].copy_(lengths)
        for row, piece in enumerate(pieces):
            blocks = self._blocks_of(row, list(piece.blocks[: -(-piece.end // self.block_size)]))
            self._tables.fill(row, blocks)
            if self._window_tables is not None and self._window_blocks is not None:
                num_before = piece.start // self.block_size
                [own] = window_tables(blocks[None], [num_before], self._window_blocks)
                self._window_tables.fill(row, own)

    def _blocks_of(self, row: int, blocks: list[int]) -> Numbers:
        """Return a row's blocks as numbers of numpy, made anew only where they change: a long list
        takes longer than all else of a step.
        """
        if self._row_blocks[row][: len(blocks)] != blocks:
            self._row_blocks[row], self._numbers[row] = blocks, np.array(blocks, np.int32)
        return self._numbers[row][: len(blocks)]

    def _fill_draws(self, draws: list[RowDraw], shape: StepShape) -> None:
        """Write the sampling settings, unless they are unchanged, as in most steps."""
        draws = draws + [_LIKELIEST] * (shape.num_tokens - len(draws))
        if self._draws[: len(draws)] == draws:
            return
        device = self._seeds.device
        shares = [
            [draw.temperature for draw in draws],
            [draw.top_p for draw in draws],
            [draw.min_p for draw in draws],
        ]
        top_k, seeds = [draw.top_k for draw in draws], [draw.seed for draw in draws]
        self._shares[:, : len(draws)].copy_(on_device(shares, torch.float32, device))
        self._top_k[: len(draws)].copy_(on_device(top_k, torch.int32, device))
        self._seeds[: len(draws)].copy_(on_device(seeds, torch.int64, device))
        self._draws = draws + self._draws[len(draws) :]


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
