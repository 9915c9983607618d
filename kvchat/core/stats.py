"""What the engine says about itself when asked: plain counts, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Totals of a slower tier since it was opened, and what it holds at this moment.

    bytes_read, bytes_written   KV only, without what surrounds it
    trouble                     the last thing that went wrong, in a sentence; empty if nothing did
    """

    num_packs: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    num_evicted: int = 0
    num_damaged: int = 0
    num_failed_writes: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Totals since the engine was made, and the device tier's blocks at this moment.

    num_blocks    blocks the budget allows; of these `num_free` are free and `num_cached` hold KV
                  that a later prompt may reuse (some of it in use right now)
    block_bytes   bytes of one block over all layers
    disk          the tier that outlives the process, None where there is none (yet)
    read_rate     bytes a second that came back from it, None before the first
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
    disk: TierStatus | None = None
    read_rate: float | None = None
