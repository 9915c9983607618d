"""The script modes: one prompt, one turn a line, or a batch of JSON requests.

Reads standard input, writes answers, and handles time limits, signals and exit codes.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from kvchat.chat.controller import ChatController
from kvchat.chat.events import AnswerEnded, AnswerFailed, ChatEvent, SavingFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.json_requests import BadRequest, JsonRequest, label_of, parse_request
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.cli.answer_time import AnswerTime
from kvchat.cli.output import Exchange, Notices, Writer, ending_notice, missing_answer
from kvchat.cli.streams import Interrupted, Interruption, Stalled, forget_stdout
from kvchat.core.errors import (
    ContextTooLong,
    ExitCode,
    GenerationError,
    KvchatError,
    StoreError,
    TimedOut,
    UnreadableFile,
    UsageError,
)
from kvchat.core.json_text import read_json_text
from kvchat.core.text import encoding_of, one_line, text_of
from kvchat.core.types import FinishReason
from kvchat.terminal.status import StatsLevel, detail_line, stats_line
from kvchat.terminal.theme import ASCII_GLYPHS, Glyphs
from kvchat.tools.rounds import Rounds
from kvchat.tools.toolbox import Toolbox, call_in_words, refused

if TYPE_CHECKING:
    from kvchat.terminal.commands import Invocation
    from kvchat.terminal.script_commands import ScriptCommands


# About four million tokens: more than any model's context holds.
_MAX_MESSAGE_BYTES = 16 << 20


def read_text(stdin: BinaryIO, notices: Notices) -> str:
    """Return all of standard input as one message, without line ends at its end.

    Raises ContextTooLong for more than any context holds.
    """
    try:
        data = stdin.read(_MAX_MESSAGE_BYTES + 1)
    except OSError as error:
        raise _unreadable(error) from error
    if len(data) > _MAX_MESSAGE_BYTES:
        raise _too_long("The input")
    return _decode(data, notices).rstrip("\r\n")


def read_lines(stdin: BinaryIO, notices: Notices) -> Iterator[tuple[int, str]]:
    """Yield the lines of standard input as they arrive, each after its number, without empty lines.

    Raises ContextTooLong for a line longer than any context holds.
    """
    for number, line in enumerate(_bounded_lines(stdin), start=1):
        if line is None:
            raise _too_long(f"Line {number} of the input")
        text = _decode(line, notices).rstrip("\r\n")
        if text.strip():
            yield number, text


def read_requests(stdin: BinaryIO, notices: Notices) -> Iterator[JsonRequest | BadRequest]:
    """Yield the requests of standard input, and a BadRequest for each invalid line."""
    for number, line in enumerate(_bounded_lines(stdin), start=1):
        if line is None:
            problem = _too_long(f"Line {number} of the input")
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


def _bounded_lines(stdin: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines; None for a line that is too long, which is not held in memory.

    What begins with the mark of an encoding whose lines end in other bytes is read whole.
    """
    is_first = True
    try:
        while line := stdin.readline(_MAX_MESSAGE_BYTES + 1):
            if is_first and encoding_of(line) not in ("utf-8", "utf-8-sig"):
                data = line + stdin.read(_MAX_MESSAGE_BYTES + 1 - len(line))
                is_whole = len(data) <= _MAX_MESSAGE_BYTES
                yield from (
                    text_of(data)[0].encode().splitlines(keepends=True) if is_whole else [None]
                )
                return
            is_first = False
            is_whole = len(line) <= _MAX_MESSAGE_BYTES
            while line and not is_whole and not line.endswith(b"\n"):
                line = stdin.readline(_MAX_MESSAGE_BYTES)
            yield line if is_whole else None
    except OSError as error:
        raise _unreadable(error) from error


def _too_long(what: str) -> ContextTooLong:
    size = _MAX_MESSAGE_BYTES >> 20
    return ContextTooLong(f"{what} has more than {size} MiB, which no context holds.", "Cut it.")


def _unreadable(error: OSError) -> UnreadableFile:
    return UnreadableFile(
        f"Standard input cannot be read: {error.strerror}.", "Give a prompt with -p."
    )


