"""Copy whole blocks within a pool, for copy-on-write.

Knows block ids; not why a block is copied.
"""

import torch


def block_copy(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks of one layer's pool, in place.

    pool      [num_blocks, block_size, num_kv_heads, head_dim]
    sources   [num_copies] int64 block ids; none of them is also a target
    targets   [num_copies] int64 distinct block ids
    """
    assert sources.shape == targets.shape
    pool.index_copy_(0, targets, pool.index_select(0, sources))
