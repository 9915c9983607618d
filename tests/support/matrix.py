"""Combinations of which each commit's tests run a share, and `make test-all` runs all.

A test of many combinations names those that differ in the code they run. These run always. The
others are marked `matrix`: a name, such as a commit's hash, decides which of them run with it. So
every combination has its turn within some commits, and a run of the same commit is the same run.
"""

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

SHARES = 8
T = TypeVar("T")


def spread(values: Iterable[T], always: Collection[T] = ()) -> list[Any]:
    """Return parameters of a test: all `values`, those outside of `always` marked `matrix`.

    A tuple is several parameters of one combination.
    """
    values = list(values)
    assert set(always) <= set(values), "a value that runs always is none of the values"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in always else pytest.mark.matrix,
        )
        for value in values
    ]


def share_of(name: str) -> int:
    """Return which share a run of this name has."""
    return zlib.crc32(name.encode()) % SHARES


def outside_of_share(items: Sequence[pytest.Item], share: int) -> list[pytest.Item]:
    """Return the combinations that the run leaves to others; neighbours are in different shares."""
    counts: dict[str, int] = {}
    left_out = []
    for item in items:
        if item.get_closest_marker("matrix") is None:
            continue
        test = item.nodeid.partition("[")[0]
        number = counts.get(test, zlib.crc32(test.encode()))  # few combinations begin anywhere
        counts[test] = number + 1
        if number % SHARES != share:
            left_out.append(item)
    return left_out
