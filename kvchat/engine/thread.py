"""EngineThread: the one thread that owns an engine; other threads use the engine only through it.

Requests go to the thread through a queue. Events go to the listener given with each request. This
module imports no torch: the engine is built on the thread, so that the prompt accepts input while
the model loads.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvchat.core.errors import DeviceLost, EngineEnded, GenerationError, KvchatError, ModelError
from kvchat.core.events import (
    EngineLost,
    LoadEvent,
    LoadFailed,
    LoadProgress,
    ModelReady,
    RequestEvent,
    RequestFailed,
    SampleFinished,
    TokensGenerated,
)
from kvchat.core.stats import EngineStatus, KvPlaces
from kvchat.core.types import FinishReason, KeptPositions, Pooling, Timing, Usage
from kvchat.engine.request import RequestSpec

if TYPE_CHECKING:
    from kvchat.engine.embedding import Embedding

T = TypeVar("T")
E = TypeVar("E")
Listener = Callable[[RequestEvent], None]
LoadListener = Callable[[LoadEvent], None]
_log = logging.getLogger(__name__)


class Speculator(Protocol):
    """The speculation of an engine, as an EngineThread uses it."""

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """Let the drafters learn contexts that no request has asked for."""

    def switch(self, mode: str) -> None:
        """Change the mode; raises UsageError if it cannot be had."""


class DrivenEngine(Protocol):
    """What an EngineThread and a chat ask of an engine.

    `engine/engine.py` computes the answers; `remote/engine.py` gets them from another program.
    """

    @property
    def speculation(self) -> Speculator: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    @property
    def idle_s(self) -> float | None:
        """After how many seconds without work `step` is called all the same; None for never."""

    def submit(self, spec: RequestSpec, submitted_s: float | None = None) -> int:
        """Begin a request and return its id; raises KvchatError if it cannot be answered."""

    def cancel(self, request_id: int, reason: FinishReason = ...) -> None:
        """End a request; its answers so far stand."""

    def step(self) -> list[RequestEvent]:
        """Do a short piece of the work, and return what came of it.

        Raises EngineEnded, once no request runs any more, if another engine has to be built. The
        requests that this has ended failed with that error. Raises DeviceLost if no engine of this
        process can go on.
        """

    def abandon_steps(
        self, is_unwanted: Callable[[frozenset[int]], bool], is_awaited: Callable[[], bool]
    ) -> None:
        """Set what a long step asks to end early.

        `is_unwanted` gets the ids of its requests; `is_awaited` says whether a new one waits.
        """

    def prepare(self) -> None:
        """Do now what the first decode step would wait for."""

    def close(self) -> None:
        """End the work, and keep what is to be kept."""

    def status(self) -> EngineStatus:
        """Return figures; raises GenerationError if there are none."""

    def locate(self, contexts: list[list[int]], done: Callable[[list[KvPlaces]], None]) -> None:
        """Find the KV of contexts; raises GenerationError where that cannot be known."""

    def prefetch(self, token_ids: Sequence[int]) -> None:
        """Begin to bring a context's KV to the device."""

    def read_ahead(self, token_ids: Sequence[int]) -> None:
        """Prefill a context while nothing else runs."""

    def end_read_ahead(self) -> None:
        """End the read-ahead."""

    def move_kv(
        self, sources: Sequence[int], targets: Sequence[int], num_own: int, name: str
    ) -> int:
        """Move KV to a shorter context; tell how many of its tokens have KV then, 0 for none."""

    def thin_beginnings(self, kept: Sequence[KeptPositions]) -> None:
        """Let contexts that begin so go on over the KV of these positions alone; raises UsageError
        where that cannot be.
        """

    def repeat_scores(self, token_ids: Sequence[int], part: Sequence[int]) -> list[float] | None:
        """Tell how much a text attends to each token of the context before it; None if that has no
        KV on the device. Raises UsageError where that cannot be known.
        """

    def embedding(self, token_ids: Sequence[int], pooling: Pooling) -> "Embedding":
        """Return the embedding of a text, to compute between steps. Raises UsageError where there
        is none.
        """

    def pin(
        self, token_ids: Sequence[int], label: str, done: Callable[[int], None], ttl_s: float = ...
    ) -> None:
        """Keep a context's KV on disk for a time; tell the number of tokens kept."""

    def share(self, token_ids: Sequence[int], done: Callable[[int], None]) -> None:
        """Let other machines have a context's KV; tell how many of its tokens they find."""

    def forget(self, contexts: list[tuple[list[int], int]], done: Callable[[], None]) -> None:
        """Drop the KV of contexts from memory."""


