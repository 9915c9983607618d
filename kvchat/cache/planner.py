"""Planner: decides by measured rates which KV to keep, to read back, and to compute meanwhile.

It has the one set of rates of a model on this machine: how fast it computes (PrefillRate), and how
fast KV is copied to and from each tier. It is arithmetic, without a clock.

The front of a context can be computed while its back is read, and either may take all. With c
seconds to compute a token, r to read one, and l to find the first, n tokens are there after

    max(k c, l + (n - k) r)    where the first k are computed:  least at k = (l + n r) / (c + r)

which is what Jin et al. ("Compute or Load KV Cache? Why Not Both?", 2024) do by meeting in the
middle.
"""

import threading
from collections.abc import Sequence

from kvchat.cache.rates import LEAST_TELLING_TOKENS, PrefillRate, RateMemory, averaged
from kvchat.core.stats import num_like_first

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
