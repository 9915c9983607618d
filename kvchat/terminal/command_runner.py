"""CommandRunner: runs commands as tasks of the event loop, and shows each one's line.

Commands that must not run during an answer take turns with answers, in the order of their lines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvchat.core.errors import KvchatError
from kvchat.terminal import (
    commands_conversation,
    commands_engine,
    commands_help,
    commands_input,
    commands_kv,
    commands_presets,
    commands_shell,
    commands_turns,
)
from kvchat.terminal.commands import CommandContext, Invocation, Registry, Stopped
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Page, View

T = TypeVar("T")

_log = logging.getLogger(__name__)


class CommandRunner:
    """Runs commands for a context, which shows what they say on a view.

    on_error   called for a command that failed, with its line if that is not shown yet, else ""
    on_end     called when a command has ended, but by no `cancel_all` or end of the loop
    turn_lock  held by an answer, and by a command that must not run during an answer
    name       the command that holds the lock, "" for none
    """

    def __init__(
        self,
        context: CommandContext,
        view: View,
        on_error: Callable[[str, KvchatError], None],
        on_end: Callable[[], None],
    ) -> None:
        self._context = context
        self._view = view
        self._on_error = on_error
        self._on_end = on_end
        self.turn_lock = asyncio.Lock()
        self.name = ""
        self._num_running = 0
        self._unshown: dict[asyncio.Task[Any] | None, str] = {}  # lines of running commands
        self._waiting: list[str] = []
        self._stoppable: asyncio.Future[Any] | None = None
        self._is_part_stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    # What runs

    @property
    def is_running(self) -> bool:
        """Whether a command has not ended, also one that waits."""
        return self._num_running > 0

    @property
    def is_stoppable(self) -> bool:
        """Whether a command is in a part that `stop` ends."""
        return self._stoppable is not None

    @property
    def waiting(self) -> tuple[str, ...]:
        """The lines of commands that wait for an answer or for another command."""
        return tuple(self._waiting)

    @property
    def page(self) -> Page:
        """The view; a command's own line is shown before the first that the command writes."""
        self._show_line()
        return self._view

    def _show_line(self) -> None:
        """Show the line of the command that this task runs, unless it is shown already."""
        if (line := self._unshown.pop(asyncio.current_task(), "")) != "":
            self._view.write_turn(line)

    # Commands

    def begin(self, command: Invocation, line: str = "") -> None:
        """Run a command that was typed as `line`; "" for one that a key stands for."""
        self._num_running += 1
        self.spawn(self._carry_out(command, line))

    async def _carry_out(self, command: Invocation, line: str) -> None:
        try:
            if command.command.takes_turn:
                await self._run_alone(command, line)
            else:
                await self._run(command, line)
        except Stopped as stopped:
            self._context.say(str(stopped))
        except KvchatError as error:
            self._on_error(self._unshown.get(asyncio.current_task(), ""), error)
        except Exception as error:
            self._show_line()  # what is reported of it stands below
            self.report(error)
        finally:
            self._unshown.pop(asyncio.current_task(), None)
            self._num_running -= 1
        self._on_end()

    async def _run_alone(self, command: Invocation, line: str) -> None:
        """Run a command once no answer and no other such command is in progress."""
        if line and self.turn_lock.locked():
            self._waiting.append(line)
            self._context.refresh()
        async with self.turn_lock:
            if line in self._waiting:
                self._waiting.remove(line)
            self.name = command.command.name
            try:
                await self._run(command, line)
            finally:
                self.name = ""

    async def _run(self, command: Invocation, line: str) -> None:
        """Run a command; its line is shown when it has something to show, or at its end."""
        if line:
            self._unshown[asyncio.current_task()] = line
        await command.command.run(self._context, command.arguments)
        self._show_line()

    async def stoppable(self, work: Awaitable[T], stage: str, if_stopped: str) -> T:
        """Do a part of a command, as `CommandContext.stoppable` says."""
        part = self._stoppable = asyncio.ensure_future(work)
        self._is_part_stopped = False
        self._context.show_stage(stage)
        try:
            return await part
        except asyncio.CancelledError:
            if self._is_part_stopped:
                raise Stopped(f"Stopped: {if_stopped}") from None
            raise
        finally:
            self._stoppable = None
            self._context.show_stage("")

    def stop(self) -> None:
        """Stop the part of a command that can be stopped, if there is one."""
        if self._stoppable is not None:
            self._is_part_stopped = True
            self._stoppable.cancel()

    # Tasks

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task; an error in it is reported, not raised."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def cancel_all(self) -> None:
        """Cancel every task but the one that calls this: commands that still wait, for example."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report(error)

    def report(self, error: BaseException) -> None:
        """Report an unexpected error in one sentence, and log its traceback."""
        _log.error("unexpected error", exc_info=error)
        name = type(error).__name__
        self._context.say(
            f"Something went wrong inside kvchat ({name}). The conversation is kept. "
            "`kvchat doctor` says where the log is.",
            Role.ERROR,
        )


def build_registry() -> Registry:
    """Return all slash commands."""
    return Registry(
        (
            *commands_help.COMMANDS,
            *commands_conversation.COMMANDS,
            *commands_presets.COMMANDS,
            *commands_turns.COMMANDS,
            *commands_input.COMMANDS,
            *commands_shell.COMMANDS,
            *commands_engine.COMMANDS,
            *commands_kv.COMMANDS,
        )
    )
