"""What the engine, and the store it keeps KV in, say when asked: plain counts, no tensors."""

from dataclasses import dataclass
from pathlib import Path

from kvchat.core.types import DraftUse


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Totals of a slower tier since it was opened, and what it holds at this moment.

    bytes_read, bytes_written   KV only, without what surrounds it
    num_quarantined             blocks that a forward pass has found to be of another model
    num_held_up                 what was not done because others were at the store meanwhile
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
    num_quarantined: int = 0
    num_held_up: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """What speculation is set to, and did since the engine was made.

    drafters   names of those there are; `failed` says of each that fell out why it did
    """

    mode: str
    drafters: tuple[str, ...]
    total: DraftUse
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphStatus:
    """What captured graphs of small steps did since the engine was made.

    num_captured   shapes of steps there are graphs of
    num_replayed   steps that a graph ran; `num_eager` were small enough, but there was none yet
    capture_s      seconds that capturing took
    trouble        why there are none, or fewer than there might be; empty if nothing is wrong
    """

    num_captured: int = 0
    num_replayed: int = 0
    num_eager: int = 0
    capture_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Totals since the engine was made, and the device tier's blocks at this moment.

    num_blocks    blocks the budget allows; of these `num_free` are free and `num_cached` hold KV
                  that a later prompt may reuse (some of it in use right now)
    block_bytes   bytes of one block over all layers
    host          the tier in host memory, None where there is none
    disk          the tier that outlives the process, None where there is none (yet)
    disk_read_s   seconds that reading back from it and verifying took
    graphs        None where steps are never captured
    step_threads  on how many threads a step of one token runs at present, and how many there are;
                  None where a GPU runs it
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
    host: TierStatus | None = None
    disk: TierStatus | None = None
    disk_read_s: float = 0.0
    speculation: SpeculationStatus | None = None
    graphs: GraphStatus | None = None
    step_threads: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ModelDirStatus:
    """What a store keeps under one identity, which is a model and how it is run, in hex.

    last_used_s   seconds since the epoch, 0 where nobody knows
    trouble       what keeps it from being read, in a few words; empty if nothing does
    """

    identity: str
    num_packs: int
    num_tokens: int
    num_bytes: int
    last_used_s: float
    trouble: str = ""
    pins: "tuple[KeptPin, ...]" = ()


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A context that is not to be forgotten: what the user calls it, and since when (epoch)."""

    label: str
    num_tokens: int
    made_s: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds, all identities together, the one used last first. 0 allowed is off.

    `strangers` are directories that look like model directories and were not made by this kvchat.
    """

    directory: Path
    limit_bytes: int
    model_dirs: tuple[ModelDirStatus, ...] = ()
    strangers: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(model_dir.num_bytes for model_dir in self.model_dirs)

    @property
    def num_packs(self) -> int:
        return sum(model_dir.num_packs for model_dir in self.model_dirs)

    @property
    def num_tokens(self) -> int:
        return sum(model_dir.num_tokens for model_dir in self.model_dirs)

    @property
    def trouble(self) -> str:
        """What is wrong, in a sentence; empty if nothing is."""
        for model_dir in self.model_dirs:
            if model_dir.trouble:
                return f"{model_dir.identity[:8]} cannot be read: {model_dir.trouble}."
        return ""


@dataclass(frozen=True, slots=True)
class KeptPack:
    """A pack of a store, and the place of the pack it continues in the same list, which is before.

    `parent` is None for a beginning; `is_orphan` where the beginning is gone, `is_pinned` where it
    is not to be forgotten.
    """

    parent: int | None
    num_tokens: int
    num_bytes: int
    last_used_s: float
    is_orphan: bool = False
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading a whole store has shown; what was damaged is gone.

    `num_tables` counts the identities whose table was no good, and all that it led to with it.
    """

    num_sound: int = 0
    num_damaged: int = 0
    num_tables: int = 0

    @property
    def is_sound(self) -> bool:
        return not (self.num_damaged or self.num_tables)
