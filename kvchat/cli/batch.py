"""Batch: the JSON requests of `--input-format jsonl`, answered as one continuous batch.

Requests are read on a separate thread, because the sender may wait for an answer before it sends
the next request. Calls of tools run on another, one after another: the answers that need no tool
go on meanwhile.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO

from kvchat.chat.answer_memory import AnswerMemory
from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.events import AnswerEnded
from kvchat.chat.json_requests import BadRequest, JsonRequest, label_of, parse_request
from kvchat.chat.prefixes import Asked, ResentChats
from kvchat.chat.reply import Reply
from kvchat.chat.turn_loop import Results, TurnLoop
from kvchat.cli.output import Exchange
from kvchat.cli.script import AnswerTime, ScriptOutput, ScriptSetup, ScriptTools
from kvchat.cli.script_input import bounded_lines, too_long
from kvchat.cli.streams import Interruption
from kvchat.core.errors import ExitCode, KvchatError, TimedOut, UsageError
from kvchat.core.text import read_json_text
from kvchat.terminal.status import plural

_log = logging.getLogger(__name__)

# Requests in flight at once: enough to fill a batch, below the limit of open files.
_MAX_IN_FLIGHT = 128


def read_requests(stdin: BinaryIO) -> Iterator[JsonRequest | BadRequest]:
    """Yield the requests of standard input, and a BadRequest for each invalid line."""
    for number, line in enumerate(bounded_lines(stdin), start=1):
        if line is None:
            problem = too_long(f"Line {number} of the input")
            yield BadRequest(problem, label_of(None, number))
        elif line.strip():
            yield _request(line, number)


def _request(line: bytes, number: int) -> JsonRequest | BadRequest:
    content = None
    try:
        content = read_json_text(line)
        return parse_request(content, number)
    except (ValueError, RecursionError):
        problem = UsageError(f"Line {number} of the input is not JSON.")
        return BadRequest(problem, label_of(content, number))
    except KvchatError as error:
        return BadRequest(error, label_of(content, number))


@dataclass(slots=True, eq=False)
class _Running:
    """A request in flight; `turn` is None if its sender runs the calls."""

    asked: Asked
    reply: Reply
    exchange: Exchange
    turn: TurnLoop | None
    answer_time: AnswerTime
    ended: list[AnswerEnded] = field(default_factory=list)
    timer: threading.Timer | None = None
    is_limited: bool = False  # whether the reply has its timer, or needs none


# A request, what other threads have the main thread do, or None at the input's end.
_Arrival = JsonRequest | BadRequest | Callable[[], None] | None


class Batch:
    """Answers independent requests, and writes the results as they are ready.

    Only the main thread writes, and changes what is in flight.
    """

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._output = ScriptOutput(setup, interruption)
        self._inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._places = threading.Semaphore(_MAX_IN_FLIGHT)
        # Their answers are known until the end: a request may go on with the answer to another.
        self._chats = ResentChats(setup.controller.host, AnswerMemory(None))
        self._running: list[_Running] = []
        self._tools: ScriptTools | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if setup.toolbox is not None:
            tell = setup.notices.tell
            self._tools = ScriptTools(
                setup.toolbox, lambda text: self._inbox.put(partial(tell, text))
            )
            threading.Thread(target=_run_all, args=(self._calls,), daemon=True).start()

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
                labels = [each.exchange.label for each in self._running]
                self._output.report(error, *(labels or [{}]))
                return self._output.exit_code
            self._begin_timers()
            if arrival is None:
                is_open = False
            elif isinstance(arrival, BadRequest):
                self._output.report(arrival.error, arrival.label)
                self._places.release()
            elif not isinstance(arrival, JsonRequest):
                arrival()
            elif not self._output.is_over:
                self._begin(arrival)
        self._chats.close()
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

    def _begin(self, request: JsonRequest) -> None:
        controller, chat = self._controller, request.chat
        if not request.has_system:
            chat = replace(chat, system=controller.system)
        has_own_tools = chat.tools is not None
        if not has_own_tools:
            chat = replace(chat, tools=controller.tools)

        def take() -> None:
            self._take_events(current)  # there is one by the time that the inbox is read again

        notify = partial(self._inbox.put, take)
        try:
            options = request.options(controller.options)
            if options.context_policy is ContextPolicy.DROP:  # the model tells how much has room
                controller.host.wait_until_loaded(self._setup.timeout_s)
            if has_own_tools:
                options = replace(options, max_calls=None)
            asked = self._chats.ask(chat, options, notify)
        except KvchatError as error:
            self._output.report(error, request.label)
            self._places.release()
            return

        def ask_with(results: Results, _: Callable[[], None] | None) -> Reply:
            return asked.session.ask("", options, notify, results)

        current = _Running(
            asked,
            asked.reply,
            Exchange(None, request.label, options.num_samples),
            None if has_own_tools else TurnLoop(ask_with),
            AnswerTime(self._setup.timeout_s),
        )
        self._running.append(current)
        if asked.num_left_out:
            count = plural(asked.num_left_out, "message")
            told = f"{current.exchange.where}left out the oldest {count}: the context is full"
            self._setup.notices.tell(told)
        self._begin_timers()

    def _begin_timers(self) -> None:
        """Start the timer of every reply without one, after the model is loaded."""
        if self._controller.host.ready is None:
            return
        for current in self._running:
            if not current.is_limited:
                current.is_limited = True
                current.answer_time.begin()
                current.timer = current.answer_time.limit(current.reply, self._interruption)

    def _take_events(self, current: _Running) -> None:
        if current.reply.is_finished:
            return  # this notification came after the last event was taken
        for event in current.reply.poll():
            if isinstance(event, AnswerEnded):
                current.ended.append(event)
                self._chats.remember(current.asked, event)
            self._output.take(current.exchange, event, current.reply)
        if not self._output.is_heard:
            self._cancel_all()
        if current.reply.is_finished:
            self._end_reply(current)

    def _end_reply(self, current: _Running) -> None:
        """Have the calls of a reply run; without any the request is answered."""
        if current.timer is not None:
            current.timer.cancel()
            self._interruption.allow_stalled_writes()
        tools, turn = self._tools, current.turn
        calls = turn.calls(current.ended) if turn is not None else ()
        if not calls or turn is None or tools is None or self._output.is_over:
            self._end(current)
            return

        def run() -> None:
            results = tools.results(calls, current.answer_time)
            self._inbox.put(lambda: self._take_results(current, turn, results))

        self._calls.put(run)

    def _take_results(self, current: _Running, turn: TurnLoop, results: Results) -> None:
        """Let the model answer the results of a request's calls."""
        if self._output.is_over:
            self._end(current)
            return
        try:
            current.reply = turn.answer(results)
        except KvchatError as error:
            self._output.report(error, current.exchange.label)
            self._end(current)
            return
        current.exchange = Exchange(None, current.exchange.label)
        current.ended, current.is_limited = [], False
        self._begin_timers()

    def _end(self, current: _Running) -> None:
        current.asked.session.close()
        self._running.remove(current)
        self._places.release()

    def _cancel_all(self) -> None:
        for current in list(self._running):
            current.reply.cancel()
        if self._tools is not None:
            self._tools.stop()


def _run_all(calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
    """Run calls one after another, until the process ends."""
    while True:
        calls.get()()


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
