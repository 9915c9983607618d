"""Parts: how the contexts of a step's sequences are cut for the compiled attention."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvchat_kernels.cpu.attention_task import JOB_ROWS, PART, Job, Record
from kvchat_kernels.cpu.step import MAX_ROWS
from kvchat_kernels.paged_attention.sequences import AttentionSpan, PagedSequences
from kvchat_kernels.slot_positions import EMPTY


class Parts:
    """Owns the record of layers that see the same slots, and the room for their results."""

    def __init__(
        self, span: AttentionSpan, num_heads: int, num_kv_heads: int, value_dim: int
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self._span = span
        self._num_heads = num_heads
        self._value_dim = value_dim
        self.record = np.zeros(len(Record), np.int64)
        self._rows = np.zeros((5, MAX_ROWS), np.int64)
        for index, place in enumerate(
            (Record.FIRST, Record.END, Record.RESULTS, Record.STRIDES, Record.COUNTS)
        ):
            self.record[place] = self._rows[index].ctypes.data
        self._jobs = np.zeros((0, len(Job)), np.int64)
        self._tables: torch.Tensor | None = None
        self._make_room(MAX_ROWS)

    def result_bytes(self, context_len: int) -> int:
        """Return the bytes of the results of a row that is the last of a context."""
        first = self._span.first_visible(context_len - 1)
        num_parts = (context_len - 1) // PART - first // PART + 1
        return num_parts * self._num_heads * self._value_dim * 4

    def set(self, sequences: PagedSequences) -> int:
        """Renew the record for a step; return the number of jobs."""
        jobs: list[tuple[int, ...]] = []
        num_results = row = 0
        tables = self._tables = sequences.block_tables  # kept while the step runs
        address, table_bytes = tables.data_ptr(), tables.stride(0) * 4
        for index, count, end in _runs_of_rows(sequences):
            firsts, runs = self._seen(sequences, index, count, end)
            parts = [part for run in runs for part in _parts_of(*run)]
            for local, first in enumerate(firsts):
                self._rows[:, row + local] = (
                    first,
                    end - count + local + 1,
                    num_results + local,
                    count,
                    len(parts),
                )
            for part in parts:
                jobs.append((row, count, *part, address + index * table_bytes, num_results))
                num_results += count
            row += count
        self._store(jobs, num_results)
        return len(jobs)

    def _seen(
        self, sequences: PagedSequences, index: int, count: int, end: int
    ) -> tuple[list[int], Sequence[tuple[int, int]]]:
        """Return the first slot that each of `count` rows before slot `end` sees, and the runs of
        slots that any of them sees: each first slot, and the one after the last.
        """
        first_visible = self._span.first_visible
        if sequences.positions is None:
            firsts = [first_visible(slot) for slot in range(end - count, end)]
            return firsts, [(firsts[0], end)]
        positions = sequences.positions_of(index)[:end].numpy()
        filled = np.flatnonzero(positions != EMPTY)
        known = positions[filled]
        lowest = [first_visible(position) for position in known[-count:].tolist()]
        starts = np.searchsorted(known, lowest)
        visible = filled[starts[0] :]
        runs = np.split(visible, np.flatnonzero(np.diff(visible) > 1) + 1)
        return filled[starts].tolist(), [(int(run[0]), int(run[-1]) + 1) for run in runs]

    def _store(self, jobs: list[tuple[int, ...]], num_results: int) -> None:
        if len(jobs) > len(self._jobs):
            self._jobs = np.zeros((2 * len(jobs), len(Job)), np.int64)
            self.record[Record.JOBS] = self._jobs.ctypes.data
        self._jobs[: len(jobs)] = jobs
        if num_results > len(self._sums):
            self._make_room(2 * num_results)

    def _make_room(self, num_results: int) -> None:
        self._sums = torch.empty(num_results, self._num_heads, self._value_dim, dtype=torch.float32)
        self._stats = torch.empty(num_results, self._num_heads, 2, dtype=torch.float32)
        self.record[Record.SUMS] = self._sums.data_ptr()
        self.record[Record.STATS] = self._stats.data_ptr()


def _parts_of(first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a run of slots: a multiple of PART, the first slot, one after the last."""
    for start in range(first // PART * PART, end, PART):
        yield start, max(start, first), min(start + PART, end)


def _runs_of_rows(sequences: PagedSequences) -> Iterator[tuple[int, int, int]]:
    """Yield a sequence's number, a number of rows, and the slot after that of the last of them.

    A sequence of many rows has several runs, since a job has room for so many scores.
    """
    lengths = zip(sequences.query_lens, sequences.context_lens, strict=True)
    for index, (num_rows, context_len) in enumerate(lengths):
        for left in range(num_rows, 0, -JOB_ROWS):
            count = min(left, JOB_ROWS)
            yield index, count, context_len - (left - count)
