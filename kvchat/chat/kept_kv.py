"""KeptKv: what the chat asks of the KV store on disk, besides KV; `cache/disk/admin.py` has it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from kvchat.chat.store import SessionStore
from kvchat.core.errors import KvchatError
from kvchat.core.events import ModelReady
from kvchat.core.stats import Cost, KvPlaces, ModelDirStatus, StoredPack, StoreStatus, Verified
from kvchat.core.types import MissReason


class KeptKv(Protocol):
    """Maintenance of the KV store on disk. Thread-safe; its methods raise StoreError."""

    @property
    def directory(self) -> Path:
        """The store's directory."""

    def status(self) -> StoreStatus:
        """Return what the store holds."""

    def num_bytes(self) -> int:
        """Return the store's size in bytes: the same figure as in `status`, but faster."""

    def locate(self, contexts: Sequence[tuple[str, Sequence[int]]]) -> list[KvPlaces]:
        """Return where the KV of contexts is, each given by its model's name and its token ids.

        It needs no model; it reads keys only, and raises nothing.
        """

    def why_changed(
        self, ready: ModelReady, token_ids: Sequence[int], num_cached: int
    ) -> MissReason | None:
        """Return what changed since a run that kept more than `num_cached` tokens of a context.

        `ready` is the loaded model; the run was of the same model, with other settings. None if
        there was no such run. It reads keys only, and raises nothing.
        """

    def cleared_s(self) -> float:
        """Return when the store was cleared last, in seconds since the epoch; 0 if never."""

    def tree(
        self, named: Sequence[tuple[str, Sequence[int]]] = ()
    ) -> list[tuple[ModelDirStatus, list[StoredPack]]]:
        """Return every pack, by model directory; `named` are contexts by the names they have."""

    def verify(self, goes_on: Callable[[], bool]) -> Verified:
        """Read every pack while `goes_on()` is true; remove damaged packs."""

    def gc(self) -> int:
        """Remove what is out of date or over the limit; return the bytes freed."""

    def clear(self) -> int:
        """Delete everything; return the bytes freed."""

    def unpin(self, label: str) -> int:
        """Remove the pins with this label; return their number."""

    def forget(
        self,
        contexts: Iterable[Sequence[int]],
        shared: Iterable[Sequence[int]],
        labels: Collection[str] = (),
    ) -> int:
        """Remove the KV of contexts, and pins by labels; keep what `shared` contexts use.

        Contexts are token ids. Returns the number of blocks removed.
        """


def saved_contexts(
    store: SessionStore, session_ids: Iterable[str]
) -> dict[str, tuple[str, list[int]]]:
    """Return the model and the context of each conversation that is not empty and can be read."""
    contexts: dict[str, tuple[str, list[int]]] = {}
    for session_id in session_ids:
        try:
            read = store.read(session_id)
        except KvchatError:  # lists of conversations show that it cannot be read
            continue
        if ids := read.conversation.context_ids():
            contexts[session_id] = read.model, ids
    return contexts


def kept_costs(store: SessionStore, kept: KeptKv, session_ids: Iterable[str]) -> dict[str, Cost]:
    """Return the cost of each conversation's next message with the model that it began with.

    Conversations that are empty or cannot be read have none. Needs no loaded model.
    """
    contexts = saved_contexts(store, session_ids)
    places = kept.locate(list(contexts.values()))
    return {name: each.cost() for name, each in zip(contexts, places, strict=True)}
