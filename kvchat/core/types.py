"""Plain data that all packages share: sampling parameters, finish reasons, token counts, timings.

Also writes them with the field names of the JSON output.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

from kvchat.core.errors import UsageError
from kvchat.core.parameters import PENALTIES, SAMPLING, check_fields

TokenIds = Sequence[int]


class Tier(StrEnum):
    """Where a block's KV lives, from fastest to slowest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class MissReason(StrEnum):
    """Why KV was not read from a slower tier."""

    NEVER_WRITTEN = "not written before the last run ended"
    OPEN_ELSEWHERE = "in another kvchat that runs"
    CLEARED = "cache cleared"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    OVER_BUDGET = "over budget"
    QUARANTINED = "quarantined"
    OTHER_MODEL = "model changed"
    OTHER_WEIGHTS = "weights or dtype changed"
    OTHER_KV = "KV format changed"
    SLOWER = "slower to read than to compute"
    LATE = "came too late"
    NO_ROOM = "no room on the device"
    NO_TIER = "no disk cache"
    OFF = "the cache is off"
    THINNED = "over a pin that keeps a share of its KV"
    NOT_KEPT = "not kept by the server"
    NOT_TOLD = "the server does not tell what it had cached"


class Health(StrEnum):
    """Whether a model answers. The values are those of `/health`."""

    OK = "ok"
    LOADING = "loading"
    STALLED = "stalled"
    FAILED = "failed"


class Pooling(StrEnum):
    """Which hidden states of a text make its embedding: the mean of all, or the last."""

    MEAN = "mean"
    LAST = "last"


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    REPETITION = "repetition"  # it only repeated itself, and would not have ended


class StopWatcher(Protocol):
    """Watches one completion's token ids for a stop string; one request owns it."""

    def feed(self, token_id: int) -> bool:
        """Take the next token id; true once a stop string is complete."""


class TokenConstraint(Protocol):
    """Limits one completion's tokens; one request owns it. A call may raise KvchatError."""

    def allowed(self) -> bytes | None:
        """Return which ids may come next, a bit for each, the lowest first; None for every id.

        Bits that are missing at the end are 0. It changes nothing.
        """

    def accept(self, token_id: int) -> bool:
        """Take the next token id; true once no other can follow."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of the probability of a token, and of the likeliest ones at its place.

    The distribution is the softmax of the model's logits as they are: before temperature, filters,
    penalties, biases and constraints.

    top   (token id, logarithm), likeliest first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy decoding.

    top_k 0, top_p 1, min_p 0, repetition_penalty 1, the other penalties 0 and an empty bias switch
    the respective part off. The same `seed` draws the same noise at the same position.

    repetition_penalty   divides the positive logits of all tokens of the context, multiplies others
    presence_penalty     subtracted from the logit of every token that this request has generated
    frequency_penalty    the same, as often as the token was generated
    logit_bias           (token id, number added to its logit), each id once
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, (*SAMPLING, *PENALTIES))
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise UsageError(
                    f"logit-bias of token {token_id} is {bias}, but must be -100 to 100."
                )

    @cached_property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.penalises_generated

    @cached_property
    def penalises_generated(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed one row at a time before the filters."""
        return self.penalises or bool(self.logit_bias)


# What the names of tiers begin with that convert what the disk has in more bits.
CONVERTED_FROM = "disk as "


# The name of the tier whose KV another machine computes.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed again, by the tier their KV came from.

    `others` are those of tiers after the disk, by their names.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    others: tuple[tuple[str, int], ...] = ()

    @property
    def places(self) -> dict[str, int]:
        """The tokens by the name of their tier, in order of speed."""
        return {"device": self.device, "host": self.host, "disk": self.disk, **dict(self.others)}

    @property
    def beyond_memory(self) -> int:
        """Tokens from the disk and the tiers after it."""
        return self.disk + sum(count for _, count in self.others)

    @property
    def total(self) -> int:
        return self.device + self.host + self.beyond_memory

    @classmethod
    def of(cls, places: Mapping[str, int]) -> "CachedTokens":
        """Return tokens by the names of their tiers."""
        known = ("device", "host", "disk")
        others = tuple((name, n) for name, n in places.items() if n and name not in known)
        device, host, disk = (places.get(name, 0) for name in known)
        return cls(device, host, disk, others)

    def plus(self, more: Mapping[str, int]) -> "CachedTokens":
        """Return the same with more tokens, by the names of their tiers."""
        places = self.places
        return self.of(places | {name: places.get(name, 0) + n for name, n in more.items()})

    def with_found(self, found: Mapping[str, int]) -> "CachedTokens":
        """Return the same for a context of which each tier has so many leading tokens, the fastest
        first: what a faster tier has counts there.
        """
        cached = self
        for name, num_kept in found.items():
            cached = cached.plus({name: max(0, num_kept - cached.total)})
        return cached

    def as_dict(self) -> dict[str, int]:
        return {**self.places, "total": self.total}


