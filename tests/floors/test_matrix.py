"""Every combination has its turn, and a name always stands for the same ones."""

import pytest

from support.matrix import SHARES, outside_of_share, share_of, spread


class _Item:
    """An item of a test, marked or not."""

    def __init__(self, nodeid: str, is_marked: bool = True) -> None:
        self.nodeid = nodeid
        self._is_marked = is_marked

    def get_closest_marker(self, name: str) -> object:
        return name if self._is_marked else None


def _run(items: list[_Item], share: int) -> set[str]:
    left_out = outside_of_share(items, share)  # type: ignore[arg-type]
    return {item.nodeid for item in items} - {item.nodeid for item in left_out}


@pytest.mark.parametrize("count", [1, SHARES - 1, 59])
def test_each_combination_is_in_one_share_and_shares_are_alike(count: int) -> None:
    items = [_Item(f"a.py::test_it[{number}]") for number in range(count)]

    shares = [_run(items, share) for share in range(SHARES)]

    assert sorted(nodeid for share in shares for nodeid in share) == sorted(
        item.nodeid for item in items
    )
    assert {len(share) for share in shares} <= {count // SHARES, -(-count // SHARES)}


def test_what_is_not_marked_always_runs() -> None:
    items = [_Item("a.py::test_it[llama]", is_marked=False)]

    assert all(_run(items, share) == {"a.py::test_it[llama]"} for share in range(SHARES))


def test_commits_have_all_shares_and_each_has_one() -> None:
    assert {share_of(f"commit {number}") for number in range(100)} == set(range(SHARES))
    assert share_of("commit 1") == share_of("commit 1")


def test_values_that_differ_in_code_are_not_marked() -> None:
    parameters = spread([("llama", "int8"), ("gemma", "int8")], always=[("llama", "int8")])

    assert [each.values for each in parameters] == [("llama", "int8"), ("gemma", "int8")]
    assert [[mark.name for mark in each.marks] for each in parameters] == [[], ["matrix"]]
    with pytest.raises(AssertionError, match="none of the values"):
        spread(["llama"], always=["lama"])
