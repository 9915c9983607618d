"""Deletes conversations from every place that has something of them, however they are deleted.

The places, in this order: KV in memory, KV on the disk under every model's identity with its pins,
the lines that were typed, the session file with its unsent messages. An interruption leaves the
file, by which it can be done again. Nothing else has a conversation's text or ids: names and logs
hold none.

What stays: KV that another saved conversation or stored response has too, up to the last token that
both have, and KV under a pin of another name. A conversation's own KV goes with all that continues
it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat import session_file
from kvchat.chat.answer_memory import stored_contexts
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.store import SessionStore
from kvchat.chat.typed_lines import TypedLines
from kvchat.chat.why import common_len
from kvchat.core.errors import GenerationError, KvchatError, StoreError, StoreInUse
from kvchat.core.text import one_line

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin

Contexts = Sequence[Sequence[int]]
# Drops the KV of contexts from memory; each keeps its given number of leading tokens.
DropFromMemory = Callable[[list[tuple[list[int], int]]], None]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted: blocks of KV on disk, and the user's messages.

    `trouble` is a sentence on what may be left, "" if all of it is gone; `hint` says what to do
    about it, "" for what is usual.
    """

    num_blocks: int = 0
    texts: frozenset[str] = frozenset()
    trouble: str = ""
    hint: str = ""

    def require_all(self, done: str, hint: str) -> None:
        """Raise StoreError if something may be left; `done` says in a clause what is gone."""
        if self.trouble:
            sentence = f"{done}, but not all that may be kept of it. {self.trouble}"
            raise StoreError(sentence, self.hint or hint)


@dataclass(frozen=True, slots=True)
class SavedPlaces:
    """Where saved conversations leave something.

    store    the session files; None saves none
    kept     the KV on disk; None where none was ever kept
    typed    the lines that were typed; None where they are not saved
    answers  the file of a server's stored responses; None for none
    server   returns what has the server that runs here let go of KV; None while none runs. It may
             have computed a conversation that now runs in this process
    """

    store: SessionStore | None
    kept: "StoreAdmin | None" = None
    typed: TypedLines | None = None
    answers: Path | None = None
    server: Callable[[], DropFromMemory | None] = lambda: None

    def delete(self, session_ids: Collection[str], drop: DropFromMemory | None = None) -> Deleted:
        """Delete conversations that this process has not open, for good. Any thread may call it.

        `drop` has the engine that runs here let go of their KV. Raises SessionNotFound, StoreError
        for a conversation that another process has open, and StoreInUse while another process holds
        the KV: then the text stays, and the user can try again. Other troubles are permanent: they
        are returned, and the text goes.
        """
        with ExitStack() as files:
            if self.store is not None:
                for session_id in session_ids:
                    files.enter_context(self.store.removing(session_id))
            return self.delete_traces(session_ids, drop)

    def delete_traces(
        self,
        session_ids: Collection[str],
        drop: DropFromMemory | None = None,
        is_open: Conversation | None = None,
    ) -> Deleted:
        """Do the same, but leave the session files: this process has one open, or holds them."""
        gone = [each for name in session_ids if (each := self._read(name)) is not None]
        contexts = [ids for name in session_ids for ids in self._contexts(name)]
        if is_open is not None:
            gone.append(is_open)
            contexts += is_open.contexts()
        deleted = self.delete_kv(contexts, self.other_contexts(session_ids), drop, session_ids)
        texts = {turn.text for each in gone for turn in each.turns() if turn.role is Role.USER}
        texts.update(text for each in gone for text in each.waiting)
        trouble = self.delete_typed(texts, session_ids)
        return replace(deleted, texts=frozenset(texts), trouble=deleted.trouble or trouble)

    def delete_kv(
        self,
        contexts: Contexts,
        shared: Contexts,
        drop: DropFromMemory | None = None,
        labels: Collection[str] = (),
    ) -> Deleted:
        """Remove the KV of contexts, and pins by their labels; raises and returns as `delete`.

        What `shared` contexts have too stays.
        """
        trouble = ""
        drops = [each for each in (drop, self.server()) if each is not None and contexts]
        if drops:
            kept = [max((common_len(ids, each) for each in shared), default=0) for ids in contexts]
            for let_go in drops:
                try:
                    let_go([(list(ids), num) for ids, num in zip(contexts, kept, strict=True)])
                except GenerationError as error:  # a server that runs, and does not answer
                    trouble = one_line(error.message, 4096)
        if self.kept is None or not contexts:
            return Deleted(trouble=trouble)
        try:
            return Deleted(self.kept.forget(contexts, shared, labels), trouble=trouble)
        except StoreInUse:
            raise
        except StoreError as error:
            return Deleted(trouble=one_line(error.message, 4096), hint=error.hint)

    def delete_context(
        self, token_ids: list[int], shared: Contexts, drop: DropFromMemory | None = None
    ) -> Deleted:
        """Remove the KV of a context that no saved conversation, and no `shared` one, has too."""
        return self.delete_kv([token_ids], [*self.other_contexts(()), *shared], drop)

    def other_contexts(self, session_ids: Collection[str]) -> Contexts:
        """Return the contexts of all saved conversations but these, and of all stored responses."""
        ids = self.store.ids() if self.store is not None else []
        others = (session_id for session_id in ids if session_id not in session_ids)
        saved = [context for session_id in others for context in self._contexts(session_id)]
        return [*saved, *stored_contexts(self.answers)]

    def _read(self, session_id: str) -> Conversation | None:
        """Return a conversation as it is saved; None if its file is missing or damaged."""
        with suppress(KvchatError):
            return self.store.read(session_id).conversation if self.store is not None else None
        return None

    def _contexts(self, session_id: str) -> Contexts:
        """Return all contexts that a session file knows of."""
        return [joined(path) for path in self.recorded_paths(session_id)]

    def recorded_paths(self, session_id: str) -> list[session_file.RecordedPath]:
        """Return the paths of a session file with all their ids; none of a damaged file."""
        with suppress(KvchatError):
            if self.store is not None:
                return session_file.recorded_paths(self.store.read_bytes(session_id))
        return []

    def delete_typed(self, texts: Collection[str], session_ids: Collection[str] = ()) -> str:
        """Remove typed lines of messages, and of conversations; return a sentence on why that
        failed, "" if it did not.
        """
        try:
            if self.typed is not None:
                self.typed.remove(session_ids, texts)
        except StoreError as error:
            return one_line(error.message, 4096)
        return ""


def joined(path: session_file.RecordedPath) -> list[int]:
    """Return the context of a path."""
    return [token for _, ids in path for token in ids]
