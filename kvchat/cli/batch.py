"""Batch: the JSON requests of `--input-format jsonl`, answered as one continuous batch.

Requests are read on a separate thread, because the sender may wait for an answer before it sends
the next request. Calls of tools run on another, one after another: the answers that need no tool
go on meanwhile.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvchat.chat.events import AnswerEnded
from kvchat.chat.json_requests import BadRequest, JsonRequest
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.chat.turn_loop import TurnLoop
from kvchat.cli.answer_time import AnswerTime
from kvchat.cli.output import Exchange
from kvchat.cli.script_output import ScriptOutput, ScriptSetup
from kvchat.cli.script_tools import ScriptTools
from kvchat.cli.streams import Interruption
from kvchat.core.errors import ExitCode, KvchatError, TimedOut

_log = logging.getLogger(__name__)

# Requests in flight at once: enough to fill a batch, below the limit of open files.
_MAX_IN_FLIGHT = 128


@dataclass(slots=True)
class _Running:
    """A request in flight. Its number is what the inbox names it by."""

    number: int
    session: ChatSession
    reply: Reply
    exchange: Exchange
    turn: TurnLoop
    answer_time: AnswerTime
    ended: list[AnswerEnded] = field(default_factory=list)
    timer: threading.Timer | None = None
    is_limited: bool = False  # whether the reply has its timer, or needs none


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of a request's calls."""

    number: int
    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class _Notice:
    """A line of the thread that runs calls: the main thread alone writes."""

    text: str


# A request, the number of one that has events, what the calls' thread says, or the input's end.
_Arrival = JsonRequest | BadRequest | int | _Results | _Notice | None
_Calls = tuple[_Running, tuple[ToolCall, ...]]


