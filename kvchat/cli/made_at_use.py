"""made_at_use: stands for an object that most commands never use, and that takes long to import."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


def made_at_use(make: Callable[[], T]) -> T:
    """Return what has all members of the object that `make` returns; its first use makes it."""
    return cast(T, _Later(make))


class _Later:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
        return getattr(self._made[0], name)
