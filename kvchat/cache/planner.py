"""RestorePlanner: is it quicker to read KV back, or to compute it again?

Decides by what this machine has shown so far: tokens computed a second, bytes read a second. Pure
arithmetic; knows no tier and no clock.
"""

from dataclasses import dataclass

# A rate follows what is measured, the newest weighing a third: machines change their mind.
_NEWEST = 1 / 3
# Below these a measurement says more about overheads than about the rate.
_MIN_TOKENS = 64
_MIN_BYTES = 1 << 18
# How much quicker a disk may have become with every restore that was not tried.
_DOUBT = 1.1
# How much longer than computing a restore may take before it is given up, and the least patience.
_PATIENCE = 1.0
_MIN_PATIENCE_S = 0.05
# A slow machine's, until this one has shown its own: a short prompt must not wait for a tier that
# is still reading gigabytes of weights to know whose KV it may give out.
_ASSUMED_TOKENS_PER_S = 100.0


@dataclass(slots=True)
class RestorePlanner:
    """Rates of this machine, None until something was measured. One thread owns a planner."""

    prefill_tokens_per_s: float | None = None
    read_bytes_per_s: float | None = None

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take in how long computing took."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _moved(self.prefill_tokens_per_s, num_tokens / seconds)

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """Take in how long reading took."""
        if num_bytes >= _MIN_BYTES and seconds > 0:
            self.read_bytes_per_s = _moved(self.read_bytes_per_s, num_bytes / seconds)

    def note_refused(self) -> None:
        """Take in that a restore was not worth it: what is not read is not measured either.

        The rate of reading is believed a little less each time, until one restore tries it again.
        """
        if self.read_bytes_per_s is not None:
            self.read_bytes_per_s *= _DOUBT

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to restore; an unknown rate speaks for trying, which measures it."""
        if self.prefill_tokens_per_s is None or self.read_bytes_per_s is None:
            return True
        return num_bytes / self.read_bytes_per_s < num_tokens / self.prefill_tokens_per_s

    def patience_s(self, num_tokens: int) -> float:
        """Return how long to wait for a restore before computing."""
        rate = self.prefill_tokens_per_s or _ASSUMED_TOKENS_PER_S
        return max(_MIN_PATIENCE_S, _PATIENCE * num_tokens / rate)


def _moved(rate: float | None, newest: float) -> float:
    return newest if rate is None else rate + _NEWEST * (newest - rate)
