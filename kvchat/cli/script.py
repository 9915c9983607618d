"""The script modes of one conversation: their input, answers, tools, time limits and notices.

`batch.py` answers JSON requests, which are independent of each other.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvchat.chat.answer_settings import ContextPolicy
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.events import AnswerEnded, AnswerFailed, ChatEvent, SavingFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.making_room import summarise
from kvchat.chat.reply import Reply
from kvchat.chat.thinning import dropped_in_words
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.chat.turn_loop import TurnLoop
from kvchat.cli.output import Exchange, Notices, Writer, ending_notice, missing_answer
from kvchat.cli.streams import Interrupted, Interruption, Stalled, forget_stdout
from kvchat.core.errors import (
    ContextTooLong,
    ExitCode,
    KvchatError,
    StoreError,
    TimedOut,
    UsageError,
)
from kvchat.core.text import one_line
from kvchat.core.types import FinishReason
from kvchat.terminal.status import StatsLevel, detail_line, stats_line
from kvchat.terminal.theme import ASCII_GLYPHS, Glyphs
from kvchat.tools.toolbox import Toolbox, call_in_words, refused

if TYPE_CHECKING:
    from kvchat.terminal.commands import Invocation
    from kvchat.terminal.room import RoomMaker
    from kvchat.terminal.script_commands import ScriptCommands


class AnswerTime:
    """The time of one answer: so many seconds from `begin` on, None for any."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._end_s: float | None = None

    def begin(self) -> None:
        """Begin to count; later calls change nothing."""
        if self._limit_s is not None and self._end_s is None:
            self._end_s = time.monotonic() + self._limit_s

    @property
    def left_s(self) -> float | None:
        """The seconds that are left, None for any."""
        if self._end_s is None:
            return self._limit_s
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` on another thread when the time is over within the block."""
        left_s = self.left_s
        if left_s is None:
            yield
            return
        timer = _started_timer(left_s, stop)
        try:
            yield
        finally:
            timer.cancel()

    def limit(self, reply: Reply, interruption: Interruption) -> threading.Timer | None:
        """Start the timer that ends a reply in time; None for any time.

        It ends a write of the reply that waits for its reader, too.
        """
        left_s = self.left_s
        if left_s is None:
            return None

        def end() -> None:
            if reply.is_finished:
                return
            reply.cancel(FinishReason.TIMEOUT)
            interruption.end_stalled_writes()

        return _started_timer(left_s, end)


@contextmanager
def limited(
    host: ChatHost, reply: Reply, answer_time: AnswerTime, interruption: Interruption
) -> Iterator[None]:
    """Within the block the time limit and signals end a reply; the model is loaded first.

    Raises TimedOut where that takes too long, and Interrupted: loading has nothing to save.
    """

    def cancel() -> None:
        if host.ready is None:  # loading cannot be cancelled
            assert interruption.code is not None
            raise Interrupted(interruption.code)
        reply.cancel()

    timer = None
    interruption.watch(cancel)
    try:
        if (left_s := answer_time.left_s) is not None:
            host.wait_until_loaded(left_s)
            timer = answer_time.limit(reply, interruption)
        yield
    finally:
        interruption.watch(None)
        if timer is not None:
            timer.cancel()
            interruption.allow_stalled_writes()


def _started_timer(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


# Of a full context, in an input that takes commands.
_WAYS_OUT = "/compact makes room, /new begins another conversation."


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


class ScriptOutput:
    """Takes the events and errors of a script's exchanges.

    The exit code is the first failure's. Any other error replaces a usage error, such as an unknown
    command, because the rest of the input was still processed.

    takes_commands  whether the input may have slash commands, which hints then name
    """

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._has_told_notes = False
        self._has_told_load = False
        self._has_told_unsaved = False
        self.shows_stats = setup.shows_stats
        self.takes_commands = False
        self.is_heard = True
        self.exit_code = ExitCode.OK

    def end(self) -> ExitCode:
        """Close the conversation and return the exit code, which tells if one is not saved whole.

        Says it of this one if no answer did; a command that left another one has said it.
        """
        problem = self._controller.close_session()
        if problem is not None and not self._has_told_unsaved:
            self._setup.notices.error(StoreError(problem))
        if problem is not None or self._controller.has_lost:
            self.note(ExitCode.STORE)
        return self.exit_code

    @property
    def is_over(self) -> bool:
        """Whether a signal, or a reader that has gone, ends the run."""
        return self._interruption.code is not None or not self.is_heard

    def report(self, error: KvchatError, *exchanges: dict[str, object]) -> None:
        """Report the error that prevented exchanges, each given by its fields."""
        with self._listening(None):
            for fields in exchanges:
                self._setup.writer.fail(error, fields)
        self.fail(error)

    def fail(self, error: KvchatError) -> None:
        """Print an error, and note its exit code."""
        has_messages = bool(self._controller.context_ids)  # else the message alone is too long
        if self.takes_commands and has_messages and isinstance(error, ContextTooLong):
            error = ContextTooLong(error.message, _WAYS_OUT)
        self._setup.notices.error(error)
        self.note(error.exit_code)

    def note(self, code: ExitCode) -> None:
        if self.exit_code in (ExitCode.OK, ExitCode.USAGE):
            self.exit_code = code

    def note_interruption(self) -> None:
        """Note the exit code of a signal, if one has come."""
        if self._interruption.code is not None:
            self.note(self._interruption.code)

    def tell_trouble(self) -> None:
        """Print a new problem of the KV store or of speculation; the exit code stays."""
        if self._interruption.code is not None:
            return
        if trouble := asyncio.run(self._controller.engine.new_trouble()):
            self._setup.notices.tell(trouble)

    def take(self, exchange: Exchange, event: ChatEvent, reply: Reply) -> None:
        """Write an event of a reply, and tell what its user has to know beside the answer."""
        self._tell_load_notes()
        read_again = self._controller.why_so_much(event) if isinstance(event, AnswerEnded) else ""
        with self._listening(reply):
            if self.is_heard:
                self._setup.writer.write(exchange, event, read_again)
        if isinstance(event, SavingFailed):
            self._has_told_unsaved = True  # the exit code tells whether it was so to the end
            self._setup.notices.error(StoreError(event.message))
        elif isinstance(event, AnswerFailed):
            self.fail(event.error)
            self.drop_refused(event.error)
        elif isinstance(event, AnswerEnded):
            self._tell_statistics(event, read_again)
            self._tell_end(exchange, event)

    def drop_refused(self, error: BaseException) -> None:
        """Let go of a message that was too long, or that no model was there to read."""
        is_unread = self._controller.host.ready is None
        if is_unread or isinstance(error, ContextTooLong):
            self._controller.drop_refused(is_given_back=is_unread)

    @contextmanager
    def _listening(self, reply: Reply | None) -> Iterator[None]:
        """End the run when the output cannot be written any more; answers are saved."""
        try:
            yield
        except BrokenPipeError as error:
            self.is_heard = False
            self.exit_code = self._interruption.code or ExitCode.BROKEN_PIPE
            if isinstance(error, Stalled) and self._interruption.code is None:
                self.exit_code = ExitCode.TIMEOUT
                forget_stdout()  # what is left to write would wait too
        except OSError as error:
            self.is_heard = False
            self.fail(KvchatError(f"Cannot write: {error.strerror}."))
        if not self.is_heard and reply is not None:
            reply.cancel()

    def _tell_load_notes(self) -> None:
        """Print the notes of loading once. Not on the engine's thread: stderr may block."""
        if self._has_told_notes:
            return
        ready = self._controller.host.ready
        if ready is not None:
            self._has_told_notes = True
            for note in ready.notes:
                self._setup.notices.tell(note)

    def _tell_end(self, exchange: Exchange, ended: AnswerEnded) -> None:
        """Tell how an answer ended, where that is not as its user expects."""
        ready = self._controller.host.ready
        stops = self._controller.options.context_policy is ContextPolicy.STOP
        ways_out = _WAYS_OUT if self.takes_commands and stops else ""
        limit = ready.context_limit if ready is not None else None
        most = self._controller.options.max_tokens
        notice = ending_notice(ended, limit, ways_out, most) if limit is not None else None
        for each in (notice, dropped_in_words(ended.usage.dropped)):
            if each and each not in exchange.told:  # once for many samples
                exchange.told.add(each)
                self._setup.notices.tell(f"{exchange.where}{each}")
        if (missing := missing_answer(ended)) is not None:
            self.fail(missing)
        if ended.reason is FinishReason.TIMEOUT:
            late = f"{exchange.where}the answer took longer than {self._setup.timeout_s} s."
            self._setup.notices.tell(late)
            self.note(ExitCode.TIMEOUT)
        self.note_interruption()

    def _tell_statistics(self, ended: AnswerEnded, read_again: str) -> None:
        if not self.shows_stats:
            return
        ready = self._controller.host.ready
        limit = ready.told_context_limit if ready is not None else None
        glyphs = self._setup.glyphs
        load_s = ready.load_s if ready is not None and not self._has_told_load else None
        self._has_told_load = True
        line = stats_line(ended, limit, glyphs, load_s=load_s)
        details = detail_line(ended, glyphs, read_again)
        self._setup.notices.show("".join(f"{text}\n" for text in (line, details) if text))


# A script has no user to ask: a tool runs if it is allowed by name.


class ScriptTools:
    """Runs one call after another; `tell` gets a line about each."""

    def __init__(self, toolbox: Toolbox, tell: Callable[[str], None]) -> None:
        self._toolbox = toolbox
        self._tell = tell
        self._running: threading.Event | None = None  # stops the call that runs
        self._is_stopped = False
        self._told: set[str] = set()  # tools that are not allowed

    def stop(self) -> None:
        """End the call that runs, and begin no other. Any thread may call it."""
        self._is_stopped = True
        if self._running is not None:
            self._running.set()

    def results(self, calls: Sequence[ToolCall], answer_time: AnswerTime) -> tuple[ToolResult, ...]:
        """Return the results of the calls of one answer, which ends when its time is over."""
        return tuple(self._result(call, answer_time) for call in calls)

    def _result(self, call: ToolCall, answer_time: AnswerTime) -> ToolResult:
        toolbox = self._toolbox
        if toolbox.has(call.name) and not toolbox.permissions.of(call.name):
            name = one_line(call.name)
            if name not in self._told:
                self._tell(f"{name} is not allowed; --allow-tool {name} allows it.")
            self._told.add(name)
            return refused(call)
        self._running = stop = threading.Event()  # before the look: `stop` may be called meanwhile
        if answer_time.is_over or self._is_stopped:
            return ToolResult(call.name, "Error: it was not called, for the answer had to end.")
        self._tell(call_in_words(call))
        with answer_time.stopping(stop.set):
            return toolbox.run(call, stop)


# The first characters of `/help`, `?` and `:q`. Any other line is a message.
_COMMANDS_BEGIN = ("/", "?", ":")


class Script:
    """Runs exchanges one after another."""

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._output = ScriptOutput(setup, interruption)
        self._has_given_up = False

    @property
    def exit_code(self) -> ExitCode:
        return self._output.exit_code

    def end(self) -> ExitCode:
        """Close the conversation and return the exit code."""
        return self._output.end()

    def answer(self, text: str) -> None:
        """Answer one message and write its events; errors are reported, not raised."""
        try:
            if not self._make_room(text):
                return
            reply = self._controller.ask(text)
        except KvchatError as error:
            self._output.report(error, self._session_fields)
            return
        self._follow(reply, self._controller.options.num_samples)

    def answer_lines(
        self, commands: "ScriptCommands", lines: Iterable[tuple[int, str]], last: str | None = None
    ) -> None:
        """Answer one turn a line, in one conversation; `last` is a message after the lines.

        A line stands after its number. Slash commands are run. A signal cuts off the current answer
        and ends the run.
        """
        self._output.takes_commands = True
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
            self._output.fail(UsageError(f"Line {number} of the input: {line}"))
        else:
            self._carry_out(commands, line)

    def _carry_out(self, commands: "ScriptCommands", line: "Invocation") -> None:
        """Run a command. Its output and errors go to stderr; an answer is written as usual."""
        try:
            request = commands.carry_out(line)
            self._output.shows_stats = commands.stats_level is not StatsLevel.OFF
            if request is not None and request.goes_on and not self._make_room(None):
                return
            reply = request.ask() if request is not None else None
        except KvchatError as error:
            self._output.fail(error)
            return
        if request is not None and reply is not None:
            self._follow(reply, request.num_samples)

    def _make_room(self, text: str | None, results: tuple[ToolResult, ...] = ()) -> bool:
        """Make room as `RoomMaker.make` does; false if a signal or the time limit ended that."""
        controller = self._controller
        if controller.options.context_policy is ContextPolicy.STOP or not controller.context_ids:
            return True
        with suppress(TimedOut):  # the answer tells it
            controller.host.wait_until_loaded(self._setup.timeout_s)
        is_made = asyncio.run(self._room.make(text, results))
        if not is_made:
            self._output.note_interruption()
        return is_made

    @cached_property
    def _room(self) -> "RoomMaker":
        from kvchat.terminal.room import RoomMaker  # and all that draws: not for one -p

        def say(text: str) -> None:
            self._setup.notices.tell(text[:1].lower() + text[1:])

        return RoomMaker(self._controller, self._summary, say)

    async def _summary(self, plan: CompactionPlan) -> AnswerEnded:
        """Let the model write a summary, which is not printed; raises what prevented it."""
        reply, answer_time = summarise(self._controller, plan), AnswerTime(self._setup.timeout_s)
        with limited(self._controller.host, reply, answer_time, self._interruption):
            return reply.wait()

    @property
    def _is_over(self) -> bool:
        """Whether the run must end before the next message."""
        return self._has_given_up or self._output.is_over

    @property
    def _session_fields(self) -> dict[str, object]:
        session = self._controller.session  # a new one goes again if its message is refused
        return {"session": session.session_id if session is not None else None}

    def _follow(self, reply: Reply, num_samples: int) -> None:
        """Write an answer of the conversation until it ends, with all rounds of its calls."""
        session, toolbox = self._controller.require_session(), self._setup.toolbox
        answer_time = AnswerTime(self._setup.timeout_s)
        turn = TurnLoop(self._controller.give_results, self._controller.hold_results)
        exchange = Exchange(session.session_id, num_samples=num_samples)
        ended = self._take_all(exchange, reply, answer_time)
        while (calls := turn.calls(ended)) and toolbox is not None and not self._is_over:
            tools = ScriptTools(toolbox, self._setup.notices.tell)
            self._interruption.watch(tools.stop)
            try:
                results = tools.results(calls, answer_time)
            finally:
                self._interruption.watch(None)
            if self._interruption.code is not None:
                turn.hold(results)
                self._output.note_interruption()
                break
            try:
                if not self._make_room(None, results):
                    turn.hold(results)
                    break
                reply = turn.answer(results)
            except KvchatError as error:
                self._output.report(error, self._session_fields)
                return
            ended = self._take_all(Exchange(session.session_id), reply, answer_time)
        self._output.tell_trouble()

    def _take_all(
        self, exchange: Exchange, reply: Reply, answer_time: AnswerTime
    ) -> list[AnswerEnded]:
        """Write a reply until it ends; return how its answers ended."""
        ended = []
        try:
            with limited(self._controller.host, reply, answer_time, self._interruption):
                answer_time.begin()
                for event in reply:
                    if isinstance(event, AnswerEnded):
                        self._controller.note_ended(event)
                        ended.append(event)
                    self._output.take(exchange, event, reply)
        except Interrupted as error:
            self._output.drop_refused(error)
            raise
        except TimedOut as error:  # loading cannot be cancelled: only an exit ends it
            self._has_given_up = True
            self._output.drop_refused(error)
            self._output.report(error, self._session_fields)
        return ended
