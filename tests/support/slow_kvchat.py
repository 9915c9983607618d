"""kvchat whose model never comes: for tests about how long a load may take.

Usage: python -m support.slow_kvchat ARGUMENTS, as `python -m kvchat`. A tiny model may be loaded
before a busy machine lets its main thread look at the clock.
"""

import threading
from typing import Any

import pytest

from kvchat.chat import host
from kvchat.cli.main import run


def never_load(patch: pytest.MonkeyPatch) -> None:
    """Have every engine of this process wait without end instead of loading."""
    real = host.EngineThread

    def waiting(build: Any, *rest: Any) -> host.EngineThread:
        return real(lambda progress: threading.Event().wait(), *rest)

    patch.setattr(host, "EngineThread", waiting)


if __name__ == "__main__":
    never_load(pytest.MonkeyPatch())
    run()
