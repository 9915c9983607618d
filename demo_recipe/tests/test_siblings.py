"""Siblings of drafted tokens are counted as a verifying step would accept them."""

import random
from collections.abc import Sequence

import pytest

from demo_recipe.siblings import Shape, tokens_a_step


def accepted_plainly(ranks: Sequence[int], shape: Shape) -> int:
    """The twin: spell out every path of the tree, and take the longest that came."""
    paths = [[0] * depth for depth in range(shape.length + 1)]
    paths += [[0] * depth + [1] for depth in range(shape.num_siblings)]
    return max(len(path) for path in paths if list(ranks[: len(path)]) == path)


def tokens_plainly(ranks: list[int], shape: Shape) -> float:
    left, num_steps = ranks, 0
    while left:
        left = left[accepted_plainly(left, shape) + 1 :]
        num_steps += 1
    return len(ranks) / num_steps


@pytest.mark.parametrize(
    "shape", [Shape(4), Shape(4, 1), Shape(4, 4), Shape(8), Shape(1, 1)], ids=str
)
def test_a_step_yields_the_longest_path_that_came(shape: Shape) -> None:
    rng = random.Random(5)
    for _ in range(200):
        ranks = rng.choices([0, 1, 2], [6, 2, 1], k=rng.randint(1, 40))
        assert tokens_a_step(ranks, shape) == tokens_plainly(ranks, shape)


def test_a_sibling_saves_the_step_in_which_the_first_guess_was_wrong() -> None:
    ranks = [1, 0, 1, 0]

    assert tokens_a_step(ranks, Shape(2)) == 4 / 3
    assert tokens_a_step(ranks, Shape(2, 1)) == 4 / 2
    assert Shape(2, 1).num_rows == 4
