"""A slower tier with its processes, and patience for a disk that stands still for seconds."""

from collections.abc import Iterator

import pytest

from kvchat.cache import chain
from kvchat.cache.disk import tier as disk_tier
from support.memory_tier import MemoryTier
from support.restarts import Processes


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(block_size=4, image_bytes=4 * 8)


@pytest.fixture
def processes(tier: MemoryTier) -> Iterator[Processes]:
    made = Processes(lambda: tier)
    yield made
    for process in made.started:
        process.end()


@pytest.fixture(autouse=True)
def _patience_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine keeps as it closes is waited for, and so is who holds the store's lock."""
    monkeypatch.setattr(chain, "_CLOSE_PATIENCE_S", 60.0)
    monkeypatch.setattr(disk_tier, "_PATIENCE_S", 30.0)
