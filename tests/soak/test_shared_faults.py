"""Ten thousand things that a shared store may do, by itself or as a server: the answers are those
without it.
"""

from collections import Counter

import pytest

from support.shared_machines import run_on_faulty_server, run_with_faults

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_store_does_the_answers_stay(seed: int) -> None:
    run_with_faults(500, seed)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_becomes_of_the_server_the_answers_stay(seed: int, totals: Counter[str]) -> None:
    totals.update({f"faults: a store {k}": n for k, n in run_on_faulty_server(500, seed).items()})
