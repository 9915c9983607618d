"""Process-wide settings that libraries read once, when they are loaded.

Knows environment variables of libraries below us. Called before anything imports torch; what the
user has set stays.
"""

import os

# OpenMP's default is to spin at every barrier for milliseconds. On a quiet machine that gains a few
# percent; beside one other busy process it cost a factor of 3 to 10 (measured on two cores: 12
# tokens/s against 2 to 6, and 23 against 25 when quiet). A short spin keeps nearly all of the gain.
_SPIN_COUNT = "1000"


def prepare() -> None:
    """Set what torch, OpenMP and tokenizers will read."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
