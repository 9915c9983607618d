"""Patience for what these tests write to a real disk: a machine may stand still for seconds."""

import pytest

from kvchat.cache import chain
from kvchat.cache.disk import tier


@pytest.fixture(autouse=True)
def _patience_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine keeps as it closes is waited for, and so is who holds the store's lock."""
    monkeypatch.setattr(chain, "_CLOSE_PATIENCE_S", 60.0)
    monkeypatch.setattr(tier, "_PATIENCE_S", 30.0)
