"""Ten thousand things that a shared store may do: the answers are those without it."""

import pytest

from support.shared_machines import run_with_faults

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_store_does_the_answers_stay(seed: int) -> None:
    run_with_faults(500, seed)
