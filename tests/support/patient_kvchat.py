"""kvchat that waits for kept KV as long as it takes: for tests about what comes back, not when.

Usage: python -m support.patient_kvchat ARGUMENTS, as `python -m kvchat`. A processor or a disk that
stalls for a third of a second makes the real one compute what it could have read.
"""

import pytest

from kvchat.cache.planner import Planner
from kvchat.cli.main import run

PATIENCE_S = 60.0


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Have every engine of this process wait until what is kept has come up."""
    patch.setattr(Planner, "patience_s", lambda *what, **how: PATIENCE_S)


if __name__ == "__main__":
    be_patient(pytest.MonkeyPatch())
    run()
