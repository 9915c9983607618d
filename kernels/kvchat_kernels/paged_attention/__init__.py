"""Attention over paged KV: one public function, several implementations of the same formula.

choice.py selects the implementation; README.md has the derivation.
"""

import torch

from kvchat_kernels.paged_attention.choice import (
    READS_LENGTHS_ON_DEVICE,
    Implementation,
    implementation,
    implementation_for,
)
from kvchat_kernels.paged_attention.sequences import (
    FULL,
    AttentionFunction,
    AttentionSpan,
    DeviceSequences,
    PagedSequences,
    Scoring,
    Sequences,
)
from kvchat_kernels.paged_attention.tiles import LayerShape

__all__ = [
    "FULL",
    "READS_LENGTHS_ON_DEVICE",
    "AttentionFunction",
    "AttentionSpan",
    "DeviceSequences",
    "Implementation",
    "LayerShape",
    "PagedSequences",
    "Scoring",
    "Sequences",
    "implementation_for",
    "paged_attention",
]


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    sequences: Sequences,
    scoring: Scoring,
    impl: str = "auto",
) -> torch.Tensor:
    """Attend each new token to its own sequence. The pools must already hold the new tokens' KV.

    query        [num_tokens, num_heads, key_dim], the new tokens of all sequences in order
    key_pool     [num_blocks, block_size, num_kv_heads, key_dim]
    value_pool   [num_blocks, block_size, num_kv_heads, value_dim]
    impl         auto, triton, cpu, reference or shapes; see `implementation_for`

    Returns [num_tokens, num_heads, value_dim] in the query's dtype, owned by the caller. Slots that
    no sequence's context covers are never read.
    """
    assert query.shape[0] == sequences.num_tokens
    assert query.shape[1] % key_pool.shape[2] == 0
    assert key_pool.shape[:3] == value_pool.shape[:3]
    assert key_pool.shape[1] == sequences.block_size
    if impl == "auto":
        heads, dims = key_pool.shape[2], (key_pool.shape[3], value_pool.shape[3])
        shape = LayerShape(query.shape[1], heads, *dims, query.dtype)
        impl = implementation_for(query.device, shape).name
    if isinstance(sequences, DeviceSequences) and impl not in READS_LENGTHS_ON_DEVICE:
        sequences = sequences.read()
    return implementation(impl)(query, key_pool, value_pool, sequences, scoring)
