"""ChatHost: one model being talked to, its engine, and the place its conversations are kept.

What the floors above hold instead of an engine. Knows how sessions begin; knows no screen and no
command line.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Conversation
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.errors import TimedOut
from kvchat.core.events import (
    LoadEvent,
    LoadFailed,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
)
from kvchat.core.stats import EngineStatus
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import Build, EngineThread

if TYPE_CHECKING:
    from kvchat.engine.engine import Engine


T = TypeVar("T")


class ChatHost:
    """Starts loading the model at once, on the engine's thread; sessions may begin right away.

    `on_load` hears of the loading on that thread, and `prefetch_pages`, which returns at once, of
    the context that will be wanted when it is done. `store` None saves nothing. Owns the engine
    until `close`.
    """

    def __init__(
        self,
        model: ChatModel,
        build: Build,
        store: SessionStore | None,
        on_load: Callable[[LoadEvent], None] | None = None,
        prefetch_pages: Callable[[list[int]], object] | None = None,
    ) -> None:
        self.model = model
        self._prefetch_pages = prefetch_pages
        self.store = store
        self._on_load = on_load
        self._loaded = threading.Event()
        self._began_s = time.monotonic()
        self._outcome: LoadEvent | None = None
        self._engine = EngineThread(build, self._hear)

    def _hear(self, event: LoadEvent) -> None:
        if isinstance(event, ModelReady | LoadFailed):
            self._outcome = event
            self._loaded.set()
        if self._on_load is not None:
            self._on_load(event)

    @property
    def ready(self) -> ModelReady | None:
        """The loaded model's facts, None while it loads or where it failed."""
        return self._outcome if isinstance(self._outcome, ModelReady) else None

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until the model is loaded or has failed to; raises TimedOut as `check_loading`."""
        if timeout_s is None:
            self._loaded.wait()
            return
        left_s = max(0.0, self._began_s + timeout_s - time.monotonic())
        self._loaded.wait(min(left_s, threading.TIMEOUT_MAX))
        self.check_loading(timeout_s)

    def check_loading(self, timeout_s: float) -> None:
        """Raise TimedOut where the model is still loading, `timeout_s` after it began to."""
        if not self._loaded.is_set() and time.monotonic() - self._began_s >= timeout_s:
            raise TimedOut(f"The model was not loaded within {timeout_s:g} s.")

    def wait_until_ready(self) -> ModelReady:
        """Wait for the model; raises the error that kept it from loading."""
        self._loaded.wait()
        if isinstance(self._outcome, LoadFailed):
            raise self._outcome.error
        assert isinstance(self._outcome, ModelReady)
        return self._outcome

    def new_session(self, system: str | None = None, title: str = "") -> ChatSession:
        """Begin a conversation."""
        return ChatSession.new(self.model, self._engine, self.store, system, title)

    def unsaved_session(self, system: str | None = None) -> ChatSession:
        """Begin a conversation that is not to be gone on with: no file is made for it."""
        return ChatSession.new(self.model, self._engine, None, system)

    def open_session(self, session_id: str) -> ChatSession:
        """Go on with a saved conversation; raises StoreError while another process has it."""
        assert self.store is not None, "there is nothing saved to open"
        session = ChatSession.open(self.model, self._engine, self.store, session_id)
        # What was said is likely to be gone on with: its KV comes up while the user still types.
        context = session.conversation.context_ids()
        if self._prefetch_pages is not None and self.ready is None:
            self._prefetch_pages(context)
        self._engine.call(lambda engine: engine.prefetch(context))
        # What was said in other branches is likely to be said again.
        leaves = session.conversation.leaves()
        branches = [session.conversation.context_ids(leaf.turn_id) for leaf in leaves]
        self._engine.call(lambda engine: engine.speculation.learn(branches))
        return session

    def fork_session(self, original: Conversation) -> ChatSession:
        """Begin a conversation with everything another has."""
        return ChatSession.fork_of(self.model, self._engine, self.store, original)

    def status(self) -> "Future[EngineStatus]":
        """Ask the engine about itself; answered between two steps, once the model is loaded."""
        return self._engine.call(lambda engine: engine.status())

    def speculate(self, mode: str) -> "Future[None]":
        """Have other drafters guess ahead: off, auto, ngram or draft.

        The future raises UsageError where there is no such drafter.
        """

        def switch(engine: "Engine") -> None:
            engine.speculation.switch(type(engine.speculation.mode)(mode))

        return self._engine.call(switch)

    def cached_tokens(self, token_ids: list[int]) -> "Future[int]":
        """Ask how many leading tokens of a context would not have to be read again."""
        return self._engine.call(lambda engine: engine.cached_tokens(token_ids).total)

    def read(self, token_ids: list[int]) -> "Future[None]":
        """Have a context read, so that its KV is there; the future ends when it is."""
        done: Future[None] = Future()

        def listen(event: RequestEvent) -> None:
            if isinstance(event, RequestFailed):
                done.set_exception(event.error)
            elif isinstance(event, SampleFinished):
                done.set_result(None)

        self._engine.submit(RequestSpec(tuple(token_ids), max_tokens=1), listen)
        return done

    def pin(self, token_ids: list[int], label: str) -> "Future[int]":
        """Never forget a context's KV; the result is how many tokens of it are kept."""
        done: Future[int] = Future()
        self._ask(lambda engine: engine.pin(token_ids, label, done.set_result), done)
        return done

    def forget(self, contexts: list[tuple[list[int], int]]) -> "Future[None]":
        """Drop the KV of contexts behind so many tokens of each, here and not on disk.

        When the future ends nothing of theirs is still to be written.
        """
        done: Future[None] = Future()
        self._ask(lambda engine: engine.forget(contexts, lambda: done.set_result(None)), done)
        return done

    def _ask(self, function: "Callable[[Engine], None]", done: "Future[T]") -> None:
        """Call `function` on the engine's thread; what keeps it from its work is `done`'s error."""

        def note(asked: "Future[None]") -> None:
            if (error := asked.exception()) is not None and not done.done():
                done.set_exception(error)

        self._engine.call(function).add_done_callback(note)

    def close(self) -> None:
        """Stop the engine after its current step. Idempotent."""
        self._engine.close()


async def close_host(host: ChatHost) -> None:
    """Close a host; one that still loads is not waited for: it has nothing to save yet."""
    if host.ready is not None:
        await asyncio.to_thread(host.close)
    else:
        threading.Thread(target=host.close, daemon=True).start()
