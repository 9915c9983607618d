"""Figures of the cache and the engine: what tiers hold, where the KV of a context is, and the
seconds that its next message costs. Plain counts, no tensors.

Every place that speaks of warmth uses `KvPlaces.cost`: the engine fills it from the lookups that a
request would make, and `cache/disk/lookup.py` from the disk alone while no model is loaded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvchat.core.types import CachedTokens, DraftUse, Tier


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
    root                        names the KV of a shared tier: the hex of its empty context's key
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
    root: str = ""

    def of(self, name: str, read_s: float) -> "TierStatus":
        """Return the status as that of a tier in a chain."""
        return replace(self, name=name, read_s=read_s)


def kv_form(dtype: str, kv_dtype: str, weights: str, block_size: int) -> dict[str, str]:
    """Return in words what KV is, to tell how that of two machines differs."""
    return {
        "dtype": dtype,
        "KV dtype": kv_dtype or dtype,
        "weights": weights or "own",
        "block size": str(block_size),
    }


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
    block_bytes   bytes of one block over all layers that keep every position
    num_window_blocks, num_free_window_blocks, window_block_bytes
                  the same of window blocks: of layers with a window, if they keep only that
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
    num_window_blocks: int = 0
    num_free_window_blocks: int = 0
    window_block_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of all blocks and window blocks."""
        of_windows = self.num_window_blocks * self.window_block_bytes
        return self.num_blocks * self.block_bytes + of_windows

    def tier(self, name: str) -> TierStatus | None:
        """Return the tier of a name; None if there is none, or it is not open yet."""
        return next((tier for tier in self.tiers if tier.name == name), None)


def status_of(values: Mapping[str, Any]) -> EngineStatus:
    """Return the status whose `asdict` was sent as JSON.

    Raises KeyError, TypeError or ValueError for what has another form.
    """
    drafts, graphs, threads = values["speculation"], values["graphs"], values["step_threads"]
    speculation = None
    if drafts is not None:
        names, failed = tuple(map(str, drafts["drafters"])), tuple(map(str, drafts["failed"]))
        total = DraftUse(**drafts["total"])
        speculation = SpeculationStatus(str(drafts["mode"]), names, total, failed)
    return EngineStatus(
        **{
            **values,
            "tiers": tuple(TierStatus(**tier) for tier in values["tiers"]),
            "speculation": speculation,
            "graphs": GraphStatus(**graphs) if graphs is not None else None,
            "step_threads": (int(threads[0]), int(threads[1])) if threads is not None else None,
        }
    )


@dataclass(frozen=True, slots=True)
class ModelDirStatus:
    """The KV that a store holds for one identity: a hex digest of a model and how it is run.

    last_used_s   seconds since the epoch, 0 if not known
    saved_bytes   how much more it would take if no payload were coded in fewer bytes
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
    saved_bytes: int = 0


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
    def saved_bytes(self) -> int:
        return sum(model_dir.saved_bytes for model_dir in self.model_dirs)

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


# Fewer tokens than this are at most a partial block or two, which are never cached.
_FEW_TOKENS = 64
_FEW_SHARE = 0.1
_LOW_S, _HIGH_S = 0.5, 10.0
# A slow disk's rate, in bytes, until this machine has shown its own.
ASSUMED_BYTES_PER_S = 5e8


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of reading a context before an answer.

    `cached` are the tokens that need no computing, by tier. `seconds` is what reading all takes,
    None if this model has not computed anything on this machine yet.
    """

    num_tokens: int
    cached: CachedTokens = field(default_factory=CachedTokens)
    seconds: float | None = None

    @property
    def num_cached(self) -> int:
        return self.cached.total

    @property
    def num_read(self) -> int:
        """Tokens that have to be computed."""
        return self.num_tokens - self.cached.total

    @property
    def is_cold(self) -> bool:
        """Whether nearly nothing is cached."""
        return self.num_cached <= _FEW_SHARE * self.num_tokens

    @property
    def is_ready(self) -> bool:
        """Whether no more than a small part has to be computed."""
        few = max(min(_FEW_TOKENS, self.num_tokens / 2), _FEW_SHARE * self.num_tokens)
        return not self.is_cold and self.num_read < few

    @property
    def is_low(self) -> bool:
        """Too low to report: under 0.5 s, or under 256 tokens if the seconds are unknown."""
        return self.num_read < 256 if self.seconds is None else self.seconds < _LOW_S

    @property
    def is_high(self) -> bool:
        """High enough to ask first: above 10 s, or above 8192 tokens if these are unknown."""
        return self.num_read > 8192 if self.seconds is None else self.seconds > _HIGH_S


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Tokens a second of one model on one machine: computed, read from disk or a tier after it,
    copied from host memory. `computed` is that of a context's first tokens, None before the first
    measurement; `half_context` as in `num_like_first`.
    """

    computed: float | None = None
    from_disk: float = float("inf")
    from_host: float = float("inf")
    half_context: float = float("inf")


def num_like_first(start: int, end: int, half_context: float) -> float:
    """Return how many of a context's first tokens take as long as those from `start` to `end`.

    After `half_context` tokens one takes twice as long: attention takes as long as all else.
    """
    return (end - start) * (1 + (start + end) / 2 / half_context)


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Where the KV of a context of `num_tokens` tokens is.

    `cached` counts its leading tokens: those on the device, then those in host memory after them,
    then those on disk, or in a tier after it. Only full blocks of `block_size` tokens are cached.
    """

    num_tokens: int
    cached: CachedTokens
    rates: ReadRates = field(default_factory=ReadRates)
    block_size: int = 16

    def cost(self, num_tokens: int | None = None) -> Cost:
        """Return the cost of continuing from the context, or from its first `num_tokens`."""
        left = self.num_tokens if num_tokens is None else num_tokens
        counts = []
        for count in self.cached.places.values():
            counts.append(min(count, left))
            left -= counts[-1]
        cached = CachedTokens.of(dict(zip(self.cached.places, counts, strict=True)))
        return Cost(cached.total + left, cached, self._seconds(cached, left))

    def _seconds(self, cached: CachedTokens, num_read: int) -> float | None:
        if self.rates.computed is None:
            return None
        computed, start = self.rates.computed, cached.total
        num_read_alike = num_like_first(start, start + num_read, self.rates.half_context)
        seconds = num_read_alike / computed + cached.host / self.rates.from_host
        # What takes longer to read is computed instead.
        num_slow = cached.beyond_memory
        return seconds + min(num_slow / self.rates.from_disk, num_slow / computed)

    def tier_of(self, start: int, end: int) -> Tier | None:
        """Return the slowest tier that holds the tokens from `start` to `end`; None if some are in
        none. A partial block at the end counts as held, also if the whole turn is in it.
        """
        device = self.cached.device
        host = device + self.cached.host
        disk = host + self.cached.beyond_memory
        is_begun = self.num_tokens - disk < _FEW_TOKENS and start < disk
        is_tail = is_begun or (disk > 0 and end - disk <= self.block_size)
        for tier, held in ((Tier.DEVICE, device), (Tier.HOST, host), (Tier.DISK, disk)):
            if end <= held or (held == disk and is_tail):
                return tier
        return None
