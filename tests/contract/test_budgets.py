"""A directory that takes longer than its budget is named, and every directory has one."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.budgets import BUDGETS_S, _children, over_budget

TESTS = Path(__file__).parents[1]


def test_what_takes_too_long_is_named_with_its_seconds() -> None:
    taken_s = Counter({"pty": 2 * BUDGETS_S["pty"], "soak": BUDGETS_S["soak"]})

    assert over_budget(taken_s) == [
        f"tests/pty took {2 * BUDGETS_S['pty']} s of processors, and has {BUDGETS_S['pty']} "
        "(tests/support/budgets.py)."
    ]


def test_every_directory_of_tests_has_a_budget() -> None:
    directories = {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}

    assert directories - {"gpu"} == BUDGETS_S.keys()


def test_a_process_that_ends_while_it_is_counted_has_no_children(monkeypatch):
    """A run ended in an error of pytest: the directory was gone before it was read."""

    def gone(path: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "glob", gone)

    assert _children(1) == []