def _decode(data: bytes, notices: Notices) -> str:
    text, is_whole = text_of(data)
    if not is_whole:
        notices.tell("the input is not valid UTF-8; what could not be read became \ufffd.")
    return text


def with_prompt(piped: str, prompt: str | None) -> str:
    """Join piped input with the prompt given on the command line, which comes last."""
    return "\n\n".join(part for part in (piped, prompt or "") if part)


_log = logging.getLogger(__name__)

# Of a full context, in an input that takes commands.
_WAYS_OUT = "/compact makes room, /new begins another conversation."
# The first characters of `/help`, `?` and `:q`. Any other line is a message.
_COMMANDS_BEGIN = ("/", "?", ":")
# JSON requests in flight at once: enough to fill a batch, below the limit of open files.
_MAX_IN_FLIGHT = 128


@dataclass(frozen=True, slots=True)
class ScriptSetup:
    """The inputs of a script run.

    controller   the conversation, its model, and how answers are generated
    timeout_s    limits the loading of the model, and then each answer
    toolbox      the tools that are offered to the model; those not allowed are refused
    shows_stats  a line of figures follows every answer, drawn with `glyphs`
    """

    controller: ChatController
    writer: Writer
    notices: Notices
    timeout_s: float | None = None
    shows_stats: bool = False
    glyphs: Glyphs = ASCII_GLYPHS
    toolbox: Toolbox | None = None


