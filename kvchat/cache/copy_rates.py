"""CopyRates: is it quicker to copy KV down to host memory and up again, or to compute it again?

Decides by what this machine has shown so far. Pure arithmetic; knows no tier and no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvchat.cache.moving_rate import moved, moved_computing

# Below these a measurement says more about overheads than about the rate.
_MIN_TOKENS = 64
_MIN_BYTES = 1 << 18
# How much quicker copying may have become between two doubts.
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
        if num_tokens >= _MIN_TOKENS and seconds > 0:
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
        """Whether to copy both ways rather than compute; an unknown rate speaks for trying."""
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
