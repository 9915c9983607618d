"""Memory: small facts that kvchat finds out once and may lose, such as measured rates.

A fact is whatever JSON can hold, except null, which stands for no fact. It has a kind, such as
"rates", and a key in its kind. Every reader checks what it gets: the file is the user's, and an
earlier version may have written it.
"""

from collections.abc import Callable
from typing import Protocol

Fact = object


class Memory(Protocol):
    """Facts by kind and key. Any thread may use it, and several processes may share it.

    Its methods raise nothing: a fact that cannot be read is None, one that cannot be stored is
    lost.
    """

    @property
    def outlasts_process(self) -> bool:
        """Whether facts are meant to be there for the next process."""

    def get(self, kind: str, key: str) -> Fact:
        """Return a fact, None if there is none."""

    def set(self, kind: str, key: str, fact: Fact) -> None:
        """Store a fact in place of an earlier one."""

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        """Store what `change` makes of a fact; no other process writes that fact meanwhile."""


class NoMemory:
    """Remembers nothing: for incognito chats, and where nothing may be written."""

    outlasts_process = False

    def get(self, kind: str, key: str) -> Fact:
        return None

    def set(self, kind: str, key: str, fact: Fact) -> None:
        """Does nothing."""

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        """Does nothing."""


NO_MEMORY = NoMemory()
