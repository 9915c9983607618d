"""Settings of the whole test run."""

import os

# As `kvchat` itself does: barriers that spin make a shared machine many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
