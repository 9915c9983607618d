"""Which rows of a step belong to which sequence, where its KV lies, and what a query may see.

PagedSequences is made for one step and has its lengths on the host. DeviceSequences is made once
and filled anew for every step: its lengths are on the device only. AttentionSpan holds positions
only. None depends on a layer, a head or a weight: one serves every layer of a forward pass.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvchat_kernels.sending import on_device


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Causal attention, optionally bounded by a sliding window or by fixed chunks.

    window   the query and the `window - 1` tokens before it are visible; None for all
    chunk    only tokens of the query's own chunk of `chunk` positions are visible; None for all
    """

    window: int | None = None
    chunk: int | None = None

    def first_visible(self, position: int) -> int:
        """Return the lowest position a query at `position` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

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


@dataclass(frozen=True)
class PagedSequences:
    """The sequences of one flattened batch, complete at birth and shared by all layers.

    Rows of a batch are the new tokens of its sequences, one sequence after another. Lengths exist
    twice: as tuples for code that runs on the host, and as device tensors for kernels, which must
    not wait for the host.

    query_lens      new tokens per sequence
    context_lens    tokens per sequence including the new ones
    block_tables    [num_sequences, max_blocks] int32, block ids in position order, 0 where unused
    block_size      tokens per block
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.context_lens) == self.block_tables.shape[0]
        assert all(0 < q <= c for q, c in zip(self.query_lens, self.context_lens, strict=True))
        assert max(self.context_lens) <= self.block_tables.shape[1] * self.block_size

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

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
    def masks(self) -> dict[Hashable, torch.Tensor]:
        """Room for masks that every layer of a step would make alike, by whatever sets them."""
        return {}

    @cached_property
    def plans(self) -> dict[Hashable, Any]:
        """Room for what every layer of a step would decide alike, by whatever decides."""
        return {}

    @cached_property
    def scratch(self) -> dict[Hashable, torch.Tensor]:
        """Memory that a layer fills and is done with before the next one, by what it is used for.

        Memory used again is in the caches, and its pages need no zeroing by the system.
        """
        return {}

    @cached_property
    def _tables_on_host(self) -> list[list[int]]:
        return self.block_tables.tolist()

    @cached_property
    def _runs(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        return {}

    def runs(self, sequence: int, first_token: int) -> tuple[tuple[int, int], ...]:
        """Return where a sequence's tokens from `first_token` on lie in a pool, in position order.

        Each run is a first slot and the slot behind its last: tokens that lie one after another,
        whose blocks do. Found once and remembered: every layer asks the same.
        """
        key = (sequence, first_token)
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._find_runs(sequence, first_token)
        return runs

    def _find_runs(self, sequence: int, first_token: int) -> tuple[tuple[int, int], ...]:
        size, end = self.block_size, self.context_lens[sequence]
        table = self._tables_on_host[sequence]
        runs: list[tuple[int, int]] = []
        position = first_token
        while position < end:
            slot = table[position // size] * size + position % size
            length = min(size - position % size, end - position)
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + length)
            else:
                runs.append((slot, slot + length))
            position += length
        return tuple(runs)

    def blocks_of(self, sequence: int, first_token: int) -> torch.Tensor:
        """Return the ids of the blocks that hold `first_token` and everything after it.

        [num_blocks] int32; `first_token` is a multiple of the block size.
        """
        first = first_token // self.block_size
        end = -(-self.context_lens[sequence] // self.block_size)
        return self.block_tables[sequence, first:end]


@dataclass(frozen=True)
class DeviceSequences:
    """The sequences of a step that is run again and again with other contents of its tensors.

    A captured CUDA graph repeats its launches as they were. So what the host plans with here are
    bounds, which hold for every step: so many rows, so many sequences, none with more new tokens
    than `max_query_len`. A sequence may have no tokens at all; those that have some come first, and
    together they own every row.

    num_tokens       rows of the step
    max_query_len    most new tokens of one sequence
    query_starts     [num_sequences + 1] int32, first rows, then `num_tokens`
    context_lens     [num_sequences] int32, tokens including the new ones; 0 where there are none
    block_tables     [num_sequences, max_blocks] int32, as in PagedSequences; any row stride
    block_size       tokens per block

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
        """Return the step as it stands now, read back from the device.

        For implementations that run on the host. A step that needs this cannot be captured.
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
