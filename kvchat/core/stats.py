"""Status of the engine and of the KV store: plain counts, no tensors."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from kvchat.core.types import DraftUse


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Totals of a slower tier since it was opened, and its current content.

    name                        what the chain of tiers calls it
    read_s                      seconds that reading and verifying took
    bytes_read, bytes_written   bytes of KV, without headers
    num_quarantined             blocks whose KV disagreed with a forward pass of this model
    num_held_up                 operations skipped because another process used the store
    is_shared                   whether other models and processes have KV within the same limit
    trouble                     the last problem, in a sentence; empty if there was none
    """

    name: str = ""
    num_packs: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    bytes_written: int = 0
    num_evicted: int = 0
    num_damaged: int = 0
    num_failed_writes: int = 0
    num_quarantined: int = 0
    num_held_up: int = 0
    is_shared: bool = False
    trouble: str = ""

    def of(self, name: str, read_s: float) -> "TierStatus":
        """Return the status as that of a tier in a chain."""
        return replace(self, name=name, read_s=read_s)


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """The mode of speculation, and its totals since the engine was created.

    drafters   names of the drafters in use
    failed     one text per drafter that was dropped after an error: its name and why
    """

    mode: str
    drafters: tuple[str, ...]
    total: DraftUse
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphStatus:
    """Totals of captured graphs of small steps since the engine was created.

    num_captured   step shapes that have a graph
    num_replayed   steps that a graph ran
    num_eager      steps that were small enough for a graph, but had none yet
    capture_s      seconds that capturing took
    trouble        why there are no graphs, or fewer than possible; empty if there is no problem
    """

    num_captured: int = 0
    num_replayed: int = 0
    num_eager: int = 0
    capture_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Totals since the engine was created, and the device tier's current blocks.

    num_blocks    blocks that the budget allows; of these `num_free` are free and `num_cached` hold
                  KV that a later prompt may reuse (some of them are in use)
    block_bytes   bytes of one block over all layers
    kv_dtype      the dtype of KV as the settings spell it, "" if it is the model's own
    tiers         the slower tiers in order of speed: those that are open, or could not be opened
    graphs        None if steps are never captured
    step_threads  the number of CPU threads for a step of one token, and the number available;
                  None on a GPU
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
    tiers: tuple[TierStatus, ...] = ()
    speculation: SpeculationStatus | None = None
    graphs: GraphStatus | None = None
    step_threads: tuple[int, int] | None = None
    kv_dtype: str = ""

    def tier(self, name: str) -> TierStatus | None:
        """Return the tier of a name; None if there is none, or it is not open yet."""
        return next((tier for tier in self.tiers if tier.name == name), None)


@dataclass(frozen=True, slots=True)
class ModelDirStatus:
    """The KV that a store holds for one identity: a hex digest of a model and how it is run.

    last_used_s   seconds since the epoch, 0 if not known
    trouble       why it cannot be read, in a few words; empty if it can
    model         the name of the model, "" if it is not known here
    kv_dtype      the dtype of the KV, "" if it is the model's own or not known here
    dtype         what the model computes in, "" if it is not known here
    weights       the form of its weights, "" if it is not known here or cannot be chosen
    block_size    tokens of a block
    """

    identity: str
    num_packs: int
    num_tokens: int
    num_bytes: int
    last_used_s: float
    trouble: str = ""
    pins: "tuple[StoredPin, ...]" = ()
    model: str = ""
    kv_dtype: str = ""
    dtype: str = ""
    weights: str = ""
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class StoredPin:
    """A pinned context: its label, and when it was pinned and until when, in seconds since the
    epoch; infinity is for ever.
    """

    label: str
    num_tokens: int
    made_s: float
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The content of a store, by identity, the most recently used first.

    limit_bytes   the disk budget; 0 means that the disk tier is off
    strangers     directories that look like model directories but were not made by this kvchat
    why_nothing   a sentence on why the budget is 0; empty if it is not, or if the user said so
    weights_bytes what packed weights take beside the KV
    kernels_bytes what compiled CPU kernels take, in a directory of their own
    """

    directory: Path
    limit_bytes: int
    model_dirs: tuple[ModelDirStatus, ...] = ()
    strangers: tuple[Path, ...] = ()
    why_nothing: str = ""
    weights_bytes: int = 0
    kernels_bytes: int = 0

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
        """The first problem, in a sentence; empty if there is none."""
        for model_dir in self.model_dirs:
            if model_dir.trouble:
                return f"{model_dir.identity[:8]} cannot be read: {model_dir.trouble}."
        return ""


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A pack of a store, in a list where a pack comes after the pack that it continues.

    parent      index of the continued pack in the list, None for the beginning of a context
    is_orphan   the beginning of its context is missing
    is_pinned   eviction does not remove it
    names       what the caller calls the contexts that it is a part of
    """

    parent: int | None
    num_tokens: int
    num_bytes: int
    last_used_s: float
    is_orphan: bool = False
    is_pinned: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of reading a whole store. Damaged packs have been removed.

    `num_tables` counts the identities whose table was damaged and removed with all its packs.
    """

    num_sound: int = 0
    num_damaged: int = 0
    num_tables: int = 0

    @property
    def is_sound(self) -> bool:
        return not (self.num_damaged or self.num_tables)
