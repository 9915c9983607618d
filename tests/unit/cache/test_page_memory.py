"""Fresh memory takes room where it is written, and buffers are used again where nothing holds
them.
"""

import mmap
import resource

import pytest

from kvchat.cache import page_memory
from kvchat.cache.page_memory import ReadBuffers, fresh_memory


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 1 << 22, (1 << 22) + 17])
@pytest.mark.parametrize("is_for_all", [False, True])
def test_is_zero_and_writable_to_its_end(num_bytes: int, is_for_all: bool) -> None:
    memory = fresh_memory(num_bytes, is_for_all=is_for_all)

    assert len(memory) == num_bytes
    assert not any(memory[:64] + memory[-64:])
    memory[-1] = 7
    assert memory[-1] == 7


def test_takes_no_room_before_it_is_written() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    memories = [fresh_memory(1 << 30, is_for_all=True) for _ in range(8)]

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB
    assert len(memories) == 8


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
