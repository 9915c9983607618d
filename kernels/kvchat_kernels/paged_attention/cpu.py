"""Paged attention on a CPU: the compiled step's kernels, outside of a step.

They compute in float32, a row by itself, whatever the dtype. torch attends many rows in 16 bits
where the processor multiplies in these: its fused kernel takes half of the time there. The
reference serves layers whose sizes no kernel takes, and machines where nothing can be compiled.
"""

import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvchat_kernels.cpu_products import few_sizes, multiplies_in
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring, Sequences

_log = logging.getLogger(__name__)

# Rows of a sequence from which on torch attends them in 16 bits.
_FEW_ROWS = 16
# Bytes of the results of parts of contexts that the rows of a group may have.
_RESULT_BYTES = 1 << 26


def paged_attention_cpu(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes."""
    assert isinstance(sequences, PagedSequences)
    kernels = _kernels()
    form = kernels and kernels.form_of(query, key_pool, value_pool, scoring)
    if kernels is None or form is None:
        return paged_attention_reference(query, key_pool, value_pool, sequences, scoring)
    if _is_torchs(query, sequences, scoring):
        return _attend_by_torch(query, key_pool, value_pool, sequences, scoring)
    rows = query.float().contiguous()
    out = torch.empty(*query.shape[:2], value_pool.shape[3], dtype=torch.float32)
    kernels.attend(form, rows, key_pool, value_pool, sequences, scoring, out)
    return out.to(query.dtype)


def _is_torchs(query: torch.Tensor, sequences: PagedSequences, scoring: Scoring) -> bool:
    """Return whether torch attends a step's rows. It knows no softcap and no sinks."""
    is_plain = scoring.softcap is None and scoring.sinks is None and sequences.positions is None
    has_many = max(sequences.query_lens) > _FEW_ROWS
    return is_plain and has_many and query.dtype != torch.float32 and multiplies_in(query.dtype)


def _attend_by_torch(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: PagedSequences,
    scoring: Scoring,
) -> torch.Tensor:
    outputs = []
    rows = query.split(sequences.query_lens)
    for index, of_sequence in enumerate(rows):
        slots, mask = _seen(sequences, index, scoring, query.dtype)
        key, value = (
            pool.flatten(0, 1).index_select(0, slots).transpose(0, 1)[None]
            for pool in (key_pool, value_pool)
        )
        heads = pad(of_sequence, [0, 0, 0, 0, 0, len(mask) - len(of_sequence)]).transpose(0, 1)
        out = scaled_dot_product_attention(
            heads[None], key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1)[: len(of_sequence)])
    return torch.cat(outputs)


def _seen(
    sequences: PagedSequences, index: int, scoring: Scoring, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool's slots that any row of a sequence sees, and which row sees which of them.

    Numbers of rows and slots are rounded up to few sizes, for torch's library compiles code for
    each. Cached for the step.
    """
    key = ("seen", index, scoring.span)
    known: tuple[torch.Tensor, torch.Tensor] | None = sequences.plans.get(key)
    if known is None:
        num_rows, end = sequences.query_lens[index], sequences.context_lens[index]
        first, size = scoring.span.first_visible(end - num_rows), sequences.block_size
        positions = torch.arange(first, first + few_sizes(end - first))
        slots = positions.clamp(max=end - 1)
        slots = sequences.block_tables[index].long()[slots // size] * size + slots % size
        rows = torch.arange(end - num_rows, end - num_rows + few_sizes(num_rows)).clamp(max=end - 1)
        known = sequences.plans[key] = slots, scoring.span.mask(rows, positions)
    return known


@cache
def _kernels() -> "_Kernels | None":
    """Return what runs compiled kernels; None, logged once, where nothing can be compiled."""
    try:
        return _Kernels()
    except (ImportError, RuntimeError) as error:  # llvmlite raises RuntimeError for its own faults
        _log.warning("attention is computed without compiled code: %s", error)
        return None


class _Kernels:
    """Runs the kernels; importing llvmlite waits until they are needed."""

    def __init__(self) -> None:
        from kvchat_kernels.cpu import attention, parts, program, step
        from kvchat_kernels.cpu.code import LANES, has_feature
        from kvchat_kernels.cpu.maths import stored_as

        self._attention, self._parts, self._program, self._step = attention, parts, program, step
        self._lanes, self._stored_as = LANES, stored_as
        has_feature("")  # raises what compiling raises

    def form_of(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        scoring: Scoring,
    ) -> Any:
        """Return the form of a layer's attention, None where no kernel takes it."""
        _, block_size, num_kv_heads, key_dim = key_pool.shape
        value_dim = value_pool.shape[3]
        is_whole = not (key_dim % self._lanes or value_dim % self._lanes)
        is_contiguous = key_pool.is_contiguous() and value_pool.is_contiguous()
        stored = self._stored_as(key_pool.dtype)
        if stored is None or not (is_whole and is_contiguous and block_size.bit_count() == 1):
            return None
        rules = scoring.softcap is not None, scoring.sinks is not None
        sizes = query.shape[1], num_kv_heads, key_dim, value_dim, block_size
        return self._attention.AttentionForm(*sizes, stored, *rules)

    def attend(
        self,
        form: Any,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        sequences: PagedSequences,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Attend float32 rows, groups of them one after another; writes `out`."""
        kind = (scoring.span, form.num_heads, form.num_kv_heads, form.value_dim)
        parts = sequences.plans.get(kind)
        if parts is None:
            parts = sequences.plans[kind] = self._parts.Parts(*kind)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        each = parts.result_bytes(max(sequences.context_lens))
        size = max(_FEW_ROWS, min(self._step.MAX_ROWS, _RESULT_BYTES // each))
        for start in range(0, sequences.num_tokens, size):
            end = min(start + size, sequences.num_tokens)
            group, _ = sequences.part(start, end)
            task = self._attention.AttentionTask(
                record=parts.record,
                query=query[start:],
                query_stride=query.stride(0) * 4,
                keys=key_pool,
                values=value_pool,
                scale=scoring.scale,
                softcap=scoring.softcap or 0.0,
                sinks=sinks,
                out=out[start:],
            )
            self._run(form, task, parts.set(group) * form.num_kv_heads, end - start)

    def _run(self, form: Any, task: Any, num_units: int, num_rows: int) -> None:
        header: Any = np.zeros(self._step.NUM_HEADERS, np.int64)
        kernels = self._attention.attention_kernel(form), self._attention.joining_kernel(form)
        program = self._program.Program(
            [self._program.Operation(kernel, task, header, None) for kernel in kernels]
        )
        program.units[:] = num_units, num_rows
        program.prepare()
        program.run(min(torch.get_num_threads(), num_units))
