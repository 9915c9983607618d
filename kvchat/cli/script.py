"""The script modes of one conversation: one prompt, or one turn a line.

`batch.py` answers JSON requests, which are independent of each other.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat.chat.events import AnswerEnded
from kvchat.chat.reply import Reply
from kvchat.chat.turn_loop import TurnLoop
from kvchat.cli.answer_time import AnswerTime, limited
from kvchat.cli.output import Exchange
from kvchat.cli.script_output import ScriptOutput, ScriptSetup
from kvchat.cli.script_room import ScriptRoom
from kvchat.cli.script_tools import ScriptTools
from kvchat.cli.streams import Interruption
from kvchat.core.errors import ExitCode, KvchatError, TimedOut, UsageError
from kvchat.terminal.status import StatsLevel

if TYPE_CHECKING:
    from kvchat.terminal.commands import Invocation
    from kvchat.terminal.script_commands import ScriptCommands

# The first characters of `/help`, `?` and `:q`. Any other line is a message.
_COMMANDS_BEGIN = ("/", "?", ":")


class Script:
    """Runs exchanges one after another."""

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption
        self._output = ScriptOutput(setup, interruption)
        self._room = ScriptRoom(setup, interruption)
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
            if not self._room.make(text):
                self._output.note_interruption()
                return
            reply = self._controller.ask(text)
        except KvchatError as error:
            self._output.report(error, self._session_fields)
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
            if request is not None and request.goes_on and not self._room.make(None):
                self._output.note_interruption()
                return
            reply = request.ask() if request is not None else None
        except KvchatError as error:
            self._output.fail(error)
            return
        if request is not None and reply is not None:
            self._follow(reply, request.num_samples)

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
                if not self._room.make(None, results):
                    turn.hold(results)
                    self._output.note_interruption()
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
        except TimedOut as error:  # loading cannot be cancelled: only an exit ends it
            self._has_given_up = True
            self._output.report(error, self._session_fields)
        return ended
