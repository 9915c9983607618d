"""Buffers are lent again once nobody looks at them, where the system can tell."""

import mmap

import pytest

from kvchat.cache import page_memory
from kvchat.cache.page_memory import ReadBuffers


class Rigid(mmap.mmap):
    """Memory of a system without mremap, such as macOS."""

    def resize(self, new_size: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


def test_what_nobody_holds_is_lent_again_and_what_somebody_holds_is_not() -> None:
    buffers = ReadBuffers(max_kept=2)
    first = buffers.take(1000)
    first[:3] = b"one"
    second = buffers.take(1000)
    second[:3] = b"two"

    assert bytes(first[:3]) == b"one"
    first.release()
    assert bytes(buffers.take(1000)[:3]) == b"one"


def test_where_nobody_can_tell_all_memory_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read but the first was refused as unreadable."""
    monkeypatch.setattr(
        page_memory, "fresh_memory", lambda num_bytes, is_for_all: Rigid(-1, num_bytes)
    )
    buffers = ReadBuffers(max_kept=2)
    buffers.warm(1000, 1)
    for number in range(4):
        memory = buffers.take(1000)
        assert not any(memory)
        memory[:3] = b"%03d" % number
        memory.release()
