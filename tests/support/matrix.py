"""Combinations of which each commit's tests run a share, and `make test-all` runs all.

A test of many combinations names those that differ in the code they run. These run always. The
others are marked `matrix`: a name, such as a commit's hash, decides which of them run with it. So
every combination has its turn within some commits, and a run of the same commit is the same run.
"""

import itertools
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

SHARES = 16
T = TypeVar("T")


def spread(values: Iterable[T], always: Collection[T] = ()) -> list[Any]:
    """Return parameters of a test: all `values`, those outside of `always` marked `matrix`.

    A tuple is several parameters of one combination.
    """
    values = list(values)
    assert set(always) <= set(values), "a value that runs always is none of the values"
    numbers = itertools.count()
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in always else pytest.mark.matrix(next(numbers)),
        )
        for value in values
    ]


def share_of(name: str) -> int:
    """Return which share a run of this name has."""
    return zlib.crc32(name.encode()) % SHARES


def outside_of_share(items: Sequence[pytest.Item], share: int) -> list[pytest.Item]:
    """Return the combinations that the run leaves to others.

    All tests of a value are in one share, so what it needs is compiled in few runs.
    """
    return [item for item in items if _share_of_item(item) not in (None, share)]


def _share_of_item(item: pytest.Item) -> int | None:
    marks = list(item.iter_markers("matrix"))
    if not marks:
        return None
    test = item.nodeid.partition("[")[0]  # tests of few combinations begin with any share
    return (zlib.crc32(test.encode()) + sum(sum(mark.args) for mark in marks)) % SHARES