@dataclass(frozen=True, slots=True)
class DraftUse:
    """What speculation did for one request.

    num_verified   steps that verified a draft
    gain           tokens a second as a multiple of plain decoding, None if not known
    why_plain      why the end of the answer had no drafts; empty if it had, or if there is no
                   drafter
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    gain: float | None = None
    why_plain: str = ""

    @property
    def accepted_share(self) -> float:
        """Accepted tokens per drafted token; 0 without any."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def accepted_len(self) -> float:
        """Mean tokens per verifying step, including the model's own token; 0 without any step."""
        return 1 + self.num_accepted / self.num_verified if self.num_verified else 0.0


@dataclass(frozen=True, slots=True)
class KeptPositions:
    """The positions of what contexts begin with whose KV stays, for all contexts that begin so.

    digest      `digest_of_ids` of these `num_tokens` tokens
    positions   ascending
    method      says how they were chosen
    """

    digest: str
    num_tokens: int
    positions: tuple[int, ...]
    method: str


def digest_of_ids(token_ids: TokenIds) -> str:
    """Return a hash of token ids."""
    return blake2b(array("i", token_ids).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class KvDropped:
    """Of the KV of `num_tokens` tokens that of `num_kept` stayed, as `method` chose them; said of
    the last time that any was dropped.
    """

    method: str
    num_kept: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached.total + prefilled_tokens == prompt_tokens`, unless it
    was stopped during the prefill: then `unread_tokens` of the prompt are missing. `is_estimate` if
    a server that takes messages did not count them all. `dropped` is KV that the answer went on
    without, None if it had all.
    """

    prompt_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    completion_tokens: int = 0
    drafts: DraftUse = field(default_factory=DraftUse)
    unread_tokens: int = 0
    is_estimate: bool = False
    dropped: KvDropped | None = None

    @property
    def drafted_tokens(self) -> int:
        return self.drafts.num_drafted

    @property
    def accepted_tokens(self) -> int:
        return self.drafts.num_accepted

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached.total - self.unread_tokens

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached.as_dict(),
            "prefilled_tokens": self.prefilled_tokens,
            "completion_tokens": self.completion_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            **({} if self.dropped is None else {"kept_kv": asdict(self.dropped)}),
        }


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one request in seconds, measured by the engine.

    load_s     work that a process does once before it answers; not part of the other durations
    ttft_s     from submission, with the model loaded, to the first token
    decode_s   from the first token to the last
    """

    load_s: float = 0.0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0

    def as_dict(self, usage: Usage) -> dict[str, float]:
        return {
            "load_s": round(self.load_s, 4),
            "ttft_s": round(self.ttft_s, 4),
            "prefill_tokens_per_s": round(rate(usage.prefilled_tokens, self.prefill_s), 2),
            "decode_tokens_per_s": round(rate(usage.completion_tokens - 1, self.decode_s), 2),
            "total_s": round(self.total_s, 4),
        }


def rate(count: int, seconds: float) -> float:
    """Return `count / seconds`, or 0.0 unless both are positive."""
    return count / seconds if count > 0 and seconds > 0 else 0.0


# The memory has small facts that kvchat finds out once and may lose. A fact is whatever JSON can
# hold, except null, which stands for no fact. It has a kind, such as "rates", and a key in its
# kind. Every reader checks what it gets: the file is the user's, and an earlier version may have
# written it.

Fact = object


class Memory:
    """Facts by kind and key; this one remembers nothing: for incognito chats, and where nothing may
    be written. Any thread may use it, and several processes may share it.

    Its methods raise nothing: a fact that cannot be read is None, one that cannot be stored is
    lost.
    """

    def get(self, kind: str, key: str) -> Fact:
        """Return a fact, None if there is none."""
        return None

    def set(self, kind: str, key: str, fact: Fact) -> None:
        """Store a fact in place of an earlier one."""

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        """Store what `change` makes of a fact; no other process writes that fact meanwhile."""


NO_MEMORY = Memory()
