"""Paged attention on a CPU: the compiled step's kernels, outside of a step.

They compute a row by itself, in float32 or with products of bfloat16. torch attends many rows in
16 bits where the processor has tiles for that, or other instructions that our kernels do not use.
The reference serves layers whose sizes no kernel takes, and machines where nothing can be compiled.
"""

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvchat_kernels.cpu_products import compiled_calls, few_sizes, multiplies_in
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring, Sequences

# Rows of a sequence from which on torch attends them in 16 bits.
_FEW_ROWS = 16


def paged_attention_cpu(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend every row of `query` to its own sequence; see `paged_attention` for the shapes."""
    assert isinstance(sequences, PagedSequences)
    calls = compiled_calls()
    form = calls and calls.attention_form(query.shape[1], key_pool, value_pool, scoring)
    if form is None:
        return paged_attention_reference(query, key_pool, value_pool, sequences, scoring)
    if _is_torchs(query, sequences, scoring) and not calls.attends_faster_than_torch(form):
        return _attend_by_torch(query, key_pool, value_pool, sequences, scoring)
    rows = query.float().contiguous()
    out = torch.empty(*query.shape[:2], value_pool.shape[3], dtype=torch.float32)
    calls.attend(form, rows, (key_pool, value_pool), sequences, scoring, out)
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
