"""Frozen configuration of each package: defaults, units and allowed values.

`cli/settings.py` fills it from flags, environment and file.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kvchat.core.errors import UsageError
from kvchat.core.parameters import require
from kvchat.core.text import Size

# A variable of the environment: with "any" weights are rounded whatever that changes.
ROUNDING_VARIABLE = "KVCHAT_ROUNDING"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, its device and its number formats. `name` is `demo`, a directory or a hub id.

    `weights` int8 or int4 quantises the weights; `auto` keeps the checkpoint's precision, but where
    that does not fit on the GPU, and fewer bits do.
    """

    name: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    weights: str = "auto"

    def __post_init__(self) -> None:
        require(weights=self.weights, device=self.device, dtype=self.dtype, threads=self.threads)


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """A store of KV that several machines reach.

    url          where it is, as `cache/shared/store.py` reads it
    secret       the team's key: who has it can read and write the records
    takes_all    False writes only pins that are shared, and system prompts
    encrypts     False signs records, but lets everybody read them who reaches the store
    first_byte_s   how long an answer may take to begin
    prefill_at   the machine that prefills what may go to the store; "" for none
    """

    url: str
    secret: str = field(repr=False)
    takes_all: bool = False
    encrypts: bool = True
    first_byte_s: float = 0.05
    prefill_at: str = ""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Shape and budget of the KV cache. `block_size` counts tokens and is a power of two.

    device_bytes   bounds the KV on the device; None takes the device's default share
    host_bytes     bounds the KV demoted to host memory; None takes the default share with a GPU,
                   and nothing if the device's memory is host memory
    whole_windows  True keeps every position of layers with a window too, as the plain twin of
                   keeping a window of them
    reuse          False computes every prompt from the start, for measurements and `--no-cache`
    disk_bytes     bounds the KV in `directory`; None takes the default share of the free space
    directory      holds KV that survives the process; None keeps nothing on disk
    shared         a store of other machines too; None for none
    """

    block_size: int = 16
    device_bytes: Size | None = None
    host_bytes: Size | None = None
    kv_dtype: str = "auto"
    whole_windows: bool = False
    reuse: bool = True
    disk_bytes: Size | None = None
    directory: Path | None = None
    shared: SharedConfig | None = None

    def __post_init__(self) -> None:
        require(block_size=self.block_size, kv_dtype=self.kv_dtype)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine step.

    `max_step_tokens` bounds prefill plus decode rows of a step, except that a prompt beside many
    answers gets half as many rows on top (see `Scheduler`). None chooses it from the model's size
    so that a step on a CPU stays short enough to stop promptly. `max_running` bounds the
    requests that hold blocks at once, None chooses it; no more run than a step has tokens.
    `graphs` lets small steps on a CUDA device be captured and replayed. `trace` is the file that
    gets a line for each request, None for none.
    """

    max_step_tokens: int | None = None
    max_running: int | None = None
    max_context: int | None = None
    graphs: bool = True
    trace: Path | None = None

    def __post_init__(self) -> None:
        require(max_context=self.max_context)
        for name in ("max_step_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', '-')} is {value}, but must be 1 or more.")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The drafter for speculation: none, n-grams of the conversation, a draft model, or auto.

    `auto` chooses the fastest. The user can switch later to any drafter that was loaded.
    """

    mode: str = "off"

    def __post_init__(self) -> None:
        assert self.mode in ("off", "auto", "ngram", "draft", "mtp"), self.mode


@dataclass(frozen=True, slots=True)
class Paths:
    """kvchat's directories; created on first use with mode 0700."""

    config: Path
    sessions: Path
    state: Path
    cache: Path
