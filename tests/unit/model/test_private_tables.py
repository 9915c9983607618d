"""A model over a table with holes and positions of its own has the logits of a plain cache."""

from pathlib import Path

import pytest

from support.private_tables import MODELS, check_private_table

NOT_COMPILED = {"llama4, chunks"}


@pytest.mark.parametrize(
    ("name", "by_modules"),
    [
        *((name, True) for name in MODELS),
        *((name, False) for name in MODELS if name not in NOT_COMPILED),
    ],
)
def test_logits_are_those_of_a_cache_without_the_dropped_tokens(name, by_modules, tmp_path):
    check_private_table(name, tmp_path, by_modules=by_modules)


def test_positions_may_lie_far_beyond_the_slots(tmp_path: Path) -> None:
    """Further than the positions that angles are computed for at first."""
    check_private_table("llama", tmp_path, start=3000)
