"""Rates of this machine: how fast a model computes, and the memory that keeps rates across runs.

PrefillRate measures computing. RateMemory keeps it, and the rates of copies of `planner.py`, from
one run to the next.
"""

import math
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
