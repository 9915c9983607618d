"""Planner: decides by measured rates which KV to keep, to read back, and to compute meanwhile.

It has the one set of rates of a model on this machine: how fast it computes (PrefillRate), and how
fast KV is copied to and from each tier. RateMemory keeps them from one run to the next. It is
arithmetic, without a clock.

The front of a context can be computed while its back is read, and either may take all. With c
seconds to compute a token, r to read one, and l to find the first, n tokens are there after

    max(k c, l + (n - k) r)    where the first k are computed:  least at k = (l + n r) / (c + r)

which is what Jin et al. ("Compute or Load KV Cache? Why Not Both?", 2024) do by meeting in the
middle.
"""

import math
import threading
from collections.abc import Mapping, Sequence

from kvchat.core.stats import num_like_first
from kvchat.core.types import Memory

# Weight of the newest measurement in the moving average.
_NEWEST = 1 / 3
# If a measurement is this many times quicker than the known rate, the known rate was an outlier.
_FAR_QUICKER = 1.5


def averaged(rate: float | None, newest: float) -> float:
    """Return the moving average after a new measurement; `rate` is None for the first."""
    return newest if rate is None else rate + _NEWEST * (newest - rate)


def averaged_computing(rate: float | None, newest: float) -> float:
    """Return the average as `averaged` does, of a rate of computing.

    A step may be slow for once, never quick for once: a far quicker one takes the place of the
    average. The first step on a GPU compiles its kernels, which takes as long as a thousand steps.
    """
    if rate is not None and newest > _FAR_QUICKER * rate:
        return newest
    return averaged(rate, newest)


_KIND = "rates"
# Rates that differ by less are the same.
_NEWS = 0.1


class RateMemory:
    """The rates of one `subject`, a model on a device, in a memory.

    Several may keep rates of the same subject, of different names or measured alike, and several
    processes or threads write at once: of a name the last one stands. Each is used by one at a
    time.
    """

    def __init__(self, memory: Memory, subject: str) -> None:
        self._memory = memory
        self._subject = subject
        self._written = self.read()

    def read(self) -> dict[str, float]:
        """Return the rates kept, by name."""
        return _sound(self._memory.get(_KIND, self._subject))

    def write(self, rates: Mapping[str, float]) -> None:
        """Keep rates, where they are news, and leave those of other names as they are."""
        if self._is_news(rates):
            self._memory.update(_KIND, self._subject, lambda known: {**_sound(known), **rates})
            self._written = {**self._written, **rates}

    def _is_news(self, rates: Mapping[str, float]) -> bool:
        known = self._written
        return any(
            name not in known or abs(rate / known[name] - 1) > _NEWS for name, rate in rates.items()
        )


def _sound(rates: object) -> dict[str, float]:
    """Return the finite positive numbers of an object, by name."""
    return {
        str(name): float(rate)
        for name, rate in (rates.items() if isinstance(rates, dict) else ())
        if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    }


# A smaller measurement shows overheads rather than the rate. Smaller contexts are restored all the
# same: a warm one of 16 tokens is read. Prices shown to users come from `PrefillRate`, which has a
# separate rate for shorter prefills.
LEAST_TELLING_TOKENS = 64

# A prefill of fewer tokens says nothing about the rate.
_MIN_SHORT_TOKENS = 8
# Names of rates in a memory.
_FIRST, _SHORT, _HALF = "first tokens", "short prefill", "half context"


class PrefillRate:
    """Tokens a second of prefills, as users are told of it; `memory` keeps it across runs.

    It is the rate of a context's first tokens: those after them take longer, by `half_context` as
    in `num_like_first`. A short prefill counts until a longer one was measured; `of_long` is the
    rate of those, None before the first. One thread owns it.
    """

    def __init__(self, memory: RateMemory | None, half_context: float = math.inf) -> None:
        self._memory = memory
        self.half_context = half_context
        known = memory.read() if memory is not None else {}
        self.of_long: float | None = known.get(_FIRST)
        self._short_rate = known.get(_SHORT)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before the first measurement."""
        return self.of_long or self._short_rate

    @property
    def is_measured(self) -> bool:
        """Whether a prefill was long enough: a short one may be the first of a process, which waits
        for weights and kernels.
        """
        return self.of_long is not None

    def tokens_within(self, seconds: float, start: int = 0) -> int | None:
        """Return how many tokens after `start` are computed in so many seconds, if they are few;
        None without a measurement.
        """
        rate = self.tokens_per_s
        return int(rate * seconds / (1 + start / self.half_context)) if rate is not None else None

    def seconds_of(self, start: int, end: int) -> float | None:
        """Return how long a context's tokens from `start` to `end` take; None without a
        measurement.
        """
        rate = self.tokens_per_s
        return num_like_first(start, end, self.half_context) / rate if rate is not None else None

    def note(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in how long a step took that only prefilled; the first measurements are kept.

        A run is the start and the end of the tokens that it computed of one context.
        """
        num_tokens = sum(end - start for start, end in runs)
        if num_tokens < _MIN_SHORT_TOKENS or seconds <= 0:
            return
        newest = sum(num_like_first(*run, self.half_context) for run in runs) / seconds
        if num_tokens >= LEAST_TELLING_TOKENS:
            is_first, self.of_long = self.of_long is None, averaged_computing(self.of_long, newest)
        else:
            is_first = self._short_rate is None
            self._short_rate = averaged_computing(self._short_rate, newest)
        if is_first:
            self.keep()

    def keep(self) -> None:
        """Keep the rates for the next run."""
        if self._memory is None or self.tokens_per_s is None:
            return
        known = {_FIRST: self.of_long, _SHORT: self._short_rate}
        if math.isfinite(self.half_context):
            known[_HALF] = self.half_context
        self._memory.write({name: rate for name, rate in known.items() if rate is not None})


