"""Fresh memory is zero, writable and taken only where it is written."""

import resource

import pytest

from kvchat.cache.page_memory import fresh_memory


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
