"""ChatHost: one chat model, its engine thread and its session store.

Terminal and command line use a ChatHost and never the engine itself. EngineQueries asks it what the
next message costs, and for status and problems.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Conversation
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import KvchatError, TimedOut
from kvchat.core.events import (
    EngineLost,
    LoadEvent,
    LoadFailed,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
)
from kvchat.core.stats import Cost, EngineStatus, KvPlaces
from kvchat.core.text import one_line
from kvchat.core.types import Health, KeptPositions, Pooling, Tier
from kvchat.engine.request import RequestSpec
from kvchat.engine.thread import Build, DrivenEngine, EngineThread

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin
    from kvchat.engine.embedding import Embedding

T = TypeVar("T")

# A step takes tenths of a second, and a call less; a long step shows between its products that it
# goes on. A device that is lost, or a disk that does not answer, takes longer than this.
_STALLED_S = 60.0


class ChatHost:
    """Starts loading the model at once, on the engine's thread; sessions may begin before it ends.

    on_load          called on that thread with load events
    prefetch_pages   called with the token ids of a context that is opened while the model loads;
                     it must not block
    store            None saves nothing
    rebuild          builds another engine if one ends by itself, None where none can be built
    clock            returns seconds, to tell for how long the engine has given no sign of life
    began_s          since when the engine has computed KV, in seconds since the epoch; None is now
    settings         what a conversation with this model is saved with, so that it runs so again

    places_at_opening   where the KV was of the conversation opened last, None if none was opened

    Owns the engine until `close`.
    """

    def __init__(
        self,
        model: ChatModel,
        build: Build,
        store: SessionStore | None,
        on_load: Callable[[LoadEvent], None] | None = None,
        prefetch_pages: Callable[[list[int]], object] | None = None,
        rebuild: Build | None = None,
        clock: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.settings = dict(settings or {})
        self._prefetch_pages = prefetch_pages
        self.store = store
        self._on_load = on_load
        self._loaded = threading.Event()
        self.began_s = time.time() if began_s is None else began_s
        self._began_s = time.monotonic()
        self._outcome: LoadEvent | None = None
        self._engine = EngineThread(build, self._hear, rebuild, clock)
        self.places_at_opening: Future[list[KvPlaces]] | None = None
        self._has_thinned = False

    def _hear(self, event: LoadEvent) -> None:
        if isinstance(event, ModelReady | LoadFailed):
            self._outcome = event
            self._loaded.set()
        elif isinstance(event, EngineLost):
            self._outcome, self._began_s = None, time.monotonic()
            self.began_s = time.time()
            self.places_at_opening = None
            self._loaded.clear()
        if self._on_load is not None:
            self._on_load(event)

    @property
    def ready(self) -> ModelReady | None:
        """Properties of the loaded model; None while it loads or after loading failed."""
        return self._outcome if isinstance(self._outcome, ModelReady) else None

    @property
    def context_limit(self) -> int:
        """The most tokens of a context; what the model allows until it is loaded."""
        return self.ready.context_limit if self.ready is not None else self.model.max_context

    @property
    def failure(self) -> KvchatError | None:
        """Why the model could not be loaded; None while it loads or after it was loaded."""
        return self._outcome.error if isinstance(self._outcome, LoadFailed) else None

    @property
    def health(self) -> Health:
        """Whether the model answers; STALLED once a step takes longer than any step should."""
        if self.failure is not None:
            return Health.FAILED
        if self.ready is None:
            return Health.LOADING
        return Health.STALLED if self.silent_s > _STALLED_S else Health.OK

    @property
    def silent_s(self) -> float:
        """For how many seconds the engine has made no step although it has work; 0 without work."""
        return self._engine.silent_s

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until the model is loaded or loading has failed; raises TimedOut at the limit.

        `timeout_s` counts from the beginning of the load; None waits without a limit.
        """
        if timeout_s is None:
            self._loaded.wait()
            return
        left_s = max(0.0, self._began_s + timeout_s - time.monotonic())
        self._loaded.wait(min(left_s, threading.TIMEOUT_MAX))
        self.loading_left_s(timeout_s)

    def loading_left_s(self, timeout_s: float) -> float:
        """Return the seconds that loading may still take, infinity once it has ended.

        Raises TimedOut if the model is still loading `timeout_s` seconds after it began.
        """
        if self._loaded.is_set():
            return math.inf
        left_s = self._began_s + timeout_s - time.monotonic()
        if left_s <= 0:
            raise TimedOut(f"The model was not loaded within {timeout_s:g} s.")
        return left_s

    def wait_until_ready(self) -> ModelReady:
        """Wait for the model; if loading failed, raise its error."""
        self._loaded.wait()
        if isinstance(self._outcome, LoadFailed):
            raise self._outcome.error
        assert isinstance(self._outcome, ModelReady)
        return self._outcome

    def loaded(self) -> "Future[None]":
        """Return what is done once the model is loaded; it raises the error if that fails."""
        return self._engine.call(lambda engine: None)

    def new_session(
        self,
        system: str | None = None,
        title: str = "",
        is_one_shot: bool = False,
        tools: ToolSet | None = None,
    ) -> ChatSession:
        """Begin a conversation; `is_one_shot` if it will probably not be continued."""
        return ChatSession.new(
            self.model, self._engine, self.store, system, title, is_one_shot, tools=tools
        )

    def unsaved_session(
        self,
        system: str | None = None,
        created_s: float | None = None,
        tools: ToolSet | None = None,
    ) -> ChatSession:
        """Begin a conversation without a file; it cannot be continued later.

        `created_s` is the time that its template shows, in seconds since the epoch; None is now.
        """
        return ChatSession.new(
            self.model, self._engine, None, system, created_s=created_s, tools=tools
        )

    def open_session(self, session_id: str) -> ChatSession:
        """Open a saved conversation, and prefetch its KV.

        Raises SessionNotFound, or StoreError while another process has it open.
        """
        assert self.store is not None, "there is nothing saved to open"
        session = ChatSession.open(self.model, self._engine, self.store, session_id)
        context = session.conversation.context_ids()
        self.places_at_opening = self.locate([context])  # before the prefetch moves it
        # The user will probably continue: promote the context's KV while the user types.
        if self._prefetch_pages is not None and self.ready is None:
            self._prefetch_pages(context)
        self._engine.call(lambda engine: engine.prefetch(context))
        # Text of other branches is likely to occur again: the drafters learn it.
        leaves = session.conversation.leaves()
        branches = [session.conversation.context_ids(leaf.turn_id) for leaf in leaves]
        self._engine.call(lambda engine: engine.speculation.learn(branches))
        return session

    def prefetch(self, token_ids: list[int]) -> None:
        """Begin to bring a context's KV to the device; it replaces the prefetch before."""
        if self.ready is not None:
            self._engine.call(lambda engine: engine.prefetch(token_ids))

    def read_ahead(self, token_ids: list[int]) -> None:
        """Prefill a context while nothing else runs; it replaces the one before."""
        self._engine.call(lambda engine: engine.read_ahead(token_ids))

    def end_read_ahead(self) -> None:
        """End the read-ahead; what was read stays cached."""
        self._engine.call(lambda engine: engine.end_read_ahead())

    def fork_session(self, original: Conversation) -> ChatSession:
        """Begin a conversation as a copy of another one."""
        return ChatSession.fork_of(self.model, self._engine, self.store, original)

    def status(self) -> "Future[EngineStatus]":
        """Request the engine's status; it answers after loading, and within long steps too."""
        return self._engine.query(lambda engine: engine.status())

    def speculate(self, mode: str) -> "Future[None]":
        """Switch speculation: `mode` is off, auto, ngram, draft or mtp.

        The future raises UsageError if that drafter was not loaded.
        """
        return self._engine.call(lambda engine: engine.speculation.switch(mode))

    def locate(self, contexts: list[list[int]]) -> "Future[list[KvPlaces]]":
        """Request where the KV of contexts is, in memory and on disk; after loading."""
        done: Future[list[KvPlaces]] = Future()

        def settle(places: list[KvPlaces]) -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(places)

        self._ask(lambda engine: engine.locate(contexts, settle), done, self._engine.query)
        return done

    def read(self, token_ids: list[int]) -> "Future[None]":
        """Prefill a context, so that its KV is cached; the future is done when it is.

        Cancelling the future ends that; what was computed stays cached.
        """
        done: Future[None] = Future()

        def listen(event: RequestEvent) -> None:
            is_end = isinstance(event, RequestFailed | SampleFinished)
            if not is_end or not done.set_running_or_notify_cancel():
                return
            if isinstance(event, RequestFailed):
                done.set_exception(event.error)
            else:
                done.set_result(None)

        ticket = self._engine.submit(RequestSpec(tuple(token_ids), max_tokens=1), listen)
        done.add_done_callback(
            lambda done: self._engine.cancel(ticket) if done.cancelled() else None
        )
        return done

    def pin(self, token_ids: list[int], label: str, ttl_s: float = math.inf) -> "Future[int]":
        """Pin a context's KV on disk under a label for `ttl_s` seconds; the result is the number of
        tokens kept.
        """
        done: Future[int] = Future()
        self._ask(lambda engine: engine.pin(token_ids, label, done.set_result, ttl_s), done)
        return done

    def thin_beginnings(self, kept: Sequence[KeptPositions]) -> None:
        """Let contexts that begin so go on over the KV of these positions, where that is possible.

        It holds for the requests that follow, also while the model loads.
        """
        if kept or self._has_thinned:
            self._has_thinned = bool(kept)
            self._engine.call(lambda engine: engine.thin_beginnings(kept))

    def repeat_scores(
        self, token_ids: Sequence[int], part: Sequence[int]
    ) -> "Future[list[float] | None]":
        """Request how much a text attends to each token of the context before it.

        None if that has no KV on the device; the future raises UsageError where no model can tell.
        """
        return self._engine.call(lambda engine: engine.repeat_scores(token_ids, part))

    def embed(self, token_ids: Sequence[int], pooling: Pooling) -> "Future[list[float]]":
        """Request the embedding of a text, a vector of length 1: `engine/embedding.py`.

        The engine's other work goes on between its steps. The future raises UsageError for a model
        that has none, ContextTooLong, and GenerationError.
        """
        done: Future[list[float]] = Future()

        def advance(embedding: "Embedding") -> None:
            try:
                is_over = done.cancelled() or embedding.step()
            except BaseException:
                embedding.close()
                raise
            if not is_over:
                self._ask(lambda _: advance(embedding), done, give_way)
                return
            embedding.close()
            with suppress(InvalidStateError):  # the caller has given up
                done.set_result(embedding.vector)

        give_way = partial(self._engine.call, gives_way=True)
        self._ask(lambda engine: advance(engine.embedding(token_ids, pooling)), done, give_way)
        return done

    def share(self, token_ids: list[int]) -> "Future[int]":
        """Let other machines have a context's KV; the result is how many tokens they find."""
        done: Future[int] = Future()
        self._ask(lambda engine: engine.share(token_ids, done.set_result), done)
        return done

    def forget(self, contexts: list[tuple[list[int], int]]) -> "Future[None]":
        """Drop the KV of contexts from memory, but not from disk.

        Each pair is a context's token ids and the number of leading tokens to keep. When the future
        is done, no KV of these contexts is waiting to be written to disk.
        """
        done: Future[None] = Future()
        self._ask(lambda engine: engine.forget(contexts, lambda: done.set_result(None)), done)
        return done

    def _ask(
        self,
        function: "Callable[[DrivenEngine], None]",
        done: "Future[T]",
        call: "Callable[[Callable[[DrivenEngine], None]], Future[None]] | None" = None,
    ) -> None:
        """Call `function` on the engine's thread; if it fails, set its error on `done`."""

        def note(asked: "Future[None]") -> None:
            if (error := asked.exception()) is not None and not done.done():
                done.set_exception(error)

        (call or self._engine.call)(function).add_done_callback(note)

    def close(self) -> None:
        """Stop the engine after its current step. Idempotent.

        An engine that still loads is not waited for: it has nothing to save.
        """
        if self._loaded.is_set():
            self._engine.close()
        else:
            self._engine.close(timeout_s=0)


