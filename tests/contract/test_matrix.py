"""Every combination has its turn, and a name always stands for the same ones."""

from collections.abc import Collection
from itertools import chain

import pytest
from _pytest.mark import Mark, ParameterSet

from support.matrix import SHARES, outside_of_share, share_of, spread


class _Item:
    """An item of a test with the marks of its parameters."""

    def __init__(self, nodeid: str, marks: Collection[Mark]) -> None:
        self.nodeid = nodeid
        self._marks = marks

    def iter_markers(self, name: str) -> list[Mark]:
        return [mark for mark in self._marks if mark.name == name]


def _items(parameters: list[ParameterSet], rows: int = 1) -> list[_Item]:
    return [
        _Item(f"a.py::test_it[{each.values[0]}-{row}]", [mark.mark for mark in each.marks])
        for each in parameters
        for row in range(rows)
    ]


def _run(items: list[_Item], share: int) -> list[str]:
    left_out = outside_of_share(items, share)  # type: ignore[arg-type]
    return [item.nodeid for item in items if item not in left_out]


@pytest.mark.parametrize("count", [1, SHARES - 1, 59])
def test_each_value_is_in_one_share_and_shares_are_alike(count: int) -> None:
    items = _items(spread(range(count)))

    shares = [_run(items, share) for share in range(SHARES)]

    assert sorted(chain(*shares)) == sorted(item.nodeid for item in items)
    assert {len(share) for share in shares} <= {count // SHARES, -(-count // SHARES)}


def test_all_tests_of_a_value_run_together() -> None:
    """Each run compiled the kernels of every value for one row of it."""
    items = _items(spread(range(SHARES)), rows=5)

    for share in range(SHARES):
        ran = _run(items, share)
        assert len(ran) == 5
        assert len({nodeid.rpartition("-")[0] for nodeid in ran}) == 1


def test_what_is_not_marked_always_runs() -> None:
    items = _items(spread(["llama"], always=["llama"]))

    assert all(_run(items, share) == [items[0].nodeid] for share in range(SHARES))


def test_commits_have_all_shares_and_each_has_one() -> None:
    assert {share_of(f"commit {number}") for number in range(100)} == set(range(SHARES))
    assert share_of("commit 1") == share_of("commit 1")


def test_values_that_differ_in_code_are_not_marked() -> None:
    parameters = spread([("llama", "int8"), ("gemma", "int8")], always=[("llama", "int8")])

    assert [each.values for each in parameters] == [("llama", "int8"), ("gemma", "int8")]
    assert [[mark.name for mark in each.marks] for each in parameters] == [[], ["matrix"]]
    with pytest.raises(AssertionError, match="none of the values"):
        spread(["llama"], always=["lama"])
