"""ScriptOutput: writes a script's answers and notices, and keeps its exit code."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvchat.chat.context_policy import ContextPolicy
from kvchat.chat.controller import ChatController
from kvchat.chat.events import AnswerEnded, AnswerFailed, ChatEvent, SavingFailed
from kvchat.chat.reply import Reply
from kvchat.cli.output import Exchange, Notices, Writer, ending_notice, missing_answer
from kvchat.cli.streams import Interruption, Stalled, forget_stdout
from kvchat.core.errors import ContextTooLong, ExitCode, KvchatError, StoreError
from kvchat.core.types import FinishReason
from kvchat.terminal.status import detail_line, stats_line
from kvchat.terminal.theme import ASCII_GLYPHS, Glyphs
from kvchat.tools.toolbox import Toolbox

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
        if self.takes_commands and isinstance(error, ContextTooLong):
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
            if isinstance(event.error, ContextTooLong):
                self._controller.drop_refused()
        elif isinstance(event, AnswerEnded):
            self._tell_statistics(event, read_again)
            self._tell_end(exchange, event)

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
        ready = self._controller.host.ready
        if ready is not None and not self._has_told_notes:
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
        if notice is not None and notice not in exchange.told:  # once for many samples
            exchange.told.add(notice)
            self._setup.notices.tell(notice)
        if (missing := missing_answer(ended)) is not None:
            self.fail(missing)
        if ended.reason is FinishReason.TIMEOUT:
            self._setup.notices.tell(f"the answer took longer than {self._setup.timeout_s} s.")
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
