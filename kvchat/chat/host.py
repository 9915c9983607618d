"""ChatHost: one model being talked to, its engine, and the place its conversations are kept.

What the floors above hold instead of an engine. Knows how sessions begin; knows no screen and no
command line.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Conversation
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.events import LoadEvent, LoadFailed, ModelReady
from kvchat.core.stats import EngineStatus
from kvchat.engine.thread import Build, EngineThread


class ChatHost:
    """Starts loading the model at once, on the engine's thread; sessions may begin right away.

    `on_load` hears of the loading on that thread. `store` None saves nothing. Owns the engine
    until `close`.
    """

    def __init__(
        self,
        model: ChatModel,
        build: Build,
        store: SessionStore | None,
        on_load: Callable[[LoadEvent], None] | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self._on_load = on_load
        self._loaded = threading.Event()
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

    def wait_until_loaded(self) -> None:
        """Wait until the model is loaded or has failed to."""
        self._loaded.wait()

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

    def open_session(self, session_id: str) -> ChatSession:
        """Go on with a saved conversation; raises StoreError while another process has it."""
        assert self.store is not None, "there is nothing saved to open"
        session = ChatSession.open(self.model, self._engine, self.store, session_id)
        # What was said is likely to be gone on with: its KV comes up while the user still types.
        context = session.conversation.context_ids()
        self._engine.call(lambda engine: engine.prefetch(context))
        return session

    def fork_session(self, original: Conversation) -> ChatSession:
        """Begin a conversation with everything another has."""
        return ChatSession.fork_of(self.model, self._engine, self.store, original)

    def status(self) -> "Future[EngineStatus]":
        """Ask the engine about itself; answered between two steps, once the model is loaded."""
        return self._engine.call(lambda engine: engine.status())

    def cached_tokens(self, token_ids: list[int]) -> "Future[int]":
        """Ask how many leading tokens of a context would not have to be read again."""
        return self._engine.call(lambda engine: engine.cache.measure(token_ids))

    def close(self) -> None:
        """Stop the engine after its current step. Idempotent."""
        self._engine.close()
