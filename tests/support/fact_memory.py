"""A memory of facts without a disk: what one process stores another of the same test reads."""

import json
from collections.abc import Callable

from kvchat.core.types import Fact, Memory


class FactMemory(Memory):
    """Keeps facts as JSON text in `texts`, by kind and key, as a disk would."""

    def __init__(self) -> None:
        self.texts: dict[tuple[str, str], str] = {}

    def get(self, kind: str, key: str) -> Fact:
        text = self.texts.get((kind, key))
        return json.loads(text) if text is not None else None

    def set(self, kind: str, key: str, fact: Fact) -> None:
        self.texts[kind, key] = json.dumps(fact)

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        self.set(kind, key, change(self.get(kind, key)))

    def facts(self, kind: str) -> list[Fact]:
        """Return all facts of a kind."""
        return [json.loads(text) for (own, _), text in self.texts.items() if own == kind]
