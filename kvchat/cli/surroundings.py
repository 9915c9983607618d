"""Process-wide settings that libraries read once, when they are loaded.

Knows environment variables of libraries below us. Called before anything imports torch; what the
user has set stays.
"""

import os

# OpenMP's default is to spin at every barrier for milliseconds: beside one other busy process that
# cost a factor of 3 to 20, until the engine goes over to one thread, and all the time in a prefill.
# Not to spin long enough costs more than it looks: a thread that sleeps between two products has to
# be woken for each. Two threads on two quiet cores, 135m: 28 tokens/s with 1,000 turns, 38 with
# 3,000, 42 with 40,000; beside a busy process 26, 18 and 4.
_SPIN_COUNT = "3000"


def prepare() -> None:
    """Set what torch, OpenMP and tokenizers will read."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
