"""CompiledStep: steps of few rows of a model of the Llama family as one compiled program.

The program (`kvchat_kernels.cpu.program`) runs all layers and the head in one call: between Python
and the next Python there is no operator of torch. Weights are those of the module, read where they
lie. Activations are float32 throughout, so a step is nearer to exact than transformers' own forward
in 16 bits. That both compute the same model is for the self-test to show.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kvchat.model.batch import ForwardBatch
from kvchat.model.decoder import Decoder, num_weights, read_decoder
from kvchat.model.spec import ModelSpec
from kvchat.model.step_operations import Unfit
from kvchat.model.step_program import CompiledKv, StepProgram
from kvchat_kernels.cpu.step import MAX_ROWS, Header
from kvchat_kernels.kv_layer import KvLayer
from kvchat_kernels.paged_attention import PagedSequences

_log = logging.getLogger(__name__)

# With fewer weights in all, a thread more costs more than it saves.
_WEIGHTS_PER_THREAD = 1 << 20
# With more rows, one pass of torch's products over the weights is faster than several of these.
_MOST_ROWS = 4 * MAX_ROWS


class CompiledStep:
    """Runs steps over the pools it was made for: at most MAX_ROWS rows at once, and of several
    sequences up to _MOST_ROWS, group by group. One step at a time.
    """

    def __init__(self, decoder: Decoder, pools: Sequence[CompiledKv]) -> None:
        """Compile what is needed, 0.1 to 1 s. Raises Unfit, or what llvmlite raises."""
        self._decoder = decoder
        self._parts = StepProgram(decoder, pools)
        self._vocab_size = decoder.head.num_out
        self._most_threads = max(1, num_weights(decoder) // _WEIGHTS_PER_THREAD)

    def logits(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run a step; return the logits of `batch.logit_rows`, [rows, vocab] float32.

        None, and nothing was done, for a step that is too large.
        """
        groups = _groups(batch)
        if groups is None:
            return None
        rows = [self._run(group) for group in groups]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        sequences = batch.sequences
        assert isinstance(sequences, PagedSequences)
        self._embed(batch, max(sequences.context_lens))
        logits = torch.empty(batch.logit_rows.shape[0], self._vocab_size, dtype=torch.float32)
        self._set(batch, sequences, logits)
        self._parts.program.run(min(torch.get_num_threads(), self._most_threads))
        return self._finished(logits)

    def _embed(self, batch: ForwardBatch, end: int) -> None:
        """Write the rows of the stream and their angles; all positions are below `end`."""
        rows = self._parts.stream[: batch.token_ids.shape[0]]
        rows[:] = self._decoder.embedding(batch.token_ids[None])[0]
        if self._decoder.embedding_factor != 1.0:
            rows *= self._decoder.embedding_factor
        for angles in self._parts.angles.values():
            angles.set(batch.positions, end)

    def _set(self, batch: ForwardBatch, sequences: PagedSequences, logits: torch.Tensor) -> None:
        """Write the headers, and the number of units of each operation."""
        parts, num_logits = self._parts, len(logits)
        parts.header[Header.NUM_ROWS] = batch.token_ids.shape[0]
        parts.header[Header.SLOTS] = batch.slot_mapping.data_ptr()
        parts.head_header[Header.NUM_ROWS] = num_logits
        parts.head_header[Header.ROWS] = batch.logit_rows.data_ptr()
        parts.logits_address[:] = logits.data_ptr()
        units = parts.program.units
        for kind, of_kind in parts.parts.items():
            units[parts.of_parts[kind]] = of_kind.set(sequences) * of_kind.num_kv_heads
        units[parts.of_rows] = batch.token_ids.shape[0]
        units[parts.of_picked] = num_logits
        units[parts.of_head] = parts.head_units if num_logits else 0
        if parts.has_pairs:
            parts.set_pairs(batch.token_ids.shape[0])
        parts.program.prepare()

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        decoder = self._decoder
        if decoder.logits_divisor != 1.0:
            logits /= decoder.logits_divisor
        if decoder.logits_softcap is not None:
            logits.div_(decoder.logits_softcap).tanh_().mul_(decoder.logits_softcap)
        return logits


def _groups(batch: ForwardBatch) -> list[ForwardBatch] | None:
    """Return a step as groups of whole sequences of at most MAX_ROWS rows; None if it is larger."""
    sequences = batch.sequences
    if not isinstance(sequences, PagedSequences) or batch.token_ids.shape[0] > _MOST_ROWS:
        return None
    if batch.token_ids.shape[0] <= MAX_ROWS:
        return [batch]
    if max(sequences.query_lens) > MAX_ROWS:
        return None
    groups, first, start, end = [], 0, 0, 0
    for index, count in enumerate(sequences.query_lens):
        if end + count - start > MAX_ROWS:
            groups.append(_part(batch, sequences, slice(first, index), start, end))
            first, start = index, end
        end += count
    groups.append(_part(batch, sequences, slice(first, None), start, end))
    return groups


def _part(
    batch: ForwardBatch, sequences: PagedSequences, which: slice, start: int, end: int
) -> ForwardBatch:
    """Return the sequences `which` of a step, whose rows are [`start`, `end`)."""
    rows = batch.logit_rows
    return ForwardBatch(
        batch.token_ids[start:end],
        batch.positions[start:end],
        batch.slot_mapping[start:end],
        PagedSequences(
            sequences.query_lens[which],
            sequences.context_lens[which],
            sequences.block_tables[which],
            sequences.block_size,
        ),
        rows[(rows >= start) & (rows < end)] - start,
    )


class CompiledModel:
    """A model that has compiled steps, until they are abandoned."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.is_off = False

    def step_over(self, pools: Sequence[KvLayer]) -> CompiledStep | None:
        """Return the compiled step over these pools; None, with the reason logged, if none is."""
        if self.is_off:
            return None
        layers = [pool for pool in pools if isinstance(pool, CompiledKv)]
        if len(layers) < len(pools):
            _log.info("no compiled step: KV is of a form that no kernel reads")
            return None
        try:
            return CompiledStep(self._decoder, layers)
        except (Unfit, ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError
            _log.info("no compiled step: it %s", error)
            return None

    def abandon(self) -> None:
        """Leave all steps to the model's modules from now on; for step_over only."""
        self.is_off = True


def compiled_model(module: Any, spec: ModelSpec) -> CompiledModel | None:
    """Return what compiles a loaded model's steps; None, with the reason logged, if nothing can."""
    decoder = read_decoder(module, spec)
    if isinstance(decoder, str):
        _log.info("no compiled steps: it %s", decoder)
        return None
    return CompiledModel(decoder)
