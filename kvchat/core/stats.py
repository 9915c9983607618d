"""What the engine says about itself when asked: plain counts, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Totals since the engine was made, and the device tier's blocks at this moment.

    num_blocks    blocks the budget allows; of these `num_free` are free and `num_cached` hold KV
                  that a later prompt may reuse (some of it in use right now)
    block_bytes   bytes of one block over all layers
    """

    num_steps: int
    num_tokens_computed: int
    num_preempted: int
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_evicted: int
    num_copied: int
    max_context: int
    max_step_tokens: int
