"""The benchmark scenarios by name. Each has a module of its own, of the same name."""

import importlib
from collections.abc import Callable

from kvchat.bench.report import Result
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import UsageError

Scenario = Callable[[BenchSetup], Result]


def scenario(name: str) -> Scenario:
    """Return a scenario's function; raises UsageError for an unknown name.

    Imports no other scenario: each needs packages of its own.
    """
    if name not in NAMES:
        raise UsageError(f"There is no scenario {name!r}.", f"Choose from {', '.join(NAMES)}.")
    run: Scenario = importlib.import_module(f"kvchat.bench.{name}").run
    return run


# The scenarios that run by default. Of the others `replay` and `weights` need recordings, `kernels`
# needs a GPU, `equality`, `clients` and `concurrency` are slow; `kv` compares with what few choose.
DEFAULT_NAMES = (
    *("turns", "resume", "decode", "prefill", "spec"),
    *("tiers", "radix", "memory", "startup", "cold"),
)
NAMES = (*DEFAULT_NAMES, "replay", "weights", "kernels", "equality", "clients", "concurrency", "kv")
