"""The table of benchmark scenarios by name. Each scenario has a module of its own."""

from collections.abc import Callable

from kvchat.bench.report import Result
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import UsageError

Scenario = Callable[[BenchSetup], Result]


def scenario(name: str) -> Scenario:
    """Return a scenario's function; raises UsageError for an unknown name."""
    if name in _ELSEWHERE:
        raise UsageError(f"There is no scenario {name!r}.", f"{_ELSEWHERE[name]} this.")
    if name not in NAMES:
        raise UsageError(f"There is no scenario {name!r}.", f"Choose from {', '.join(NAMES)}.")
    from kvchat.bench import (
        clients,
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
        "clients": clients.run,
    }[name]


# The scenarios that run by default. Of the others `replay` and `weights` need recordings, `kernels`
# needs a GPU, and `equality` and `clients` are slow.
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
# What others measure already, under names that people look for.
_ELSEWHERE = {"concurrency": "`clients` measures", "kv": "`memory` and `tiers` measure"}
NAMES = (*DEFAULT_NAMES, "replay", "weights", "kernels", "equality", "clients")
