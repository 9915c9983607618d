"""Staging for copies to and from host memory: used again, and never by two at once."""

import random

import torch

from kvchat.cache.host_offload import HostCopies
from support.cached_contexts import CPU

IMAGE_BYTES, PIECE_BLOCKS = 64, 4


def new_copies() -> HostCopies:
    return HostCopies(CPU, IMAGE_BYTES, PIECE_BLOCKS)


def test_memory_that_was_given_back_is_used_again() -> None:
    """Every piece once took fresh memory from the system, a page fault for each 4 KiB copied."""
    copies = new_copies()
    first = copies.staging(1)
    copies.give_back(first)

    again = copies.staging(PIECE_BLOCKS)

    assert again.shape == (PIECE_BLOCKS, IMAGE_BYTES)
    assert again.data_ptr() == first.data_ptr()


def test_nobody_is_given_what_another_has_and_little_is_kept() -> None:
    rng = random.Random(2)
    copies = new_copies()
    taken: dict[int, torch.Tensor] = {}
    for number in range(300):
        if len(taken) < 12 and rng.random() < 0.6:
            taken[number] = copies.staging(rng.randint(1, PIECE_BLOCKS)).fill_(number % 251)
        elif taken:
            copies.give_back(taken.pop(rng.choice(list(taken))))
        for owner, staging in taken.items():
            assert (staging == owner % 251).all()
        assert len(copies._kept) <= 4


def test_what_came_up_lies_in_staging_of_the_callers_own() -> None:
    copies = new_copies()
    rows = [torch.full((IMAGE_BYTES,), value, dtype=torch.uint8) for value in (3, 5)]

    one, other = copies.up(rows), copies.up(rows[:1])
    copies.down(one, rows[::-1], copies.mark())

    assert [int(row[0]) for row in rows] == [5, 3]
    assert other.tolist() == [[3] * IMAGE_BYTES]
