"""Frozen configuration of each package: defaults, units and allowed values.

`cli/settings.py` fills it from flags, environment and file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvchat.core.errors import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(?ai)^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$")
_SHARE = re.compile(r"(?a)^\s*(\d+(?:\.\d+)?)\s*%\s*$")
_MAX_BYTES = 2**63 - 1
# OpenMP starts as many threads as asked, and aborts the program if it cannot.
_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """An amount of memory: bytes, or a share (0 to 1) of the amount given to `resolve`."""

    num_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        assert (self.num_bytes is None) != (self.share is None), self

    def resolve(self, available_bytes: int) -> int:
        """Return bytes; a share is taken of `available_bytes`."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return int(available_bytes * self.share)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share * 100:g}%"
        assert self.num_bytes is not None
        return format_bytes(self.num_bytes)


_MAX_QUOTED_CHARS = 60
# A smaller number without a unit is refused: the user probably forgot the unit.
_LEAST_PLAIN_BYTES = 1 << 20


def parse_size(text: str, name: str) -> Size:
    """Read `8G`, `512M`, `1.5g`, `20%` or plain bytes. Raises UsageError naming the setting."""
    if match := _SIZE.match(text):
        if text.strip()[-1].isdigit() and 0 < float(match[1]) < _LEAST_PLAIN_BYTES:
            # A store larger than this tiny limit would be emptied.
            number = match[1]
            hint = f"Give a unit: {number}G, or {number}B if bytes are meant."
            raise UsageError(f"{name} is {number} bytes.", hint)
        num_bytes = float(match[1]) * _UNITS[match[2].upper()]
        if num_bytes > _MAX_BYTES:  # also infinity, the float of a number with many digits
            raise UsageError(f"{name} is {shown(text)}, which is more than any machine has.")
        return Size(num_bytes=int(num_bytes))
    if (match := _SHARE.match(text)) and 0 <= float(match[1]) <= 100:
        return Size(share=float(match[1]) / 100)
    raise UsageError(f"{name} is {shown(text)}, but a size reads like 8G, 512M or 20%.")


def shown(value: object) -> str:
    """Return a value for quotation in an error: its repr, cut to 60 characters."""
    if isinstance(value, int) and abs(value) >= 10**_MAX_QUOTED_CHARS:
        return "a number of too many digits"  # Python refuses to convert thousands of digits
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def format_bytes(num_bytes: int) -> str:
    """Return a size for display: three or four digits and a binary unit."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


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
        _one_of("--weights", self.weights, ("auto", *FEWER_BITS))
        _one_of("--device", self.device, ("auto", "cpu", "cuda"))
        _one_of("--dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.threads is not None and not 1 <= self.threads <= _MAX_THREADS:
            raise UsageError(f"--threads is {self.threads}, but must be 1 to {_MAX_THREADS}.")


# The forms of weights that round them.
FEWER_BITS = ("int8", "int4")
# A variable of the environment: with "any" weights are rounded whatever that changes.
ROUNDING_VARIABLE = "KVCHAT_ROUNDING"

# Forms of KV that no model computes in: numbers of 8 or 4 bits with scales.
KV_CODES = ("int8", "k8v4", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", *KV_CODES)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Shape and budget of the KV cache. `block_size` counts tokens and is a power of two.

    device_bytes   bounds the KV on the device; None takes the device's default share
    host_bytes     bounds the KV demoted to host memory; None takes the default share with a GPU,
                   and nothing if the device's memory is host memory
    reuse          False computes every prompt from the start, for measurements and `--no-cache`
    disk_bytes     bounds the KV in `directory`; None takes the default share of the free space
    directory      holds KV that survives the process; None keeps nothing on disk
    """

    block_size: int = 16
    device_bytes: Size | None = None
    host_bytes: Size | None = None
    kv_dtype: str = "auto"
    reuse: bool = True
    disk_bytes: Size | None = None
    directory: Path | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        if size < 1 or size > 1024 or size & (size - 1):
            raise UsageError(f"--block-size is {size}, but must be a power of two up to 1024.")
        _one_of("--kv-dtype", self.kv_dtype, KV_DTYPES)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine step.

    `max_step_tokens` bounds prefill plus decode rows of a step, except that a prompt beside many
    answers gets half as many rows on top (see `Scheduler`). None chooses it from the model's size
    so that a step on a CPU stays short enough to stop promptly. `max_running` bounds the
    requests that hold blocks at once, None chooses it; no more run than a step has tokens.
    `graphs` lets small steps on a CUDA device be captured and replayed.
    """

    max_step_tokens: int | None = None
    max_running: int | None = None
    max_context: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running", "max_context"):
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
        _one_of("--spec", self.mode, ("off", "auto", "ngram", "draft"))


@dataclass(frozen=True, slots=True)
class Paths:
    """kvchat's directories; created on first use with mode 0700."""

    config: Path
    sessions: Path
    state: Path
    cache: Path


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {shown(value)}, but must be one of {', '.join(allowed)}.")
