"""Shared stores for tests: a dict that can lie, fail and wait, and real ones."""

from collections.abc import Callable, Mapping, Sequence

from kvchat.cache.shared.store import SharedStore, StoreTrouble


class DictStore(SharedStore):
    """Keeps records in a dict; `trouble` is raised by every call, `before` runs before each."""

    def __init__(self) -> None:
        self.heads_kept: dict[str, bytes] = {}
        self.payloads: dict[str, bytes] = {}
        self.trouble = ""
        self.before: Callable[[], None] = lambda: None
        self.num_calls = 0

    def _begin(self) -> None:
        self.num_calls += 1
        self.before()
        if self.trouble:
            raise StoreTrouble(self.trouble)

    def ping(self) -> None:
        self._begin()

    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        self._begin()
        return {name: self.heads_kept[name] for name in names if name in self.heads_kept}

    def payload(self, group: str, name: str, most_bytes: int) -> bytes | None:
        self._begin()
        found = self.payloads.get(name)
        return found if found is not None and len(found) <= most_bytes else None

    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        self._begin()
        self.payloads[name], self.heads_kept[name] = bytes(payload), head

    def remove(self, group: str, names: Sequence[str]) -> None:
        self._begin()
        for name in names:
            self.heads_kept.pop(name, None)
            self.payloads.pop(name, None)