def known_prefill_rate(rates: Mapping[str, float]) -> tuple[float | None, float]:
    """Return the tokens a second and the half context that a memory's rates tell."""
    return rates.get(_FIRST) or rates.get(_SHORT), rates.get(_HALF, math.inf)


# A smaller copy shows overheads rather than the rate.
_MIN_BYTES = 1 << 18
# Factor by which `doubt` raises a rate.
_DOUBT = 1.1
# A plan that is not quicker by a tenth is not worth its risks.
_WORTH = 0.9
# Seconds from the question to a tier until its first pack is found, at least.
_FINDING_S = 0.002
# A tier on another machine may have nothing; asking it costs at most such a share of computing.
_ASKING = 0.02
# KV may come so much later than expected before the tokens are computed instead, as a share of the
# time to compute all of them: the time of a wait that brings nothing is lost.
_PATIENCE = 0.05
_MIN_PATIENCE_S = 0.1
# Tokens are computed for so long, in seconds, before it is looked whether they came from elsewhere.
_MEANWHILE_S = 0.25
# A tier that is still being opened gets more time: it is opened once.
_OPENING_PATIENCE = 0.25
_MIN_OPENING_PATIENCE_S = 0.3
# A slow machine's rate, used until this machine's is measured. A short prompt must not wait for a
# tier that cannot be asked yet because gigabytes of weights are being hashed for its identity.
_ASSUMED_TOKENS_PER_S = 100.0


def from_tier(name: str) -> str:
    """Return the name of the rate at which a tier is read."""
    return f"from {name}"


def to_tier(name: str) -> str:
    """Return the name of the rate at which a tier is written."""
    return f"to {name}"