class Script:
    """Runs exchanges one after another and keeps the exit code.

    The exit code is the first failure's. Any other error replaces a usage error, such as an unknown
    command, because the rest of the input was still processed.
    """

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._is_heard = True
        self._has_given_up = False
        self._has_told_notes = False
        self._shows_stats = setup.shows_stats
        self._has_told_load = False
        self._has_told_unsaved = False
        self._takes_commands = False
        self.exit_code = ExitCode.OK

    def answer(self, text: str) -> None:
        """Answer one message and write its events; errors are reported, not raised."""
        try:
            reply = self._controller.ask(text)
        except KvchatError as error:
            self.report(error, self._session_fields)
            return
        self._follow(reply, self._controller.options.num_samples)

    def answer_lines(
        self,
        commands: "ScriptCommands",
        lines: Iterable[tuple[int, str]],
        last: str | None = None,
    ) -> None:
        """Answer one turn a line, in one conversation; `last` is a message after the lines.

        A line stands after its number. Slash commands are run. A signal cuts off the current answer
        and ends the run.
        """
        self._takes_commands = True
        self._controller.options = replace(self._controller.options, num_samples=1)
        for number, text in lines:
            if text.lstrip()[:1] in _COMMANDS_BEGIN:
                self._carry_out_line(commands, number, text)
            else:
                self.answer(text)
            if commands.has_left or self._is_over:
                return
        if last is not None:
            self.answer(last)

    def _carry_out_line(self, commands: "ScriptCommands", number: int, text: str) -> None:
        """Run a line that may be a command, or answer it."""
        from kvchat.terminal.commands import Message, Unknown  # and all that draws: not for one -p

        line = commands.registry.parse(text)
        if isinstance(line, Message):
            self.answer(line.text)
        elif isinstance(line, Unknown):
            self._fail(UsageError(f"Line {number} of the input: {line}"))
        else:
            self._carry_out(commands, line)

    def end(self) -> ExitCode:
        """Close the conversation and return the exit code, which tells if one is not saved whole.

        Says it of this one if no answer did; a command that left another one has said it.
        """
        problem = self._controller.close_session()
        if problem is not None and not self._has_told_unsaved:
            self._setup.notices.error(StoreError(problem))
        if problem is not None or self._controller.has_lost:
            self._note(ExitCode.STORE)
        return self.exit_code

    @property
    def _is_over(self) -> bool:
        """Whether the run must end before the next message."""
        is_interrupted = self._interruption.code is not None
        return is_interrupted or self._has_given_up or not self._is_heard

    @property
    def _session_fields(self) -> dict[str, object]:
        session = self._controller.session  # a new one goes again if its message is refused
        return {"session": session.session_id if session is not None else None}

    def _carry_out(self, commands: "ScriptCommands", line: "Invocation") -> None:
        """Run a command. Its output and errors go to stderr; an answer is written as usual."""
        try:
            request = commands.carry_out(line)
            self._shows_stats = commands.stats_level is not StatsLevel.OFF
            reply = request.ask() if request is not None else None
        except KvchatError as error:
            self._fail(error)
            return
        if request is not None and reply is not None:
            self._follow(reply, request.num_samples)

    def _follow(self, reply: Reply, num_samples: int) -> None:
        """Write an answer of the conversation until it ends."""
        session = self._controller.require_session()
        exchange = Exchange(session.session_id, num_samples=num_samples)
        answer_time, rounds = AnswerTime(self._setup.timeout_s), Rounds()
        calls = self._take_all(exchange, reply, answer_time)
        toolbox = self._setup.toolbox
        while calls and toolbox is not None and not self._is_over:
            results = tuple(self._result(toolbox, call, answer_time) for call in calls)
            if self._interruption.code is not None:
                self._note(self._interruption.code)
                break
            try:
                if problem := rounds.add(calls, results):
                    raise GenerationError(problem, "Ask in other words, or with another model.")
                reply = self._controller.give_results(results)
            except KvchatError as error:
                self.report(error, self._session_fields)
                return
            exchange = Exchange(session.session_id)
            calls = self._take_all(exchange, reply, answer_time)
        self._tell_trouble()

    def _result(self, toolbox: Toolbox, call: ToolCall, answer_time: AnswerTime) -> ToolResult:
        """Run a call, or refuse it: a script has no user to ask."""
        if toolbox.has(call.name) and not toolbox.permissions.of(call.name):
            name = one_line(call.name)
            self._setup.notices.tell(f"{name} is not allowed; --allow-tool {name} allows it.")
            return refused(call)
        if answer_time.is_over or self._interruption.code is not None:
            return ToolResult(call.name, "Error: it was not called, for the answer had to end.")
        self._setup.notices.tell(call_in_words(call))
        stop = threading.Event()
        self._interruption.watch(stop.set)
        try:
            with answer_time.stopping(stop.set):
                return toolbox.run(call, stop)
        finally:
            self._interruption.watch(None)

    def _take_all(
        self, exchange: Exchange, reply: Reply, answer_time: AnswerTime
    ) -> tuple[ToolCall, ...]:
        """Write an answer until it ends; return the calls in it, which its sender waits for."""
        calls: tuple[ToolCall, ...] = ()
        try:
            with self._limited(reply, answer_time):
                answer_time.begin()
                for event in reply:
                    if isinstance(event, AnswerEnded):
                        self._controller.note_ended(event)
                        calls = event.calls if event.reason is FinishReason.STOP else ()
                    self._handle(exchange, event, reply)
        except TimedOut as error:  # loading cannot be cancelled: only an exit ends it
            self._has_given_up = True
            self.report(error, self._session_fields)
        return calls if exchange.num_samples == 1 else ()

    def _tell_trouble(self) -> None:
        """Print a new problem of the KV store or of speculation; the exit code stays."""
        if self._interruption.code is not None:
            return
        if trouble := asyncio.run(self._controller.engine.new_trouble()):
            self._setup.notices.tell(trouble)

    def report(self, error: KvchatError, fields: dict[str, object]) -> None:
        """Report the error that prevented an exchange."""
        with self._listening(None):
            self._setup.writer.fail(error, fields)
        self._fail(error)

    def _fail(self, error: KvchatError) -> None:
        if self._takes_commands and isinstance(error, ContextTooLong):
            error = ContextTooLong(error.message, _WAYS_OUT)
        self._setup.notices.error(error)
        self._note(error.exit_code)

    def _note(self, code: ExitCode) -> None:
        if self.exit_code in (ExitCode.OK, ExitCode.USAGE):
            self.exit_code = code

    @contextmanager
    def _listening(self, reply: Reply | None) -> Iterator[None]:
        """End the run when the output cannot be written any more; answers are saved."""
        try:
            yield
        except BrokenPipeError as error:
            self._is_heard = False
            self.exit_code = self._interruption.code or ExitCode.BROKEN_PIPE
            if isinstance(error, Stalled) and self._interruption.code is None:
                self.exit_code = ExitCode.TIMEOUT
                forget_stdout()  # what is left to write would wait too
        except OSError as error:
            self._is_heard = False
            self._fail(KvchatError(f"Cannot write: {error.strerror}."))
        if not self._is_heard and reply is not None:
            reply.cancel()

    def _tell_load_notes(self) -> None:
        """Print the notes of loading once. Not on the engine's thread: stderr may block."""
        ready = self._controller.host.ready
        if ready is not None and not self._has_told_notes:
            self._has_told_notes = True
            for note in ready.notes:
                self._setup.notices.tell(note)

    def _handle(self, exchange: Exchange, event: ChatEvent, reply: Reply) -> None:
        self._tell_load_notes()
        read_again = self._controller.why_so_much(event) if isinstance(event, AnswerEnded) else ""
        with self._listening(reply):
            if self._is_heard:
                self._setup.writer.write(exchange, event, read_again)
        if isinstance(event, SavingFailed):
            self._has_told_unsaved = True  # the exit code tells whether it was so to the end
            self._setup.notices.error(StoreError(event.message))
        elif isinstance(event, AnswerFailed):
            self._fail(event.error)
            if isinstance(event.error, ContextTooLong):
                self._controller.drop_refused()
        elif isinstance(event, AnswerEnded):
            self._tell_statistics(event, read_again)
            ready = self._controller.host.ready
            ways_out = _WAYS_OUT if self._takes_commands else ""
            limit = ready.context_limit if ready is not None else None
            most = self._controller.options.max_tokens
            notice = ending_notice(event, limit, ways_out, most) if limit is not None else None
            if notice is not None and notice not in exchange.told:  # once for many samples
                exchange.told.add(notice)
                self._setup.notices.tell(notice)
            if (missing := missing_answer(event)) is not None:
                self._fail(missing)
            if event.reason is FinishReason.TIMEOUT:
                self._setup.notices.tell(f"the answer took longer than {self._setup.timeout_s} s.")
                self._note(ExitCode.TIMEOUT)
            if self._interruption.code is not None:
                self._note(self._interruption.code)

    def _tell_statistics(self, ended: AnswerEnded, read_again: str) -> None:
        if not self._shows_stats:
            return
        ready = self._controller.host.ready
        limit = ready.told_context_limit if ready is not None else None
        glyphs = self._setup.glyphs
        load_s = ready.load_s if ready is not None and not self._has_told_load else None
        self._has_told_load = True
        line = stats_line(ended, limit, glyphs, load_s=load_s)
        details = detail_line(ended, glyphs, read_again)
        self._setup.notices.show("".join(f"{text}\n" for text in (line, details) if text))

    def _limited(self, reply: Reply, answer_time: AnswerTime) -> "_Limits":
        return _Limits(self._controller.host, reply, answer_time.left_s, self._interruption)

    # A batch of JSON requests

    def answer_batch(self, requests: Iterator[JsonRequest | BadRequest]) -> None:
        """Answer independent requests as one continuous batch; write results as they are ready.

        Requests are read on a separate thread, because the sender may wait for an answer before it
        sends the next request.
        """
        inbox: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        places = threading.Semaphore(_MAX_IN_FLIGHT)
        running: dict[int, _Running] = {}
        self._interruption.watch(lambda: _cancel_all(running))
        threading.Thread(
            target=_queue_requests, args=(requests, inbox, places), daemon=True
        ).start()
        number, is_open = 0, True
        while (is_open and self._interruption.code is None and self._is_heard) or running:
            try:
                arrival = self._next_arrival(inbox)
            except TimedOut as error:
                with self._listening(None):
                    for label in [r.exchange.label for r in running.values()] or [{}]:
                        self._setup.writer.fail(error, label)
                self._fail(error)
                return
            self._begin_timers(running)
            if arrival is None:
                is_open = False
            elif isinstance(arrival, int):
                self._take(arrival, running, places)
            elif isinstance(arrival, BadRequest):
                self.report(arrival.error, arrival.label)
                places.release()
            elif self._interruption.code is None and self._is_heard:
                number += 1
                self._start(arrival, number, running, inbox, places)
        self._tell_trouble()
        if self._interruption.code is not None:
            self._note(self._interruption.code)

    def _next_arrival(self, inbox: "queue.SimpleQueue[_Arrival]") -> "_Arrival":
        """Return the next request or event, None at the end of the input or after a signal.
        Raises TimedOut if the model takes too long to load.
        """
        while True:
            wait_s = 0.5
            if self._setup.timeout_s is not None:
                left_s = self._controller.host.loading_left_s(self._setup.timeout_s)
                wait_s = min(wait_s, left_s)
            try:
                return inbox.get(timeout=wait_s)
            except queue.Empty:
                if self._interruption.code is not None:
                    return None

    def _start(
        self,
        request: JsonRequest,
        number: int,
        running: "dict[int, _Running]",
        inbox: "queue.SimpleQueue[_Arrival]",
        places: threading.Semaphore,
    ) -> None:
        session = None
        try:
            options = request.options(self._controller.options)
            system = request.system if request.has_system else self._controller.system
            # Independent requests are not a conversation, so no session file is made.
            session = self._controller.host.unsaved_session(system)
            request.recall_history(session)
            reply = session.ask(request.prompt, options, lambda: inbox.put(number))
        except KvchatError as error:
            self.report(error, request.label)
            places.release()
            if session is not None:
                session.close()
            return
        exchange = Exchange(None, request.label, options.num_samples)
        running[number] = _Running(session, reply, exchange)
        self._begin_timers(running)

    def _begin_timers(self, running: "dict[int, _Running]") -> None:
        """Start the timer of every reply without one, after the model is loaded."""
        if self._controller.host.ready is None:
            return
        for current in running.values():
            if current.timer is None:
                current.timer = _start_timer(
                    current.reply, self._setup.timeout_s, self._interruption
                )

    def _take(
        self, number: int, running: "dict[int, _Running]", places: threading.Semaphore
    ) -> None:
        current = running.get(number)
        if current is None:
            return  # this notification came after the last event was taken
        for event in current.reply.poll():
            self._handle(current.exchange, event, current.reply)
        if not self._is_heard:
            _cancel_all(running)
        if current.reply.is_finished:
            if current.timer is not None:
                current.timer.cancel()
                self._interruption.allow_stalled_writes()
            current.session.close()
            del running[number]
            places.release()


