"""What a team of trainers shares out: rows of one length at a time, in an order all agree on."""

from itertools import count, islice

import pytest
import torch

from demo_recipe.network import Rows
from demo_recipe.train import alike


def rows(length: int, number: int) -> Rows:
    ids = torch.full((1, length), number)
    return Rows(ids, ids, ids, ids, ids.float())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_has_one_length_and_no_batch_is_lost_or_taken_twice(size: int) -> None:
    lengths = [256, 512, 256, 1024, 512, 512, 256, 256, 512, 1024]
    stream = [rows(length, number) for number, length in enumerate(lengths)]

    groups = list(alike(stream, size))

    assert all(len(group) == size for group in groups)
    assert all(len({part.ids.shape[1] for part in group}) == 1 for group in groups)
    taken = [int(part.ids[0, 0]) for group in groups for part in group]
    left = {number for number in range(len(lengths)) if number not in taken}
    assert len(taken) == len(set(taken))
    assert all(sum(lengths[number] == length for number in left) < size for length in set(lengths))


def test_groups_come_as_soon_as_they_are_complete() -> None:
    endless = (rows((256, 512, 512)[number % 3], number) for number in count())

    groups = [[int(part.ids[0, 0]) for part in group] for group in islice(alike(endless, 2), 3)]

    assert groups == [[1, 2], [0, 3], [4, 5]]
