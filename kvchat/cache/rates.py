"""Measured rates of computing, reading and copying KV, and the decisions based on them.

CopyRates decides whether host memory is worth its copies, RestorePlanner what of a context to read
back and what to compute again meanwhile. RateMemory keeps the rates from one run to the next. The
first two are pure arithmetic, without a clock.

The front of a context can be computed while its back is read, and either may take all. With c
seconds to compute a token, r to read one, and l to find the first, n tokens are there after

    max(k c, l + (n - k) r)    where the first k are computed:  least at k = (l + n r) / (c + r)

which is what Jin et al. ("Compute or Load KV Cache? Why Not Both?", 2024) do by meeting in the
middle.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvchat.core.cost import num_like_first
from kvchat.core.memory import Memory

# Weight of the newest measurement in the moving average.
_NEWEST = 1 / 3
# If a measurement is this many times quicker than the known rate, the known rate was an outlier.
_FAR_QUICKER = 1.5


def moved(rate: float | None, newest: float) -> float:
    """Return the moving average after a new measurement; `rate` is None for the first."""
    return newest if rate is None else rate + _NEWEST * (newest - rate)


def moved_computing(rate: float | None, newest: float) -> float:
    """Return as `moved` a rate of computing, which much can make slow for once and nothing quick.

    The first step on a GPU compiles its kernels, which takes as long as a thousand steps: what it
    seemed to say was kept, and believed for a dozen prompts more.
    """
    if rate is not None and newest > _FAR_QUICKER * rate:
        return newest
    return moved(rate, newest)


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
_MIN_BYTES = 1 << 18
# Factor by which `doubt` and `note_refused` raise a rate.
_DOUBT = 1.1


@dataclass(slots=True)
class CopyRates:
    """Rates of this machine, None until something was measured. One thread owns them."""

    prefill_tokens_per_s: float | None = None
    down_bytes_per_s: float | None = None
    up_bytes_per_s: float | None = None

    def rates(self) -> dict[str, float]:
        """Return the rates that are known, by name."""
        known = {
            "prefill": self.prefill_tokens_per_s,
            "down": self.down_bytes_per_s,
            "up": self.up_bytes_per_s,
        }
        return {name: rate for name, rate in known.items() if rate is not None}

    def begin_with(self, rates: Mapping[str, float]) -> None:
        """Take over what an earlier process has measured, as far as this one has not."""
        if self.prefill_tokens_per_s is None:
            self.prefill_tokens_per_s = rates.get("prefill")
        if self.down_bytes_per_s is None:
            self.down_bytes_per_s = rates.get("down")
        if self.up_bytes_per_s is None:
            self.up_bytes_per_s = rates.get("up")

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take in how long computing took."""
        if num_tokens >= LEAST_TELLING_TOKENS and seconds > 0:
            newest = num_tokens / seconds
            self.prefill_tokens_per_s = moved_computing(self.prefill_tokens_per_s, newest)

    def note_down(self, num_bytes: int, seconds: float) -> None:
        """Take in how long a copy from the device to host memory took."""
        if num_bytes >= _MIN_BYTES and seconds > 0:
            self.down_bytes_per_s = moved(self.down_bytes_per_s, num_bytes / seconds)

    def note_up(self, num_bytes: int, seconds: float) -> None:
        """Take in how long a copy from host memory to the device took."""
        if num_bytes >= _MIN_BYTES and seconds > 0:
            self.up_bytes_per_s = moved(self.up_bytes_per_s, num_bytes / seconds)

    def is_worth_keeping(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to copy both ways rather than compute; yes where a rate is unknown."""
        ways = (self.down_bytes_per_s, self.up_bytes_per_s)
        seconds = sum(num_bytes / rate for rate in ways if rate is not None)
        return self._is_quicker(num_tokens, seconds)

    def doubt(self) -> None:
        """Believe a little less how slow copying is, until a copy measures it again.

        Where nothing is worth keeping no copy would ever be tried, whatever one bad day measured.
        """
        if self.down_bytes_per_s is not None:
            self.down_bytes_per_s *= _DOUBT
        if self.up_bytes_per_s is not None:
            self.up_bytes_per_s *= _DOUBT

    def is_worth_fetching(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to copy up what was copied down before, rather than compute it."""
        rate = self.up_bytes_per_s
        return rate is None or self._is_quicker(num_tokens, num_bytes / rate)

    def _is_quicker(self, num_tokens: int, seconds: float) -> bool:
        rate = self.prefill_tokens_per_s
        return rate is None or seconds < num_tokens / rate


# A prefill of fewer tokens says nothing about the rate.
_MIN_SHORT_TOKENS = 8
_KEPT, _KEPT_SHORT, _KEPT_HALF = "first tokens", "short prefill", "half context"
# The other rates here have this one, of steps wherever they were in a context: better than none.
_KEPT_PLAIN = "prefill"


class PrefillRate:
    """Tokens a second of prefills, as users are told of it; `memory` keeps it across runs.

    It is the rate of a context's first tokens: those after them take longer, by `half_context` as
    in `num_like_first`. A short prefill counts until a longer one was measured. One thread owns it.
    """

    def __init__(self, memory: RateMemory | None, half_context: float = math.inf) -> None:
        self._memory = memory
        self.half_context = half_context
        known = memory.read() if memory is not None else {}
        self._rate = known.get(_KEPT, known.get(_KEPT_PLAIN))
        self._short_rate = known.get(_KEPT_SHORT)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before the first measurement."""
        return self._rate or self._short_rate

    @property
    def is_measured(self) -> bool:
        """Whether a prefill was long enough: a short one may be the first of a process, which waits
        for weights and kernels.
        """
        return self._rate is not None

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
            is_first, self._rate = self._rate is None, moved_computing(self._rate, newest)
        else:
            is_first = self._short_rate is None
            self._short_rate = moved_computing(self._short_rate, newest)
        if is_first:
            self.keep()

    def keep(self) -> None:
        """Keep the rates for the next run."""
        if self._memory is None or self.tokens_per_s is None:
            return
        known = {_KEPT: self._rate, _KEPT_SHORT: self._short_rate}
        if math.isfinite(self.half_context):
            known[_KEPT_HALF] = self.half_context
        self._memory.write({name: rate for name, rate in known.items() if rate is not None})


def kept_prefill_rate(rates: Mapping[str, float]) -> tuple[float | None, float]:
    """Return the tokens a second and the half context that a memory's rates tell."""
    computed = rates.get(_KEPT) or rates.get(_KEPT_PLAIN) or rates.get(_KEPT_SHORT)
    return computed, rates.get(_KEPT_HALF, math.inf)


# A plan that is not quicker by a tenth is not worth its risks.
_WORTH = 0.9
# Seconds from the question to a tier until its first pack is found.
_FINDING_S = 0.002
# KV may come so much later than expected before the tokens are computed instead, as a share of the
# time to compute all of them: the time of a wait that brings nothing is lost.
_PATIENCE = 0.05
_MIN_PATIENCE_S = 0.1
# A tier that is still being opened gets more time: it is opened once.
_OPENING_PATIENCE = 0.25
_MIN_OPENING_PATIENCE_S = 0.3
# A slow machine's rate, used until this machine's is measured. A short prompt must not wait for a
# tier that cannot be asked yet because gigabytes of weights are being hashed for its identity.
_ASSUMED_TOKENS_PER_S = 100.0


@dataclass(slots=True)
class RestorePlanner:
    """Rates of this machine, None until something was measured.

    `read_s` are the seconds that all reading took.
    """

    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None
    read_s: float = 0.0

    def rates(self) -> dict[str, float]:
        """Return the rates that are known, by name."""
        known = {"prefill": self.prefill_tokens_per_s, "read": self.read_bytes_per_s}
        return {name: rate for name, rate in known.items() if rate is not None}

    def begin_with(self, rates: Mapping[str, float]) -> None:
        """Take over what an earlier process has measured, as far as this one has not."""
        if self.prefill_tokens_per_s is None:
            self.prefill_tokens_per_s = rates.get("prefill")
        if self.read_bytes_per_s is None:
            self.read_bytes_per_s = rates.get("read")

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take in how long computing took."""
        if num_tokens >= LEAST_TELLING_TOKENS and seconds > 0:
            newest = num_tokens / seconds
            self.prefill_tokens_per_s = moved_computing(self.prefill_tokens_per_s, newest)

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Take in how long reading took."""
        self.read_s += seconds
        if num_bytes >= _MIN_BYTES and seconds > 0:
            self.read_bytes_per_s = moved(self.read_bytes_per_s, num_bytes / seconds)

    def note_refused(self) -> None:
        """Take in that a restore was not worth it: what is not read is not measured either.

        The rate of reading is believed a little less each time, until one restore tries it again.
        """
        if self.read_bytes_per_s is not None:
            self.read_bytes_per_s *= _DOUBT

    def front(self, num_tokens: int, num_bytes: int) -> int:
        """Return how many leading tokens to compute while the others, of `num_bytes` together with
        them, are read; all of them where reading is not worth it.

        Where a rate is unknown everything is read, which measures it.
        """
        if self.prefill_tokens_per_s is None or self.read_bytes_per_s is None:
            return 0
        compute_s = 1 / self.prefill_tokens_per_s
        read_s = num_bytes / num_tokens / self.read_bytes_per_s
        only_reading_s = _FINDING_S + num_tokens * read_s
        front = only_reading_s / (compute_s + read_s)
        num_front, least_s = 0, only_reading_s
        if front >= LEAST_TELLING_TOKENS and front * compute_s < _WORTH * only_reading_s:
            num_front, least_s = int(front), front * compute_s
        return num_front if least_s < _WORTH * num_tokens * compute_s else num_tokens

    def first_worth(self, runs: Sequence[tuple[int, int]]) -> int:
        """Return the first of several runs to read, while those before it are computed; their
        number where reading is not worth it. A run is its tokens and the bytes to read for them.

        What `front` says of cuts anywhere, for those that a tier's packs allow.
        """
        if self.prefill_tokens_per_s is None or self.read_bytes_per_s is None:
            return 0
        num_front, num_bytes = 0, sum(size for _, size in runs)
        only_reading_s = _FINDING_S + num_bytes / self.read_bytes_per_s
        first, least_s = 0, only_reading_s
        for index, (num_tokens, size) in enumerate(runs):
            reading_s = _FINDING_S + num_bytes / self.read_bytes_per_s
            seconds = max(num_front / self.prefill_tokens_per_s, reading_s)
            is_telling = num_front >= LEAST_TELLING_TOKENS
            if is_telling and seconds < min(least_s, _WORTH * only_reading_s):
                first, least_s = index, seconds
            num_front, num_bytes = num_front + num_tokens, num_bytes - size
        compute_s = num_front / self.prefill_tokens_per_s
        return first if least_s < _WORTH * compute_s else len(runs)

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to read anything."""
        return self.front(num_tokens, num_bytes) < num_tokens

    def patience_s(self, num_tokens: int, num_bytes: int, is_opening: bool = False) -> float:
        """Return how long to wait for the next bytes to come up before computing meanwhile.

        `num_tokens` are all that could come up; `is_opening` where the tier is.
        """
        if is_opening:
            return max(_MIN_OPENING_PATIENCE_S, _OPENING_PATIENCE * self.compute_s(num_tokens))
        expected_s = num_bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0
        return expected_s + max(_MIN_PATIENCE_S, _PATIENCE * self.compute_s(num_tokens))

    def compute_s(self, num_tokens: int) -> float:
        """Return how long computing takes, or would on a slow machine where nothing is known."""
        return num_tokens / (self.prefill_tokens_per_s or _ASSUMED_TOKENS_PER_S)