class Planner:
    """Rates in bytes a second, by the names of `from_tier` and `to_tier`; none until measured.

    `prefill` measures computing, and `memory` keeps the rates of copies across runs. The engine's
    thread decides; each tier's thread notes its own copies.
    """

    def __init__(
        self, prefill: PrefillRate | None = None, memory: RateMemory | None = None
    ) -> None:
        self.prefill = prefill or PrefillRate(None)
        self._memory = memory
        self._keeping = threading.Lock()
        known = memory.read() if memory is not None else {}
        self.rates = {
            name: rate for name, rate in known.items() if name.startswith(("from ", "to "))
        }

    @property
    def has_memory(self) -> bool:
        """Whether `keep` keeps anything."""
        return self._memory is not None

    def keep(self) -> None:
        """Keep the rates of copies for the next run; any thread may do that."""
        if self._memory is not None:
            with self._keeping:
                self._memory.write(dict(self.rates))

    def note_copy(self, name: str, num_bytes: int, seconds: float) -> None:
        """Take in how long a copy took."""
        if num_bytes >= _MIN_BYTES and seconds > 0:
            self.rates[name] = averaged(self.rates.get(name), num_bytes / seconds)

    def doubt(self, *names: str) -> None:
        """Believe a little less how slow copying is, until a copy measures it again.

        A rate that stops all copies is not measured again: it would be believed for ever.
        """
        for name in names:
            if name in self.rates:
                self.rates[name] *= _DOUBT

    # Computing

    def seconds_to_compute(self, num_tokens: int, start: int = 0) -> float | None:
        """Return how long it takes to compute tokens after the first `start`; None if unknown."""
        rate, half = self.prefill.of_long, self.prefill.half_context
        return num_like_first(start, start + num_tokens, half) / rate if rate is not None else None

    def assumed_seconds(self, num_tokens: int) -> float:
        """Return how long computing takes, or would on a slow machine where nothing is known."""
        return num_tokens / (self.prefill.of_long or _ASSUMED_TOKENS_PER_S)

    # What a quick tier is worth

    def is_worth_copying(self, names: Sequence[str], num_tokens: int, num_bytes: int) -> bool:
        """Whether to copy by all these ways rather than compute; yes where a rate is unknown."""
        compute_s = self.seconds_to_compute(num_tokens)
        rates = [self.rates[name] for name in names if name in self.rates]
        return compute_s is None or sum(num_bytes / rate for rate in rates) < compute_s

    def quick_patience_s(self, num_tokens: int) -> float:
        """Return how long to wait for a quick tier before computing instead."""
        compute_s = self.seconds_to_compute(num_tokens)
        return 1.0 if compute_s is None else max(2 * _MIN_PATIENCE_S, compute_s)

    # What a slow tier is worth

    def is_worth_asking(self, latency_s: float, num_tokens: int, start: int = 0) -> bool:
        """Whether a tier that answers after `latency_s` may be asked for tokens after `start`."""
        compute_s = self.seconds_to_compute(num_tokens, start)
        compute_s = self.assumed_seconds(num_tokens) if compute_s is None else compute_s
        return latency_s <= _ASKING * compute_s

    def is_worth_sending(
        self, name: str, num_tokens: int, num_bytes: int, start: int, wait_s: float
    ) -> bool:
        """Whether to have another machine compute tokens after `start`, and read them once it has,
        after `wait_s`. They are computed here meanwhile, so an attempt costs no time.
        """
        compute_s = self.seconds_to_compute(num_tokens, start)
        compute_s = self.assumed_seconds(num_tokens) if compute_s is None else compute_s
        read_s = num_bytes / self.rates[name] if name in self.rates else 0.0
        return wait_s + read_s < _WORTH * compute_s

    def tokens_meanwhile(self, left_s: float, start: int) -> int | None:
        """Return how many tokens after `start` to compute now while others are computed elsewhere,
        which are expected in `left_s`; None if nothing is known. It is few at a time, so that those
        are taken as soon as they come.
        """
        seconds = min(left_s, _MEANWHILE_S) if left_s > 0 else _MEANWHILE_S
        one_s = self.seconds_to_compute(1, start)
        return int(seconds / one_s) if one_s is not None else None

    def front(
        self, name: str, num_tokens: int, num_bytes: int, start: int = 0, latency_s: float = 0.0
    ) -> int:
        """Return how many tokens after `start` to compute while the others, of `num_bytes` together
        with them, are read; all of them where reading is not worth it.

        Where a rate is unknown everything is read, which measures it. The tier answers after
        `latency_s`.
        """
        all_s, rate = self.seconds_to_compute(num_tokens, start), self.rates.get(name)
        if all_s is None or rate is None:
            return 0
        compute_s, read_s = all_s / num_tokens, num_bytes / num_tokens / rate
        only_reading_s = max(_FINDING_S, latency_s) + num_tokens * read_s
        front = only_reading_s / (compute_s + read_s)
        num_front, least_s = 0, only_reading_s
        if front >= LEAST_TELLING_TOKENS and front * compute_s < _WORTH * only_reading_s:
            num_front, least_s = int(front), front * compute_s
        return num_front if least_s < _WORTH * all_s else num_tokens

    def is_worth_reading(
        self, name: str, num_tokens: int, num_bytes: int, start: int = 0, latency_s: float = 0.0
    ) -> bool:
        """Whether to read anything; a refusal makes the next one less likely."""
        is_worth = self.front(name, num_tokens, num_bytes, start, latency_s) < num_tokens
        if not is_worth:
            self.doubt(name)
        return is_worth

    def first_worth(
        self, name: str, runs: Sequence[tuple[int, int]], start: int = 0, latency_s: float = 0.0
    ) -> int:
        """Return the first of several runs to read, while those before it are computed; their
        number where reading is not worth it. A run is its tokens and the bytes to read for them.

        As `front`, but a tier's packs say where the cut may be.
        """
        num_tokens, num_bytes = (sum(numbers) for numbers in zip(*runs, strict=True))
        all_s, rate = self.seconds_to_compute(num_tokens, start), self.rates.get(name)
        if all_s is None or rate is None:
            return 0
        compute_s, finding_s = all_s / num_tokens, max(_FINDING_S, latency_s)
        only_reading_s = finding_s + num_bytes / rate
        first, least_s, num_front = 0, only_reading_s, 0
        for index, (run_tokens, run_bytes) in enumerate(runs):
            seconds = max(num_front * compute_s, finding_s + num_bytes / rate)
            is_telling = num_front >= LEAST_TELLING_TOKENS
            if is_telling and seconds < min(least_s, _WORTH * only_reading_s):
                first, least_s = index, seconds
            num_front, num_bytes = num_front + run_tokens, num_bytes - run_bytes
        return first if least_s < _WORTH * all_s else len(runs)

    def patience_s(
        self, name: str, num_tokens: int, num_bytes: int, is_opening: bool = False
    ) -> float:
        """Return how long to wait for the next bytes to come up before computing meanwhile.

        `num_tokens` are all that could come up; `is_opening` where the tier is.
        """
        compute_s = self.assumed_seconds(num_tokens)
        if is_opening:
            return max(_MIN_OPENING_PATIENCE_S, _OPENING_PATIENCE * compute_s)
        expected_s = num_bytes / self.rates[name] if name in self.rates else 0.0
        return expected_s + max(_MIN_PATIENCE_S, _PATIENCE * compute_s)