class Batch:
    """Answers independent requests, and writes the results as they are ready."""

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._output = ScriptOutput(setup, interruption)
        self._inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._places = threading.Semaphore(_MAX_IN_FLIGHT)
        self._running: dict[int, _Running] = {}
        self._num_begun = 0
        self._calls: queue.SimpleQueue[_Calls] | None = None  # once there are some
        self._tools: ScriptTools | None = None
        if setup.toolbox is not None:
            self._tools = ScriptTools(setup.toolbox, lambda text: self._inbox.put(_Notice(text)))

    def answer(self, requests: Iterator[JsonRequest | BadRequest]) -> ExitCode:
        """Answer all requests; return the exit code."""
        self._interruption.watch(self._cancel_all)
        threading.Thread(
            target=_queue_requests, args=(requests, self._inbox, self._places), daemon=True
        ).start()
        is_open = True
        while (is_open and not self._output.is_over) or self._running:
            try:
                arrival = self._next_arrival()
            except TimedOut as error:
                self._give_up(error)
                return self._output.exit_code
            self._begin_timers()
            if arrival is None:
                is_open = False
            else:
                self._take(arrival)
        self._output.tell_trouble()
        self._output.note_interruption()
        return self._output.exit_code

    def _next_arrival(self) -> _Arrival:
        """Return what comes next, None at the end of the input or after a signal.

        Raises TimedOut if the model takes too long to load.
        """
        while True:
            wait_s = 0.5
            if self._setup.timeout_s is not None:
                left_s = self._controller.host.loading_left_s(self._setup.timeout_s)
                wait_s = min(wait_s, left_s)
            try:
                return self._inbox.get(timeout=wait_s)
            except queue.Empty:
                if self._interruption.code is not None:
                    return None

    def _take(self, arrival: JsonRequest | BadRequest | int | _Results | _Notice) -> None:
        if isinstance(arrival, int):
            self._take_events(arrival)
        elif isinstance(arrival, _Notice):
            self._setup.notices.tell(arrival.text)
        elif isinstance(arrival, _Results):
            self._take_results(arrival)
        elif isinstance(arrival, BadRequest):
            self._output.report(arrival.error, arrival.label)
            self._places.release()
        elif not self._output.is_over:
            self._begin(arrival)

    def _give_up(self, error: TimedOut) -> None:
        labels = [each.exchange.label for each in self._running.values()]
        self._output.report(error, *(labels or [{}]))

    def _begin(self, request: JsonRequest) -> None:
        session = None
        number = self._num_begun = self._num_begun + 1
        try:
            options = request.options(self._controller.options)
            system = request.system if request.has_system else self._controller.system
            # Independent requests are not a conversation, so no session file is made.
            session = self._controller.host.unsaved_session(system, tools=self._controller.tools)
            request.recall_history(session)
            reply = session.ask(request.prompt, options, self._notify(number))
        except KvchatError as error:
            self._output.report(error, request.label)
            self._places.release()
            if session is not None:
                session.close()
            return
        conversation = session

        def give_results(
            results: tuple[ToolResult, ...], notify: Callable[[], None] | None
        ) -> Reply:
            return conversation.ask("", options, notify, results)

        self._running[number] = _Running(
            number,
            session,
            reply,
            Exchange(None, request.label, options.num_samples),
            TurnLoop(give_results),
            AnswerTime(self._setup.timeout_s),
        )
        self._begin_timers()

    def _notify(self, number: int) -> Callable[[], None]:
        return lambda: self._inbox.put(number)

    def _begin_timers(self) -> None:
        """Start the timer of every reply without one, after the model is loaded."""
        if self._controller.host.ready is None:
            return
        for current in self._running.values():
            if not current.is_limited:
                current.is_limited = True
                current.answer_time.begin()
                current.timer = current.answer_time.limit(current.reply, self._interruption)

    def _take_events(self, number: int) -> None:
        current = self._running.get(number)
        if current is None:
            return  # this notification came after the last event was taken
        was_finished = current.reply.is_finished
        for event in current.reply.poll():
            if isinstance(event, AnswerEnded):
                current.ended.append(event)
            self._output.take(current.exchange, event, current.reply)
        if not self._output.is_heard:
            self._cancel_all()
        if current.reply.is_finished and not was_finished:
            self._end_reply(current)

    def _end_reply(self, current: _Running) -> None:
        """Have the calls of a reply run; without any the request is answered."""
        if current.timer is not None:
            current.timer.cancel()
            self._interruption.allow_stalled_writes()
        calls = current.turn.calls(current.ended)
        if not calls or self._tools is None or self._output.is_over:
            self._end(current)
            return
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(
                target=_run_calls, args=(self._tools, self._calls, self._inbox), daemon=True
            ).start()
        self._calls.put((current, calls))

    def _take_results(self, arrival: _Results) -> None:
        """Let the model answer the results of a request's calls."""
        current = self._running[arrival.number]
        if self._output.is_over:
            self._end(current)
            return
        try:
            current.reply = current.turn.answer(arrival.results, self._notify(arrival.number))
        except KvchatError as error:
            self._output.report(error, current.exchange.label)
            self._end(current)
            return
        current.exchange = Exchange(None, current.exchange.label)
        current.ended, current.is_limited = [], False
        self._begin_timers()

    def _end(self, current: _Running) -> None:
        current.session.close()
        del self._running[current.number]
        self._places.release()

    def _cancel_all(self) -> None:
        for current in list(self._running.values()):
            current.reply.cancel()
        if self._tools is not None:
            self._tools.stop()


def _run_calls(
    tools: ScriptTools,
    calls: "queue.SimpleQueue[_Calls]",
    inbox: "queue.SimpleQueue[_Arrival]",
) -> None:
    """Run the calls of one request after another, until the process ends."""
    while True:
        current, called = calls.get()
        inbox.put(_Results(current.number, tools.results(called, current.answer_time)))


def _queue_requests(
    requests: Iterator[JsonRequest | BadRequest],
    inbox: "queue.SimpleQueue[_Arrival]",
    places: threading.Semaphore,
) -> None:
    """Put requests into the inbox as places become free; None at the end or after an error."""
    try:
        for request in requests:
            places.acquire()
            inbox.put(request)
    except KvchatError as error:
        places.acquire()
        inbox.put(BadRequest(error))
    except Exception as error:
        _log.error("the input cannot be read", exc_info=error)
        places.acquire()
        inbox.put(BadRequest(KvchatError(f"The input cannot be read any further: {error}.")))
    finally:
        inbox.put(None)
