"""What the next message of a context costs: where the context's KV is, and the seconds to read it.

Every place that speaks of warmth uses `KvPlaces.cost`: the engine fills it from the lookups that a
request would make, and `cache/disk/lookup.py` from the disk alone while no model is loaded.
"""

from dataclasses import dataclass, field

from kvchat.core.types import CachedTokens, Tier

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