@dataclass(slots=True)
class _Running:
    session: ChatSession
    reply: Reply
    exchange: Exchange
    timer: threading.Timer | None = None


_Arrival = JsonRequest | BadRequest | int | None


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


def _cancel_all(running: dict[int, _Running]) -> None:
    for current in list(running.values()):
        current.reply.cancel()


class _Limits:
    """Context manager: a time limit on a reply, and signals that cancel it."""

    def __init__(
        self,
        host: ChatHost,
        reply: Reply,
        timeout_s: float | None,
        interruption: Interruption,
    ) -> None:
        self._host = host
        self._reply = reply
        self._timeout_s = timeout_s
        self._interruption = interruption
        self._timer: threading.Timer | None = None

    def __enter__(self) -> None:
        self._interruption.watch(self._cancel)
        if self._timeout_s is not None:
            self._host.wait_until_loaded(self._timeout_s)
            self._timer = _start_timer(self._reply, self._timeout_s, self._interruption)

    def __exit__(self, *exception: object) -> None:
        self._interruption.watch(None)
        if self._timer is not None:
            self._timer.cancel()
            self._interruption.allow_stalled_writes()

    def _cancel(self) -> None:
        if self._host.ready is None:  # loading cannot be cancelled, and has nothing to save
            assert self._interruption.code is not None
            raise Interrupted(self._interruption.code)
        self._reply.cancel()


def _start_timer(
    reply: Reply, timeout_s: float | None, interruption: Interruption
) -> threading.Timer | None:
    """Start what ends a reply in time, and a write of it that waits for its reader."""
    if timeout_s is None:
        return None

    def end() -> None:
        if reply.is_finished:
            return
        reply.cancel(FinishReason.TIMEOUT)
        interruption.end_stalled_writes()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    return timer
