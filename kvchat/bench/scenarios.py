"""The table of benchmark scenarios by name. Each scenario has a module of its own."""

from collections.abc import Callable

from kvchat.bench.report import Result
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import UsageError

Scenario = Callable[[BenchSetup], Result]


def scenario(name: str) -> Scenario:
    """Return a scenario's function; raises UsageError for an unknown name."""
    if name not in NAMES:
        raise UsageError(f"There is no scenario {name!r}.", f"Choose from {', '.join(NAMES)}.")
    from kvchat.bench import (
        clients,
        cold,
        concurrency,
        decode,
        equality,
        kernels,
        kv,
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
        "concurrency": concurrency.run,
        "kv": kv.run,
    }[name]


# The scenarios that run by default. Of the others `replay` and `weights` need recordings, `kernels`
# needs a GPU, `equality`, `clients` and `concurrency` are slow; `kv` compares with what few choose.
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
NAMES = (*DEFAULT_NAMES, "replay", "weights", "kernels", "equality", "clients", "concurrency", "kv")
