"""`KVCHAT_CPU`: the level that kernels are compiled for, instead of this processor's own.

Importing this file imports no LLVM, so the command line can name the variable.
"""

from collections.abc import Collection
from dataclasses import dataclass

CPU_VARIABLE = "KVCHAT_CPU"


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of processor; features have LLVM's names.

    `processor` and `flags` are what LLVM compiles for. `usable` are the features that kernels ask
    for by name, `needed` those without which LLVM's code ends in an illegal instruction.
    """

    processor: str
    flags: tuple[str, ...]
    usable: frozenset[str]
    needed: frozenset[str]


_V2 = frozenset({"cx16", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}
_AVX2 = frozenset({"sse2", "ssse3", "avx2", "f16c"})
LEVELS = {
    "x86-64-v2": Level("x86-64-v2", (), frozenset({"sse2", "ssse3"}), _V2),
    "x86-64-v3": Level("x86-64-v3", (), _AVX2, _V3),
    "x86-64-v3+avxvnni": Level("x86-64-v3", ("avxvnni",), _AVX2 | {"avxvnni"}, _V3 | {"avxvnni"}),
}


def level(name: str, present: Collection[str]) -> Level:
    """Return a level that a processor with the features `present` can run.

    Raises RuntimeError, in a sentence for the user, for an unknown name or a missing feature.
    """
    if name not in LEVELS:
        known = ", ".join(LEVELS)
        raise RuntimeError(f"{CPU_VARIABLE} is {name[:40]!r}, but must be one of {known}.")
    if missing := sorted(LEVELS[name].needed - set(present)):
        raise RuntimeError(f"{CPU_VARIABLE} is {name}, but this processor has no {missing[0]}.")
    return LEVELS[name]