_PATIENCE_S = 2.0
# The engine of a model just loaded runs a few steps before it answers.
PATIENCE_AFTER_LOADING_S = 20.0
_DISK_CACHE_FAILED = "the disk cache failed"
_NOT_OF_THE_DISK = ("the shared cache", "prefill elsewhere")
_MAX_TROUBLE_CHARS = 4096


class EngineQueries:
    """Queries the engine of one host, or the store `kept` while the model loads; remembers the
    problems reported.

    The engine has `patience_s` to answer a query; after that the result is None (unknown).
    """

    def __init__(
        self, host: ChatHost, kept: "StoreAdmin | None" = None, patience_s: float = _PATIENCE_S
    ) -> None:
        self._host = host
        self._patience_s = patience_s
        self._kept = kept
        self._told: set[str] = set()

    def change_host(self, host: ChatHost) -> None:
        """Query another model's engine from now on."""
        self._host = host

    async def locate(self, contexts: list[list[int]]) -> list[KvPlaces] | None:
        """Return where the KV of contexts is; None while that cannot be known.

        The engine answers once the model is loaded. Before, only the disk is looked at, without
        blocking.
        """
        if self._host.ready is not None:
            return await self._answer_of(lambda: self._host.locate(contexts))
        if self._kept is None:
            return None
        name = self._host.model.name
        return await asyncio.to_thread(self._kept.locate, [(name, ids) for ids in contexts])

    async def cost(self, token_ids: list[int]) -> Cost | None:
        """Return what the next message of a context costs; None for an empty context, and while
        that cannot be known.
        """
        places = await self.locate([token_ids]) if token_ids else None
        return places[0].cost() if places else None

    async def cost_at_opening(self) -> Cost | None:
        """Return what the next message of the conversation opened last cost when it was opened;
        None if it is empty, or so long that no message fits.
        """
        asked, ready = self._host.places_at_opening, self._host.ready
        if asked is None:
            return None
        opened = asked
        places = await self._answer_of(lambda: opened)
        if not places or not places[0].num_tokens:
            return None
        is_over = ready is not None and places[0].num_tokens >= ready.context_limit
        return None if is_over else places[0].cost()

    async def status(self) -> EngineStatus | None:
        """Return the engine's status; None while it loads or does not answer in time."""
        return await self._answer_of(self._host.status)

    async def new_trouble(self) -> str:
        """Return a sentence on a new problem outside the answers, or ""; each problem only once."""
        status = await self.status()
        if status is None:
            return ""
        told = {}
        for trouble in (tier.trouble for tier in status.tiers if tier.trouble):
            told[trouble] = trouble_notice(trouble)
        for failed in status.speculation.failed if status.speculation is not None else ():
            told[failed] = (
                f"a source of drafts failed ({one_line(failed)}); answers come without it."
            )
        for trouble, notice in told.items():
            if trouble not in self._told:
                self._told.add(trouble)
                return notice
        return ""

    async def _answer_of(self, ask: "Callable[[], Future[T]]") -> T | None:
        if self._host.ready is None:
            return None
        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.wrap_future(ask())
        except (TimeoutError, KvchatError):
            return None


