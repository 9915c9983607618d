"""CompiledStep: steps of a model of the Llama family as one compiled program.

The program (`kvchat_kernels.cpu.program`) runs all layers and the head in one call: between Python
and the next Python there is no operator of torch. Weights are those of the module, read where they
lie. Activations are float32 throughout, so a step is nearer to exact than transformers' own forward
in 16 bits. That both compute the same model is for the self-test to show.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvchat.model.batch import ForwardBatch, WindowSlots
from kvchat.model.cpu.recurrent_prefill import replace_recurrences
from kvchat.model.cpu.step_inputs import embedding_into
from kvchat.model.cpu.step_operations import Unfit
from kvchat.model.cpu.step_program import CompiledKv, StepProgram
from kvchat.model.decoder.decoder import Decoder, num_weights
from kvchat.model.decoder.reader import read_decoder
from kvchat.model.decoder.recurrent import Mamba, SelectiveScan, TimeMixing
from kvchat.model.packed.experts import lay_by_rows
from kvchat.model.spec import ModelSpec
from kvchat_kernels.cpu.attention_task import JOB_ROWS
from kvchat_kernels.cpu.step import FEW_ROWS, MAX_ROWS, Header, set_num_rows
from kvchat_kernels.cpu_products import is_fast_by_torch
from kvchat_kernels.kv_layer import KvLayer
from kvchat_kernels.linear.blocks import BlockWeights
from kvchat_kernels.paged_attention import PagedSequences
from kvchat_kernels.state_buffer import StateBuffer

_log = logging.getLogger(__name__)

# With fewer weights in all, a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 20
# After so many weights a step may be abandoned: one row takes about 5 ms to there, 16 rows 30. With
# more rows than the second it may be earlier, as many times.
_WEIGHTS_PER_PIECE, _ROWS_OF_PIECE = 1 << 25, 32
# Prompts with a state have kernels (`recurrent_prefill.py`) that keep it in the fastest cache: 400
# rows of Granite's 0.3 B hybrid in 4 bits took twice as long here. So many rows are computed here,
# and so many of one sequence.
_MOST_ROWS_WITH_STATE, _MOST_OF_ONE_WITH_STATE = 4 * FEW_ROWS, FEW_ROWS
# Where torch multiplies float weights as they are: in float32, which its modules have a stream of
# too, and by instructions for the weights' 16 bits. With those, 512 rows of a 0.4 B model took a
# seventh of the time on a Xeon with AMX: a near tie may end otherwise than in a cached prompt.
_MOST_ROWS_BESIDE_TORCH, _MOST_OF_ONE_BESIDE_TORCH = 4 * FEW_ROWS, FEW_ROWS
# Any number. All rows of other models are computed here, in one arithmetic: a prompt that is read
# anew and one that comes from the cache get the same answer.
_ALL_ROWS = 1 << 30
# Bytes of attention's results, by parts of contexts, that the rows of a group may have. In an 8 B
# model 128 sequences that share 32,768 positions would have 256 MiB, and a layer's attention, in
# which nothing asks for a stop, would be as much longer. No group is smaller than FEW_ROWS for it.
_RESULT_BYTES = 1 << 26
# Rows of a group whose attention scores slots: each 16 have scores of their own.
_SCORED_ROWS = 128


class CompiledStep:
    """Runs steps over the pools it was made for, in groups of up to MAX_ROWS rows; `most_rows` says
    which steps it takes. One step at a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Sequence[CompiledKv],
        windowed: frozenset[int] = frozenset(),
        watched: tuple[int, ...] = (),
        first_heads: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Compile what is needed, 0.1 s to 15 s. Raises Unfit, or what llvmlite raises.

        `windowed` are the pools of window blocks, `watched` and `first_heads` as of StepProgram. A
        step with `first_heads` is for `score` alone.
        """
        self._decoder = decoder
        self._parts = StepProgram(decoder, pools, windowed, watched, first_heads)
        self._parts.program.prepare()
        self._parts.reading.prepare()
        self._vocab_size = decoder.head.num_out
        joined = self._parts.joined
        embedded = self._parts.stream if joined is None else joined.tokens
        self._embed_into = embedding_into(decoder.embedding, embedded)
        # Of ids from here on logits need not be computed: they are -inf then.
        self.most_ids = self._vocab_size
        self._num_rows = (0, 0)  # of activations and of logits, that the headers are set for
        self._prepared: tuple[int, ...] = ()  # what the program's units are set for
        # Called with the streams that are watched, side by side, or that before the last norm; the
        # next step overwrites them. None: nothing is copied.
        self.watch: Callable[[torch.Tensor], None] | None = None
        self._most_threads = max(1, num_weights(decoder) // _WEIGHTS_PER_THREAD)
        self._num_pieces = max(1, num_weights(decoder) // _WEIGHTS_PER_PIECE)
        parts = (layer.attention for layer in decoder.layers if layer.attention is not None)
        weights = next(parts).matrices[-1].weights
        self._most_rows, self._most_of_one = most_rows(decoder, weights)
        self._takes_prompts = not any(
            isinstance(part, Mamba) and part.limits_prompts
            for layer in decoder.layers
            for part in (layer.attention, layer.beside)
        )

    def logits(
        self,
        batch: ForwardBatch,
        check: Callable[[], None] | None = None,
        states: Sequence[StateBuffer] = (),
        num_guesses: Sequence[int] = (),
    ) -> torch.Tensor | None:
        """Run a step; return the logits of `batch.logit_rows`, [rows, vocab] float32.

        None, and nothing was done, for a step that is too large. `check` is called between groups
        of rows, and within them where a model is large. It may raise StepAbandoned.

        Of a model with recurrent layers, `states` are those of the sequences, which get their rows'
        tokens but for `num_tokens`. They are undefined if it raises, which it does only by `check`
        once it has begun. The last `num_guesses` rows of each sequence are guesses, which its state
        does not read.
        """
        sequences = batch.sequences
        if not isinstance(sequences, PagedSequences):
            return None
        num_rows = batch.token_ids.shape[0]
        assert len(states) == (len(sequences.query_lens) if self._decoder.state else 0)
        if num_rows > self._most_rows or max(sequences.query_lens) > self._most_of_one:
            return None
        num_guesses = num_guesses or [0] * len(states)
        if not self._takes_prompts:
            lengths = zip(sequences.query_lens, num_guesses, sequences.context_lens, strict=True)
            if not all(count - guesses == 1 < end for count, guesses, end in lengths):
                return None
        size = FEW_ROWS
        if num_rows > size:
            size = self._rows_of_group(max(sequences.context_lens))
        if num_rows <= size:
            return self._run(batch, states, num_guesses, check)
        assert not any(num_guesses), "guesses are of small steps"
        rows = []
        for start in range(0, num_rows, size):
            if start and check is not None:
                check()
            part, of_part = _part(batch, states, start, min(start + size, num_rows))
            rows.append(self._run(part, of_part, [0] * len(of_part), check))
        return torch.cat(rows)

    def score(self, batch: ForwardBatch, sums: torch.Tensor, highest: torch.Tensor) -> None:
        """Run the rows of one sequence, and add how much they attend to each of its first slots.

        sums, highest   as SlotScores has them
        """
        num_rows = batch.token_ids.shape[0]
        assert isinstance(batch.sequences, PagedSequences)
        size = min(_SCORED_ROWS, self._rows_of_group(max(batch.sequences.context_lens)))
        runs = sums.new_zeros(2, -(-size // JOB_ROWS), *sums.shape)
        self._parts.scores.record[:] = *(part.data_ptr() for part in runs), *sums.shape
        for start in range(0, num_rows, size):
            part, _ = _part(batch, (), start, min(start + size, num_rows))
            self._run(part, (), (), None)
        sums += runs[0].sum(dim=0)
        torch.maximum(highest, runs[1].amax(dim=0), out=highest)

    def _rows_of_group(self, context_len: int) -> int:
        """Return the most rows of a group of which none sees more slots than this."""
        parts = self._parts.parts.values()
        each = max((of_kind.result_bytes(context_len) for of_kind in parts), default=1)
        return max(FEW_ROWS, min(MAX_ROWS, _RESULT_BYTES // each))

    def _run(
        self,
        batch: ForwardBatch,
        states: Sequence[StateBuffer],
        num_guesses: Sequence[int],
        check: Callable[[], None] | None,
    ) -> torch.Tensor:
        sequences = batch.sequences
        assert isinstance(sequences, PagedSequences)
        self._embed(batch)
        logits = torch.empty(batch.logit_rows.shape[0], self._vocab_size, dtype=torch.float32)
        self._set(batch, sequences, logits)
        row = 0
        for index, count in enumerate(sequences.query_lens[: len(states)]):
            self._set_state(index, states[index], row, count, num_guesses[index])
            row += count
        self._run_program(check, batch.token_ids.shape[0])
        for state, count in zip(states, num_guesses, strict=True):
            state.num_unread = count
            if count:
                assert state.inputs is not None
                state.inputs = state.inputs[1], state.inputs[0]
        if self.watch is not None:
            self.watch(self._parts.watched_rows(batch.token_ids.shape[0]))
        self._finish(logits)
        if self.most_ids < self._vocab_size:
            num_ids = self._vocab_size * self._head_units() // self._parts.head_units
            logits[:, int(num_ids.min()) :] = -torch.inf
        return logits

    def _run_program(self, check: Callable[[], None] | None, num_rows: int) -> None:
        """Run the operations; `check` may also change torch's number of threads."""
        if check is None:
            self._parts.program.run(self._num_threads())
            return

        def between() -> int:
            check()
            return self._num_threads()

        num_pieces = self._num_pieces * max(1, num_rows // _ROWS_OF_PIECE)
        self._parts.program.run(self._num_threads(), between, num_pieces)

    def _num_threads(self) -> int:
        return min(torch.get_num_threads(), self._most_threads)

    def _head_units(self) -> Any:
        """Return how many units of the head's product are computed: each is a run of its rows."""
        units = self._parts.head_units
        return -(-units * min(self.most_ids, self._vocab_size) // self._vocab_size)

    def _embed(self, batch: ForwardBatch) -> None:
        """Write the rows of the stream and their angles."""
        self._embed_into(batch.token_ids)
        if self._parts.joined is not None:
            self._parts.joined.take(batch.token_ids.shape[0])
        if self._decoder.side_inputs is not None and self._parts.side is not None:
            side = self._decoder.side_inputs(batch.token_ids)
            self._parts.side[: len(side)] = side.flatten(1)
        if self._decoder.embedding_factor != 1.0:
            rows = self._parts.stream.numpy()[: batch.token_ids.shape[0]]
            rows *= self._decoder.embedding_factor
        for angles in self._parts.angles.values():
            angles.set(batch.positions)
        if self._parts.query_factors is not None:
            self._parts.query_factors.set(batch.positions)

    def _set_state(
        self, index: int, state: StateBuffer, row: int, count: int, num_guesses: int
    ) -> None:
        """Write which rows are of a sequence, and where what layers keep of it lies."""
        if num_guesses:
            state.reader = self._read
        if num_guesses and state.inputs is None:
            one, other = torch.empty(2, FEW_ROWS, self._parts.guess_bytes, dtype=torch.uint8)
            state.inputs = one, other
        right, guesses = [part.data_ptr() for part in state.inputs] if state.inputs else (0, 0)
        num_sure, at = count - num_guesses, state.data.data_ptr()
        self._parts.sequences[index] = row, count, at, num_sure, right, state.num_unread, guesses

    def _read(self, state: StateBuffer) -> None:
        """Let a state read what it has not read yet."""
        self._set_state(0, state, 0, 0, 0)
        self._parts.reading.run(self._num_threads())

    def _set(self, batch: ForwardBatch, sequences: PagedSequences, logits: torch.Tensor) -> None:
        """Write the headers, and the number of units of each operation."""
        parts, num_rows, num_logits = self._parts, batch.token_ids.shape[0], logits.shape[0]
        if self._num_rows != (num_rows, num_logits):
            set_num_rows(parts.header, num_rows)
            set_num_rows(parts.head_header, num_logits)
            self._num_rows = num_rows, num_logits
        parts.header[Header.SLOTS] = batch.slot_mapping.data_ptr()
        if parts.window_header is not None:
            parts.window_header[:] = parts.header
            assert batch.windowed is not None
            parts.window_header[Header.SLOTS] = batch.windowed.slot_mapping.data_ptr()
        parts.head_header[Header.ROWS] = batch.logit_rows.data_ptr()
        parts.logits_address[:] = logits.data_ptr()
        windowed = batch.windowed.sequences if batch.windowed is not None else sequences
        assert isinstance(windowed, PagedSequences)
        num_jobs = [
            of_kind.set(windowed if kind.has_window_blocks else sequences)
            for kind, of_kind in parts.parts.items()
        ]
        num_sequences = len(sequences.query_lens)
        is_watched = self.watch is not None
        is_fused = parts.joined is not None and parts.joined.is_fused
        switches = self.most_ids, is_watched, is_fused
        prepared = (num_rows, num_logits, num_sequences, *switches, *num_jobs)
        if self._prepared != prepared:
            self._prepare(num_rows, num_logits, num_sequences, num_jobs)
            self._prepared = prepared

    def _prepare(
        self, num_rows: int, num_logits: int, num_sequences: int, num_jobs: Sequence[int]
    ) -> None:
        """Write the numbers of units; a step that only follows another one has the same."""
        parts = self._parts
        units = parts.program.units
        for (kind, of_kind), count in zip(parts.parts.items(), num_jobs, strict=True):
            units[parts.of_parts[kind]] = count * of_kind.num_kv_heads
        units[parts.of_rows] = num_rows
        if self.watch is None:
            units[parts.stream_copies] = 0
        units[parts.of_picked] = num_logits
        units[parts.of_sequences] = parts.sequence_units * num_sequences
        units[parts.of_head] = self._head_units() if num_logits else 0
        if parts.has_pairs:
            parts.set_pairs(num_rows)
        if parts.joined is not None:
            parts.joined.prepare(units)
        parts.program.prepare()

    def _finish(self, logits: torch.Tensor) -> None:
        """Divide and cap logits in place, by numpy: torch's threads wait for each other, which took
        milliseconds beside another program.
        """
        numbers, cap = logits.numpy(), self._decoder.logits_softcap
        if self._decoder.logits_divisor != 1.0:
            numbers /= self._decoder.logits_divisor
        if cap is not None:
            numbers /= cap
            np.tanh(numbers, out=numbers)
            numbers *= cap


def most_rows(decoder: Decoder, weights: torch.Tensor | BlockWeights) -> tuple[int, int]:
    """Return the most rows of a step, and the most of one sequence; modules compute larger ones."""
    parts = [part for layer in decoder.layers for part in (layer.attention, layer.beside)]
    if any(isinstance(part, SelectiveScan) for part in parts):
        return _ALL_ROWS, _ALL_ROWS  # modules compute their prompts row by row
    is_by_torch = isinstance(weights, torch.Tensor) and is_fast_by_torch(weights.dtype)
    if decoder.state and (is_by_torch or not any(isinstance(part, TimeMixing) for part in parts)):
        return _MOST_ROWS_WITH_STATE, _MOST_OF_ONE_WITH_STATE
    if is_by_torch:
        return _MOST_ROWS_BESIDE_TORCH, _MOST_OF_ONE_BESIDE_TORCH
    return _ALL_ROWS, _ALL_ROWS


def _part(
    batch: ForwardBatch, states: Sequence[StateBuffer], start: int, end: int
) -> tuple[ForwardBatch, Sequence[StateBuffer]]:
    """Return the rows [`start`, `end`) of a step as a step, and the states of its sequences.

    The KV that its rows attend to, of earlier rows of their sequences, is written by then.
    """
    assert isinstance(batch.sequences, PagedSequences)
    sequences, of_part = batch.sequences.part(start, end)
    rows = batch.logit_rows
    windowed = batch.windowed
    if windowed is not None:
        tables = windowed.sequences.block_tables[of_part]
        slots = windowed.slot_mapping[start:end]
        windowed = WindowSlots(slots, replace(sequences, block_tables=tables))
    part = ForwardBatch(
        batch.token_ids[start:end],
        batch.positions[start:end],
        batch.slot_mapping[start:end],
        sequences,
        rows[(rows >= start) & (rows < end)] - start,
        windowed,
    )
    return part, states[of_part]


class CompiledModel:
    """A model that has compiled steps, until they are abandoned."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.is_off = False

    def begin(self, pools: Sequence[CompiledKv]) -> None:
        """Begin to compile the steps over such pools, beside what is done until they are wanted."""
        with suppress(Unfit, ImportError, RuntimeError):  # `step_over` raises it again
            StepProgram(self._decoder, pools)

    def step_over(
        self,
        pools: Sequence[KvLayer],
        windowed: frozenset[int] = frozenset(),
        watched: tuple[int, ...] = (),
        first_heads: Mapping[str, int] = MappingProxyType({}),
    ) -> CompiledStep | None:
        """Return the compiled step over these pools, as of CompiledStep.

        If there is none, the reason is logged, and all steps are left to the modules.
        """
        if self.is_off:
            return None
        layers = [pool for pool in pools if isinstance(pool, CompiledKv)]
        if len(layers) < len(pools):
            _log.info("no compiled step: KV is of a form that no kernel reads")
            self.abandon()
            return None
        try:
            return CompiledStep(self._decoder, layers, windowed, watched, first_heads)
        except (Unfit, ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError
            _log.info("no compiled step: it %s", error)
            self.abandon()
            return None

    def abandon(self) -> None:
        """Leave all steps to the model's modules from now on."""
        self.is_off = True


def compiled_model(module: Any, spec: ModelSpec) -> CompiledModel | None:
    """Return what compiles a loaded model's steps; None, with the reason logged, if nothing can."""
    lay_by_rows(module)
    decoder = read_decoder(module, spec)
    if isinstance(decoder, str):
        _log.info("no compiled steps: it %s", decoder)
        return None
    parts = [part for layer in decoder.layers for part in (layer.attention, layer.beside)]
    replace_recurrences(module, parts)
    return CompiledModel(decoder)
