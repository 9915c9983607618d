"""Two lengths of one random test: seconds in `make test`, minutes in `make soak`."""

from typing import TypeVar

import pytest

T = TypeVar("T")


def short_and_long(short: T, long: T) -> pytest.MarkDecorator:
    """Return a parametrisation of a test's `size`; the long one is a soak test."""
    sizes = [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.soak)]
    return pytest.mark.parametrize("size", sizes)
