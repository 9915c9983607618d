"""The rows, lengths and block tables of a step's sequences, and the span that a query sees.

A span speaks of positions, a table of slots; `slot_positions.py` says what these are.
PagedSequences belongs to one step and has its lengths on the host. DeviceSequences is refilled for
every step and has its lengths on the device only. All layers of a forward pass share them.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from kvchat_kernels.launch import on_device


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Causal attention, optionally bounded by a sliding window or by fixed chunks.

    window   the query and the `window - 1` tokens before it are visible; None for all
    chunk    only tokens of the query's own chunk of `chunk` positions are visible; None for all
    """

    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """Return the lowest position that a query at `position` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

    @property
    def num_visible(self) -> int | None:
        """The most tokens that a query sees, itself included; None for any number."""
        return min((x for x in (self.window, self.chunk) if x is not None), default=None)

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return [num_queries, num_keys] bool, true where a query position sees a key position."""
        query, key = queries[:, None], keys[None, :]
        visible = key <= query
        if self.window is not None:
            visible &= key > query - self.window
        if self.chunk is not None:
            visible &= key // self.chunk == query // self.chunk
        return visible


FULL = AttentionSpan()


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of the products of a row with keys, and which keys it sees.

    scale     multiplies products, before `softcap`
    span      which earlier tokens a token sees
    softcap   bounds the scores: softcap * tanh(score / softcap); None for none
    sinks     [num_heads], an extra logit per head in the softmax's denominator; None for none
    """

    scale: float
    span: AttentionSpan = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class PagedSequences:
    """The sequences of one flattened batch, shared by all layers.

    The rows of a batch are the new tokens of its sequences, one sequence after another. Lengths
    exist twice: as tuples for code on the host, and as device tensors for kernels.

    query_lens      new tokens per sequence
    context_lens    slots per sequence; the last ones hold the new tokens
    block_tables    [num_sequences, max_blocks] int32, block ids in slot order, 0 where unused
    block_size      slots per block
    positions       [num_sequences, max_slots] int32 on the tables' device: the position of each
                    slot as of SlotPositions. None if all tables are shared: slot s holds position s
    num_tokens      rows of the batch
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    block_size: int
    positions: torch.Tensor | None = None
    num_tokens: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.query_lens))
        assert len(self.query_lens) == len(self.context_lens) == self.block_tables.shape[0]
        assert all(0 < q <= c for q, c in zip(self.query_lens, self.context_lens, strict=True))
        assert max(self.context_lens) <= self.block_tables.shape[1] * self.block_size
        if self.positions is not None:
            assert self.positions.dtype == torch.int32
            assert self.positions.shape[0] == len(self.query_lens)
            assert self.positions.shape[1] >= max(self.context_lens)

    def positions_of(self, sequence: int) -> torch.Tensor:
        """Return the positions of a sequence's slots, [context_len] on the tables' device."""
        context_len = self.context_lens[sequence]
        if self.positions is None:
            return torch.arange(context_len, device=self.block_tables.device)
        return self.positions[sequence, :context_len]

    @cached_property
    def query_starts(self) -> torch.Tensor:
        """[num_sequences + 1] int32 on the tables' device: first rows, then the end."""
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        return on_device(starts, torch.int32, self.block_tables.device)

    @cached_property
    def context_lens_device(self) -> torch.Tensor:
        """[num_sequences] int32 on the tables' device."""
        return on_device(self.context_lens, torch.int32, self.block_tables.device)

    @cached_property
    def plans(self) -> dict[Hashable, Any]:
        """A cache of decisions that are equal in several layers of the step."""
        return {}

    @cached_property
    def _rooms(self) -> dict[Hashable, torch.Tensor]:
        return {}

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory on the host by name and dtype, with undefined content.

        A layer uses it only until the next layer starts. Reused memory is in the processor's
        caches, and the system need not zero its pages.
        """
        num_elements = math.prod(shape)
        memory = self._rooms.get((name, dtype))
        if memory is None or memory.numel() < num_elements:
            memory = self._rooms[name, dtype] = torch.empty(num_elements, dtype=dtype)
        return memory[:num_elements].view(*shape)

    def part(self, start: int, end: int) -> tuple["PagedSequences", slice]:
        """Return the rows [`start`, `end`) as a batch, and which sequences it has.

        The KV that these attend to, of earlier rows of their sequences, is to be written by then.
        """
        which, query_lens, context_lens, after = [], [], [], 0
        lengths = zip(self.query_lens, self.context_lens, strict=True)
        for index, (count, context_len) in enumerate(lengths):
            before, after = after, after + count
            first, last = max(before, start), min(after, end)
            if first < last:
                which.append(index)
                query_lens.append(last - first)
                context_lens.append(context_len - (after - last))
        of_part = slice(which[0], which[-1] + 1)
        positions = self.positions[of_part] if self.positions is not None else None
        tables = self.block_tables[of_part]
        lens = tuple(query_lens), tuple(context_lens)
        return PagedSequences(*lens, tables, self.block_size, positions), of_part

    def blocks_of(self, sequence: int, first_slot: int) -> torch.Tensor:
        """Return the ids of the blocks from the one that has `first_slot` on.

        [num_blocks] int32; `first_slot` is a multiple of the block size.
        """
        first = first_slot // self.block_size
        end = -(-self.context_lens[sequence] // self.block_size)
        return self.block_tables[sequence, first:end]


@dataclass(frozen=True)
class DeviceSequences:
    """The sequences of a captured step, which is replayed with other contents of these tensors.

    A captured CUDA graph repeats the same launches. So the host plans with bounds that hold for
    every step: the numbers of rows and of sequences, and `max_query_len`. A sequence may have no
    tokens. Sequences with tokens come first, and together they have all rows. All tables are
    shared ones, where slot s holds position s.

    num_tokens       rows of the step
    max_query_len    the most new tokens of one sequence
    query_starts     [num_sequences + 1] int32, first rows, then `num_tokens`
    context_lens     [num_sequences] int32, slots including the new tokens'; 0 without tokens
    block_tables     [num_sequences, max_blocks] int32, as in PagedSequences; any row stride
    block_size       slots per block

    The code that fills the tensors owns them.
    """

    num_tokens: int
    max_query_len: int
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        num_sequences = self.block_tables.shape[0]
        assert self.query_starts.shape == (num_sequences + 1,)
        assert self.context_lens.shape == (num_sequences,)
        assert self.query_starts.dtype == self.context_lens.dtype == torch.int32
        assert 0 < self.max_query_len <= self.num_tokens <= num_sequences * self.max_query_len

    def read(self) -> PagedSequences:
        """Return the step's current content, read back from the device.

        For implementations that need lengths on the host. A step that calls this cannot be
        captured.
        """
        starts, ends = self.query_starts[:-1].tolist(), self.query_starts[1:].tolist()
        query_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        count = sum(length > 0 for length in query_lens)
        assert all(0 < length <= self.max_query_len for length in query_lens[:count])
        assert sum(query_lens) == self.num_tokens
        return PagedSequences(
            tuple(query_lens[:count]),
            tuple(self.context_lens[:count].tolist()),
            self.block_tables[:count],
            self.block_size,
        )


Sequences = PagedSequences | DeviceSequences

# Attends queries over a key pool and a value pool; shapes and result as of `paged_attention`.
AttentionFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequences, Scoring], torch.Tensor
]