Build = Callable[[Callable[[LoadProgress], None]], tuple[DrivenEngine, ModelReady]]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identifies a submitted request, also before the engine gives it a request id."""

    number: int


@dataclass(frozen=True, slots=True)
class _Submit:
    ticket: Ticket
    spec: RequestSpec
    listener: Listener
    submitted_s: float
    is_second: bool = False


@dataclass(slots=True)
class _Running:
    """A request that the engine has. `is_answered` once it has a token, or a sample has ended."""

    submitted: _Submit
    samples_left: int
    is_answered: bool = False

    def may_begin_again(self, error: KvchatError) -> bool:
        """Whether another engine can answer it, as if nothing had happened: at most once."""
        is_new = not self.is_answered and not self.submitted.is_second
        return isinstance(error, EngineEnded) and is_new


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: Ticket
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Call:
    function: "Callable[[DrivenEngine], object]"
    future: "Future[object]"
    is_awaited: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class _Look:
    """There is something in `_queries`."""


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Cancel | _Call | _Look | _Close


class EngineThread:
    """Builds an engine on a new thread and runs it until closed.

    `rebuild` builds another engine if an engine raises EngineEnded; None if none can be built.
    Requests without any answer begin again there, others fail with that error.

    `clock` returns seconds, for `silent_s`. Listeners are called on that thread and must return at
    once; a request that is cancelled before an engine has begun it ends on the caller's thread.
    All public methods may be called from any thread.
    """

    def __init__(
        self,
        build: Build,
        on_load: LoadListener,
        rebuild: Build | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._clock = clock
        self._heard_s: float | None = None  # the last sign of life, None while there is no work
        self._rebuild = rebuild
        self._on_load = on_load
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._numbers = iter(range(1, 1 << 62))
        self._lock = threading.Lock()
        self._num_submitted = 0  # requests, and calls that are awaited; under the lock
        self._num_taken = 0  # of those submitted
        self._num_called = 0  # under the lock
        self._num_answered = 0  # of those called
        self._is_over = False
        self._is_awaited = False
        self._running: dict[int, _Running] = {}
        self._untaken: dict[Ticket, _Submit] = {}  # under the lock: no engine has begun them
        self._to_begin_again: dict[Ticket, _Submit] = {}  # under the lock
        self._request_ids: dict[Ticket, int] = {}
        self._to_cancel: set[Ticket] = set()  # cancelled, but the engine does not know yet
        self._queries: deque[_Call] = deque()
        self._is_to_close = False
        self._thread = threading.Thread(target=self._run, name="kvchat-engine", daemon=True)
        self._thread.start()

    def submit(self, spec: RequestSpec, listener: Listener) -> Ticket:
        """Queue a request; its events go to `listener`, each with the engine's request id."""
        with self._lock:
            ticket = Ticket(next(self._numbers))
            self._num_submitted += 1
            # A request for one token has no decode step, so it needs no preparation.
            self._is_awaited |= spec.max_tokens is None or spec.max_tokens > 1
            message = _Submit(ticket, spec, listener, time.perf_counter())
            self._untaken[ticket] = message
        self._send(message)
        return ticket

    def cancel(self, ticket: Ticket, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request soon, within a step of prefill; nothing if it has ended already.

        One that waits for an engine, which may load for minutes, ends at once.
        """
        with self._lock:
            waiting = self._untaken.pop(ticket, None) or self._to_begin_again.pop(ticket, None)
            if waiting is None:
                self._to_cancel.add(ticket)
        if waiting is not None:
            _tell_cancelled(waiting, reason)
            return
        self._send(_Cancel(ticket, reason))

    def call(
        self,
        function: "Callable[[DrivenEngine], T]",
        is_awaited: bool = False,
        gives_way: bool = False,
    ) -> "Future[T]":
        """Run `function` on the engine's thread between steps; return a future of its result.

        A step that only reads ahead gives way to one that `is_awaited`, as it does to a request.
        One that `gives_way` waits for a step of the engine's work, if there is any: calls that
        make the next call themselves would leave no turn to it.
        """
        future: Future[T] = Future()
        with self._lock:
            self._num_called += 1
            self._num_submitted += is_awaited
        self._send(_Call(function, future, is_awaited, gives_way))  # type: ignore[arg-type]
        return future

    def query(self, function: "Callable[[DrivenEngine], T]") -> "Future[T]":
        """Do the same for a function that changes nothing: it need not wait for a long step to end.

        It runs between two products of such a step, where that also looks whether it is wanted, but
        after all calls before it: what it tells is what they have made.
        """
        future: Future[T] = Future()
        self._queries.append(_Call(function, future))  # type: ignore[arg-type]
        self._send(_Look())
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the current step. Unfinished requests get no further events. Idempotent.

        Later requests and calls fail with GenerationError.
        """
        self._is_to_close = True
        self._send(_Close())
        self._thread.join(timeout_s)

    @property
    def silent_s(self) -> float:
        """For how many seconds the engine has given no sign of life although it has work.

        0 while it has none, or still loads. The signs are the beginning of each step and of each
        call, and every question of a long step whether it is still wanted.
        """
        heard_s = self._heard_s
        return self._clock() - heard_s if heard_s is not None else 0.0

    def _send(self, message: _Message) -> None:
        with self._lock:
            if not self._is_over:
                self._messages.put(message)
                return
        self._refuse(message, GenerationError("The engine is closed."))

    # On the engine's thread

    def _run(self) -> None:
        build: Build | None = self._build
        try:
            while build is not None and self._load_and_serve(build):
                build = self._rebuild
        finally:
            with self._lock:
                self._is_over = True
            while not self._messages.empty():
                self._refuse(self._messages.get(), GenerationError("The engine is closed."))

    def _load_and_serve(self, build: Build) -> bool:
        """Build an engine, and run it until closed; return whether another one has to be built."""
        try:
            engine, ready = build(lambda event: _tell(self._on_load, event))
        except KvchatError as error:
            self._refuse_everything(error)
        except BaseException as error:  # a panic in a Rust library is not an Exception
            _log.exception("loading failed")
            self._refuse_everything(ModelError(f"Loading the model failed: {error!r}."))
        else:
            try:
                ready = self._prepared(engine, ready)
                _tell(self._on_load, ready)
                self._begin_again(engine)
                self._serve(engine, time.perf_counter())
            except EngineEnded as ended:
                if self._rebuild is not None and not self._is_to_close:
                    _tell(self._on_load, EngineLost(str(ended)))
                    _close(engine)
                    return True
                self._stopped(ended)
            except DeviceLost as lost:
                _log.exception("the device is lost")
                self._stopped(lost)
            except BaseException as error:
                _log.exception("the engine stopped")
                hint = "Start kvchat again."
                self._stopped(GenerationError(f"The engine stopped: {error!r}.", hint))
            _close(engine)
        return False

    def _prepared(self, engine: "DrivenEngine", ready: ModelReady) -> ModelReady:
        """Prepare the engine if a request is queued already; count the time as loading.

        Without a request, background threads lay the weights out while the user types. With one,
        that work beside the prompt's prefill would slow both, and the first decode step would wait
        for it anyway.
        """
        if not self._is_awaited and not self._to_begin_again:
            return ready
        began_s = time.perf_counter()
        _tell(self._on_load, LoadProgress("preparing to decode"))
        engine.prepare()
        return replace(ready, load_s=ready.load_s + time.perf_counter() - began_s)

    def _stopped(self, error: KvchatError) -> None:
        """Fail the running requests, and refuse all others."""
        for request_id, running in self._running.items():
            _tell(running.submitted.listener, RequestFailed(request_id, error))
        self._refuse_everything(error)

    def _begin_again(self, engine: "DrivenEngine") -> None:
        """Submit the requests that an engine before this one has left unanswered."""
        with self._lock:
            waiting = list(self._to_begin_again.values())
            self._to_begin_again.clear()
        for message in waiting:
            self._submit(engine, message, time.perf_counter())

    def _refuse_everything(self, error: KvchatError) -> None:
        """Report the load as failed, and answer every message with the error until closed."""
        with self._lock:
            waiting = [*self._to_begin_again.values(), *self._untaken.values()]
            self._to_begin_again.clear()
            self._untaken.clear()
        _tell(self._on_load, LoadFailed(error))
        for each in waiting:
            _tell(each.listener, RequestFailed(0, error))
        while not isinstance(message := self._messages.get(), _Close):
            self._refuse(message, error)

    def _refuse(self, message: _Message, error: KvchatError) -> None:
        """Answer a message with an error; a cancel or a close needs no answer."""
        if isinstance(message, _Submit):
            if self._take(message):
                _tell(message.listener, RequestFailed(0, error))
        elif isinstance(message, _Call):
            _fail(message, error)
        elif isinstance(message, _Look):
            while self._queries:
                _fail(self._queries.popleft(), error)

    def _serve(self, engine: "DrivenEngine", ready_s: float) -> None:
        engine.abandon_steps(
            lambda request_ids: self._is_unwanted(engine, request_ids),
            lambda: self._num_submitted > self._num_taken,
        )
        try:
            while True:
                has_work = engine.has_work
                self._heard_s = self._clock() if has_work else None
                try:
                    message = self._messages.get(not has_work, engine.idle_s)
                except queue.Empty:
                    self._step(engine)
                    continue
                if isinstance(message, _Close):
                    return
                self._heard_s = self._clock()
                if isinstance(message, _Call) and message.gives_way and has_work:
                    self._messages.put(replace(message, gives_way=False))
                    self._step(engine)
                else:
                    self._handle(engine, message, ready_s)
        finally:
            self._heard_s = None

    def _is_unwanted(self, engine: "DrivenEngine", request_ids: frozenset[int]) -> bool:
        """Answer queries; return whether one of these requests is to be cancelled, or the thread is
        to end.

        A step that only reads ahead is given up for any cancel: the request that is to be cancelled
        waits for the end of this step.
        """
        self._heard_s = self._clock()
        if self._num_called == self._num_answered:
            self._answer_queries(engine)
        if self._is_to_close:
            return True
        told = tuple(self._to_cancel) if self._to_cancel else ()
        if told and self._running.keys().isdisjoint(request_ids):
            return True
        return any(self._request_ids.get(ticket) in request_ids for ticket in told)

    def _handle(self, engine: "DrivenEngine", message: _Message, ready_s: float) -> None:
        if isinstance(message, _Submit):
            self._num_taken += 1
            if self._take(message):
                self._submit(engine, message, ready_s)
        elif isinstance(message, _Cancel):
            self._to_cancel.discard(message.ticket)
            if message.ticket in self._request_ids:
                engine.cancel(self._request_ids[message.ticket], message.reason)
        elif isinstance(message, _Call):
            self._num_answered += 1
            self._num_taken += message.is_awaited
            _answer(message, engine)
        elif isinstance(message, _Look):
            self._answer_queries(engine)

    def _take(self, message: _Submit) -> bool:
        """Take a request from those that no engine has begun; false if it is cancelled already."""
        with self._lock:
            return self._untaken.pop(message.ticket, None) is not None

    def _answer_queries(self, engine: "DrivenEngine") -> None:
        while self._queries:
            _answer(self._queries.popleft(), engine)

    def _submit(self, engine: "DrivenEngine", message: _Submit, ready_s: float) -> None:
        try:
            request_id = engine.submit(message.spec, max(message.submitted_s, ready_s))
        except KvchatError as error:
            _tell(message.listener, RequestFailed(0, error))
            return
        except Exception as error:  # making a stop watcher runs the caller's code
            _log.exception("a request could not be begun")
            failure = GenerationError(f"The request could not be begun: {error!r}.")
            _tell(message.listener, RequestFailed(0, failure))
            return
        self._running[request_id] = _Running(message, message.spec.num_samples)
        self._request_ids[message.ticket] = request_id

    def _step(self, engine: "DrivenEngine") -> None:
        for event in engine.step():
            running = self._running.get(event.request_id)
            if running is None:
                continue
            if isinstance(event, RequestFailed) and running.may_begin_again(event.error):
                self._put_off(running.submitted)
            else:
                _tell(running.submitted.listener, event)
            self._count_finished(running, event)

    def _put_off(self, message: _Submit) -> None:
        """Keep a request for the next engine, unless it is cancelled already."""
        with self._lock:
            is_wanted = message.ticket not in self._to_cancel
            if is_wanted:
                self._to_begin_again[message.ticket] = replace(message, is_second=True)
        if not is_wanted:
            _tell_cancelled(message, FinishReason.CANCELLED)

    def _count_finished(self, running: _Running, event: RequestEvent) -> None:
        running.is_answered |= isinstance(event, TokensGenerated | SampleFinished)
        if isinstance(event, RequestFailed):
            running.samples_left = 0
        elif isinstance(event, SampleFinished):
            running.samples_left -= 1
        if running.samples_left == 0:
            del self._running[event.request_id]
            del self._request_ids[running.submitted.ticket]


def _close(engine: "DrivenEngine") -> None:
    try:
        engine.close()
    except Exception:
        _log.exception("closing the engine failed")


def _tell_cancelled(message: _Submit, reason: FinishReason) -> None:
    """End the samples of a request that no engine has begun."""
    usage = Usage(
        prompt_tokens=len(message.spec.prompt_ids), unread_tokens=len(message.spec.prompt_ids)
    )
    for sample in range(message.spec.num_samples):
        _tell(message.listener, SampleFinished(0, sample, reason, usage, Timing()))


def _answer(call: _Call, engine: "DrivenEngine") -> None:
    """Call the function, unless its caller has cancelled it; raises DeviceLost as that does."""
    if not call.future.set_running_or_notify_cancel():
        return
    try:
        call.future.set_result(call.function(engine))
    except Exception as error:
        call.future.set_exception(error)
        if isinstance(error, DeviceLost):
            raise


def _fail(call: _Call, error: KvchatError) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _tell(listener: Callable[[E], None], event: E) -> None:
    """Call a listener with an event; an error in the listener is only logged."""
    try:
        listener(event)
    except Exception:
        _log.exception("a listener failed")
