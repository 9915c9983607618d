"""A directory that takes longer than its budget is named, and every directory has one."""

from collections import Counter
from pathlib import Path

from support.budgets import BUDGETS_S, over_budget

TESTS = Path(__file__).parents[1]


def test_what_takes_too_long_is_named_with_its_seconds() -> None:
    taken_s = Counter({"core": 2 * BUDGETS_S["core"], "cli": BUDGETS_S["cli"]})

    assert over_budget(taken_s) == [
        f"tests/core took {2 * BUDGETS_S['core']} s of processors, and has {BUDGETS_S['core']} "
        "(tests/support/budgets.py)."
    ]


def test_every_directory_of_tests_has_a_budget() -> None:
    directories = {path.parent.name for path in TESTS.glob("*/test_*.py")}

    assert directories - {"gpu"} == BUDGETS_S.keys()
