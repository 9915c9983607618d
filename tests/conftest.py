"""Settings of the whole test run."""

import os

# As `kvchat` itself does: barriers that spin make a shared machine many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only waits
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