def trouble_notice(trouble: str) -> str:
    """Return the notice for the user about a problem of the chat's KV store."""
    told = one_line(trouble, _MAX_TROUBLE_CHARS).rstrip(".")
    if told.startswith(_DISK_CACHE_FAILED):
        return f"{told}; the chat goes on without it."
    where = "" if told.startswith(_NOT_OF_THE_DISK) else "the disk cache: "
    return f"{where}{told}; the chat goes on."


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One turn: the slowest tier that holds its KV, None if it has to be computed; and the cost of
    the next message after it.
    """

    tier: Tier | None
    cost: Cost


async def turn_costs(queries: EngineQueries, conversation: Conversation) -> dict[int, TurnCost]:
    """Return the costs of all turns by their ids; empty while they cannot be known.

    One lookup a branch: the turns on a path share its tokens.
    """
    leaves = [turn.turn_id for turn in conversation.leaves()]
    contexts = [conversation.context_ids(leaf) for leaf in leaves]
    places = await queries.locate(contexts) if contexts else None
    costs: dict[int, TurnCost] = {}
    for leaf, each in zip(leaves, places or (), strict=False):
        end = 0
        for turn in conversation.path(leaf):
            start, end = end, end + len(turn.token_ids)
            if turn.turn_id not in costs:
                costs[turn.turn_id] = TurnCost(each.tier_of(start, end), each.cost(end))
    return costs
