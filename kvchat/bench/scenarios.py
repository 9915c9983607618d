"""The scenarios by name, and what each is given.

Knows which scenarios there are; each measures in a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvchat.bench.report import Result
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import UsageError
from kvchat.model.source import ModelSource


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What every scenario works with. `is_quick` shrinks it to a check that it runs at all.

    `sessions` is a directory of recorded conversations, for those that replay some; `gguf` is the
    same model for llama.cpp.
    """

    source: ModelSource
    model: ModelConfig
    cache: CacheConfig
    repeats: int
    is_quick: bool
    sessions: Path | None = None
    gguf: Path | None = None

    def scaled(self, length: int) -> int:
        """Return a length in tokens, or a small one in a quick run."""
        return max(32, length // 32) if self.is_quick else length


Scenario = Callable[[BenchSetup], Result]


def scenario(name: str) -> Scenario:
    """Return a scenario's function; raises UsageError for a name there is not."""
    if name not in NAMES:
        raise UsageError(f"There is no scenario {name!r}.", f"Choose from {', '.join(NAMES)}.")
    from kvchat.bench import (
        cold,
        decode,
        equality,
        kernels,
        memory,
        prefill,
        radix,
        replay,
        resume,
        spec,
        startup,
        tiers,
        turns,
        weights,
    )

    return {
        "turns": turns.run,
        "resume": resume.run,
        "cold": cold.run,
        "decode": decode.run,
        "radix": radix.run,
        "memory": memory.run,
        "startup": startup.run,
        "tiers": tiers.run,
        "replay": replay.run,
        "kernels": kernels.run,
        "prefill": prefill.run,
        "weights": weights.run,
        "spec": spec.run,
        "equality": equality.run,
    }[name]


# What measures without being asked for: `replay` and `weights` need recordings, `kernels` a GPU,
# and `equality` takes its time.
DEFAULT_NAMES = (
    "turns",
    "resume",
    "decode",
    "prefill",
    "spec",
    "tiers",
    "radix",
    "memory",
    "startup",
    "cold",
)
NAMES = (*DEFAULT_NAMES, "replay", "weights", "kernels", "equality")
