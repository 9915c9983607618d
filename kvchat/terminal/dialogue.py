"""Dialogue: queues messages, shows answers and runs commands. Runs on the event loop.

It receives all input from a view, and reaches the engine only through the controller.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Turn
from kvchat.chat.events import AnswerEnded
from kvchat.chat.read_ahead import ReadAhead
from kvchat.core.errors import ExitCode, KvchatError
from kvchat.core.events import EngineLost, LoadEvent, LoadFailed, LoadProgress, ModelReady
from kvchat.core.text import model_label, one_line
from kvchat.terminal import history_view, warmth
from kvchat.terminal.answering import Answering
from kvchat.terminal.command_runner import CommandRunner
from kvchat.terminal.commands import CommandContext, Invocation, Message, Registry, Unknown
from kvchat.terminal.status import (
    StatsLevel,
    ToolbarFacts,
    about,
    attached_in_words,
    plural,
    toolbar,
)
from kvchat.terminal.theme import Role
from kvchat.terminal.tool_use import ToolUse
from kvchat.terminal.unsent import MessageQueue, Unsent
from kvchat.terminal.view import LiveState, Page, View
from kvchat.terminal.wrap import simple_emoji
from kvchat.tools.toolbox import Toolbox

_STOP_PATIENCE_S = 2.0
# After such a pause in typing, what is finished of a message is prefilled.
_TYPING_PAUSE_S = 0.25
# How often the engine is asked what the next message costs; each time it has two seconds.
_WARMTH_TRIES = 15
_FAREWELLS = ("exit", "quit", "bye")

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Dialogue(CommandContext):
    """Implements `Listener` for views. `work` is its main loop; `exit_code` is set at the end."""

    def __init__(
        self,
        controller: ChatController,
        view: View,
        registry: Registry,
        stats_level: StatsLevel,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.controller = controller
        self._view = view
        self.registry = registry
        self.exit_code = ExitCode.OK
        self.failure: KvchatError | None = None
        self.num_unsent = 0  # messages typed and waiting when the chat ended
        self.stats_level = stats_level
        self._queue = MessageQueue()
        self._unsent = Unsent(controller, self._queue, view, self.say)
        self._asked: Callable[[], Awaitable[object]] | None = None
        self.toolbox = toolbox
        tools = ToolUse(toolbox, view, self.refresh)
        self._answering = Answering(controller, view, self.refresh, self._live_state, tools)
        self._stage = "loading the model"
        self._notice = ""
        self._said_farewell = ""
        self._has_said_loss = False
        self.has_warned = False
        self._warmth = ""
        self._num_context_tokens = len(controller.context_ids)
        self._ahead = ReadAhead(controller)
        self._pause: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_loaded = False
        self._has_tools = asyncio.Event()
        if toolbox is None or toolbox.is_complete:
            self._has_tools.set()
        self._runner = CommandRunner(self, view, self._command_failed, self._command_ended)

    @property
    def page(self) -> Page:
        return self._runner.page

    # Loading

    def hear(self, event: LoadEvent) -> None:
        """Handle a load event of the model that the conversation began with.

        A message is sent, and so saved, while the model loads: the engine answers it afterwards,
        also where another engine takes the place of a lost one.
        """
        if isinstance(event, LoadProgress):
            share = f" {event.fraction:.0%}" if event.fraction is not None else ""
            self._stage = one_line(event.stage) + share
        elif isinstance(event, ModelReady):
            self._stage = ""
            self._is_loaded = True
            self._answering.model_is_ready()
            for note in event.notes:
                self.say(note)
            if not self.is_busy:  # else the line after the answer tells what it did cost
                self._runner.spawn(self._tell_cost_at_opening())
            self.conversation_changed()
            self.draft_changed(self._view.prompt_text)  # files may be attached by -f
        elif isinstance(event, EngineLost):
            self._stage = "loading the model"
            self._is_loaded = False
            self.say(f"{event.reason} The chat goes on without it.", Role.WARNING)
        else:
            self._fail(event)
        self.refresh()

    def expect_tools(self) -> None:
        """Offer tools that start late once they have started; messages wait for them."""
        if self.toolbox is None or self._has_tools.is_set():
            return
        loop = asyncio.get_running_loop()

        def tell_loop() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._tools_started)

        self.toolbox.when_complete(tell_loop)

    def _tools_started(self) -> None:
        assert self.toolbox is not None
        self.toolbox.complete()
        for problem in self.toolbox.problems:
            self.say(problem, Role.WARNING)
        self.controller.tools = self.toolbox.definitions
        self._has_tools.set()
        self.refresh()

    @property
    def _waiting(self) -> str:
        """What messages wait for besides the model, in a few words."""
        return "" if self._has_tools.is_set() else "starting MCP servers"

    def show_stage(self, stage: str) -> None:
        """Show what is being loaded; "" shows nothing."""
        self._stage = stage
        self.refresh()

    async def stoppable(self, work: Awaitable[T], stage: str, if_stopped: str) -> T:
        return await self._runner.stoppable(work, stage, if_stopped)

    def _fail(self, event: LoadFailed) -> None:
        """Leave with the error's exit code: the chat cannot run without a model."""
        self.failure = event.error
        self.quit(event.error.exit_code)

    # Listener: called by the view
    @property
    def is_answering(self) -> bool:
        return self._answering.is_running or self._runner.is_stoppable

    @property
    def has_queue(self) -> bool:
        return len(self._queue) > 0

    @property
    def has_been_used(self) -> bool:
        """Whether there is a saved conversation to resume later."""
        is_saved = self.controller.host.store is not None
        return (
            is_saved
            and self.controller.conversation is not None
            and len(self.controller.conversation) > 0
        )

    @property
    def is_busy(self) -> bool:
        """Whether an answer is in progress or a message waits for one."""
        return self._answering.is_running or self.has_queue or self._asked is not None

    @property
    def is_at_work(self) -> bool:
        """Whether more output may come without further input.

        A message that is refused is at work after its answer ended: its tokens are counted.
        """
        return self.is_busy or self._runner.is_running or self._runner.turn_lock.locked()

    def accept(self, text: str) -> None:
        """Handle a typed line: queue a message, run a command."""
        self.has_warned = False
        self._notice = ""
        self._unsent.take()
        line = self.registry.parse(text, is_typed=True)
        if isinstance(line, Message):
            self._accept_message(text)
        elif isinstance(line, Unknown):
            self._refuse(text, str(line))
        elif line.command.takes_turn and self.is_busy:
            self._refuse(text, f"/{line.command.name} waits for {self._what_keeps_it_busy}")
        else:
            self._queue.stop_editing()
            self._runner.begin(line, text)
        self._unsent.offer()
        self.refresh()

    @property
    def _what_keeps_it_busy(self) -> str:
        """What commands wait for, as the end of a sentence."""
        key = "Ctrl-C" if self._view.painter.look.is_plain else "Esc"
        if self._answering.is_running and not self._is_loaded:
            return f"the model, which is loading, and for the answer. {key} stops it."
        if self._answering.is_running:
            return f"{self._answering.name}. {key} stops it."
        servers = "the MCP servers, which are starting" if self._waiting else ""
        cause = f"/{self._runner.name}" if self._runner.name else servers
        return f"your message before it{f', and that for {cause}' if cause else ''}."

    @property
    def num_kept(self) -> int:
        """Of the messages that were not sent when the chat ended, those saved with it."""
        return self._unsent.num_kept

    @property
    def stoppable_name(self) -> str:
        return f"/{self._runner.name}" if self._runner.is_stoppable else self._answering.name

    def _accept_message(self, text: str) -> None:
        if self._queue.edited_index is None and not text.strip():
            return
        if text == "help" and self._said_farewell != text:
            self._said_farewell = text
            self._view.put_back(text)
            self._notice = "/help lists the commands. Enter again sends the word."
            return
        farewell = text.strip().lower()
        if farewell in _FAREWELLS and self._said_farewell != farewell:
            self._said_farewell = farewell
            self._view.put_back(text)
            self._notice = "Enter again leaves. After a space it is a message."
            return
        if farewell in _FAREWELLS and not text.startswith(" "):
            self.leave(ExitCode.OK)
            return
        self._said_farewell = ""
        is_sent_at_once = not self.is_busy and not self._waiting and not self._queue.unsent
        is_sent_at_once &= not self._runner.turn_lock.locked()
        self._queue.drop_offer()
        self._queue.add(text)
        if self._unsent.is_kept or not is_sent_at_once:  # else its turn is saved in a moment
            self._unsent.keep()
        self._wake.set()

    def open_unsent(self) -> None:
        """Offer what an earlier chat did not send, once the prompt takes input."""
        self._unsent.take()
        asyncio.get_running_loop().call_soon(self._unsent.offer)

    def _refuse(self, text: str, reason: str) -> None:
        """Say why a line is refused, and put it back into the prompt.

        Below an answer that streams, so that the words do not come between two lines of it.
        """
        if not self._view.prompt_text:
            self._view.put_back(text)
        if self._answering.is_running:
            self.notice(reason)
        else:
            self.say(reason, Role.WARNING)

    def stop(self) -> None:
        self._answering.stop()
        self._runner.stop()

    def notice(self, text: str) -> None:
        self._notice = text
        self.refresh()

    def key_pressed(self) -> None:
        if self._notice:
            self.notice("")

    def draft_changed(self, text: str) -> None:
        """Prefill what is finished of a message, after a pause in typing."""
        if self._pause is not None:
            self._pause.cancel()
        self._pause = self._runner.spawn(self._read_ahead(text))

    async def _read_ahead(self, text: str) -> None:
        await asyncio.sleep(_TYPING_PAUSE_S)
        if not self.is_busy:
            is_message = isinstance(self.registry.parse(text, is_typed=True), Message)
            await self._ahead.consider(text if is_message else "")
            await self._ahead.watch(lambda: not self.is_busy, self.refresh)

    def edit_queue(self, current: str, step: int) -> str | None:
        move = self._queue.edit_previous if step < 0 else self._queue.edit_next
        text = move(current)
        self._unsent.keep()
        self._wake.set()
        self.refresh()
        return text

    def stop_editing(self) -> None:
        self._queue.stop_editing()
        num_offers = len(self._queue.offers)
        self._queue.drop_offer()
        left = len(self._queue.offers)
        if 0 < left < num_offers:
            self._notice = f"Dropped. {plural(left, 'more message')} after your next line."
        if self._unsent.is_kept:
            self._unsent.keep()
        self.controller.place.edited = None
        self._wake.set()
        self.refresh()
        self.draft_changed(self._view.prompt_text)  # a prompt that is cleared does not tell itself

    def rewind(self) -> None:
        if not self.is_busy and self.controller.place.user_turns:
            self.run_by_name("rewind")

    def show_sibling(self, step: int) -> None:
        if self.is_busy:
            return
        turn = self.controller.place.step_sibling(step)
        branch = self.controller.place.branch
        if turn is None or branch is None:
            self.notice("There is no other answer. /retry makes one.")
            return
        self.say(f"Answer {branch[0]} of {branch[1]}", Role.TITLE, gap=False)
        self._view.write(history_view.answer_rows(turn, self._view))
        self.conversation_changed()

    def toggle_stats(self) -> None:
        self.notice(self.set_stats(self.stats_level.next()))

    def leave(self, code: int) -> None:
        """Leave, as `quit`; if the conversation cannot be saved whole, say so once and stay."""
        problem = None if self._has_said_loss else self.controller.saving_problem()
        if problem is None:
            self.quit(code)
            return
        self._has_said_loss = self.has_warned = True
        lost = "Leave again to lose what is not saved; /export PATH writes it elsewhere."
        self.say(f"{problem} {lost}", Role.WARNING)

    def quit(self, code: int) -> None:
        """Leave; an answer in progress is stopped first and kept."""
        self.exit_code = ExitCode(code)
        self._runner.spawn(self._leave())

    def input_ended(self) -> None:
        if self.exit_code is ExitCode.OK and self.is_answering:
            self.exit_code = ExitCode.HANGUP  # the end of input during an answer is a hangup

    def terminal_lost(self) -> None:
        self.quit(ExitCode.HANGUP)

    def failed(self, error: Exception) -> None:
        if isinstance(error, KvchatError):
            self.say(str(error), Role.ERROR)
        else:
            self.report(error)

    async def _leave(self) -> None:
        self._runner.cancel_all()
        if self.failure is not None:
            self._unsent.take_back()
        queued = self._queue.texts
        await self.settle()
        self.num_unsent += bool(self._view.prompt_text.strip())
        if self.failure is not None:
            self._unsent.show((*queued, self._view.prompt_text))
        self._view.leave()

    async def settle(self) -> None:
        """Stop the answer in progress, and wait at most 2 s until its text is saved.

        Waiting messages are not sent any more.
        """
        self._unsent.settle()
        self.num_unsent += len(self._queue.clear())
        self._asked = None
        self.stop()
        try:
            async with asyncio.timeout(_STOP_PATIENCE_S), self._runner.turn_lock:
                pass
        except TimeoutError:
            _log.warning("the answer in progress did not stop in time")

    # Work

    async def work(self) -> None:
        """Answer waiting messages in order, until this task is cancelled."""
        while True:
            await self._wake.wait()
            await self._has_tools.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # a command that was typed before a message begins before it
            while (job := self._next_job()) is not None:
                async with self._runner.turn_lock:
                    try:
                        await job()
                    except Exception as error:
                        self.report(error)

    def _next_job(self) -> Callable[[], Awaitable[None]] | None:
        if self._asked is not None:
            return self._answer_asked
        return self._answer_message if self._queue.has_next else None

    async def _answer_message(self) -> None:
        if not self._queue.has_next:
            return  # the user took the message back for editing while a command held the lock
        text = self._queue.take()
        was_kept = self._unsent.is_kept
        self._unsent.sending()
        self._ahead.forget()
        self.refresh()
        is_sent = await self._answering.answer_message(text, self.stats_level)
        # Refused: no turn took it off the list, or the file is gone with what was typed meanwhile.
        if not is_sent and (was_kept or self._unsent.is_kept):
            self._unsent.keep(is_stale=True)
        self._answer_ended()

    async def _answer_asked(self) -> None:
        answer, self._asked = self._asked, None
        if answer is not None:
            await answer()
            self._answer_ended()

    def _answer_ended(self) -> None:
        self.conversation_changed()
        self._runner.spawn(self._tell_trouble())
        self.draft_changed(self._view.prompt_text)

    async def _tell_trouble(self) -> None:
        """Show a new problem of the KV store or of speculation; the chat continues."""
        if trouble := await self.controller.engine.new_trouble():
            self.say(trouble[:1].upper() + trouble[1:], Role.WARNING)

    # For commands

    def answer_again(self, options: AskOptions) -> None:
        """Answer the last message again, when no answer or command holds the lock."""
        self.controller.place.user_turn("")
        self._ask_soon(lambda: self._answering.answer_again(options, self.stats_level))

    def continue_answer(self) -> None:
        """Continue the last answer, when no answer or command holds the lock."""
        self.controller.require_conversation()
        self._ask_soon(lambda: self._answering.continue_answer(self.stats_level))

    def send_instead(self, turn: Turn, text: str) -> None:
        """Send a message in place of an earlier one, when no answer or command holds the lock."""
        self._ask_soon(lambda: self._answering.answer_message(text, self.stats_level, turn))

    def ask_aside(self, question: str) -> None:
        """Answer a question aside, when no answer or command holds the lock."""
        self.controller.require_conversation()
        self._ask_soon(lambda: self._answering.answer_aside(question, self.stats_level))

    def _ask_soon(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._asked = ask
        self._wake.set()

    async def show_summary(self, plan: CompactionPlan, focus: str) -> AnswerEnded:
        return await self._answering.show_summary(plan, focus, self.stats_level)

    def hide_thinking(self, is_hidden: bool) -> None:
        self._answering.hides_thinking = is_hidden

    def conversation_changed(self) -> None:
        """Update the toolbar's figures, after the tip has moved."""
        self._num_context_tokens = len(self.controller.context_ids)
        self._warmth = ""
        self._unsent.take()
        self._unsent.offer()
        self.refresh()
        self._runner.spawn(self._measure_warmth())

    async def _measure_warmth(self) -> None:
        """Show what the next message costs, once the engine knows: the disk may open slowly."""
        context_ids = self.controller.context_ids
        for _ in range(_WARMTH_TRIES):
            cost = await self.controller.engine.cost(context_ids)
            if context_ids != self.controller.context_ids or self.is_answering:
                return
            if cost is not None or not context_ids:
                break
        if cost is not None:
            self._warmth = warmth.for_toolbar(cost)
            self.refresh()

    async def _tell_cost_at_opening(self) -> None:
        cost = await self.controller.engine.cost_at_opening()
        if cost is not None:
            self.say(warmth.sentence(cost))

    def refresh(self) -> None:
        """Show the current state."""
        self._view.show(self._live_state())

    # Running commands

    def run_by_name(self, name: str, arguments: str = "") -> None:
        """Run a command."""
        command = self.registry.find(name)
        assert command is not None
        self._runner.begin(Invocation(command, arguments))

    def _command_failed(self, line: str, error: KvchatError) -> None:
        if line and self._answering.is_running:
            self._refuse(line, str(error))
        else:
            self.say(str(error), Role.ERROR)

    def _command_ended(self) -> None:
        self._wake.set()
        self.refresh()
        self.draft_changed(self._view.prompt_text)  # a file may be attached

    def report(self, error: BaseException) -> None:
        """Report an unexpected error in one sentence, and log its traceback."""
        self._runner.report(error)

    # The live state

    def _live_state(self) -> LiveState:
        return LiveState(
            tail=self._answering.tail,
            progress=self._answering.progress,
            notice=self._notice,
            queue=self._queue.texts,
            edited=self._queue.edited_index,
            commands=self._runner.waiting,
            toolbar=self._toolbar,
            is_open=self._answering.is_open,
        )

    @property
    def _meaning_of_escape(self) -> str:
        if self.is_answering:
            return "stops"
        return "twice gives it up" if self.controller.place.edited is not None else ""

    def _toolbar(self, width: int) -> str:
        controller, ready = self.controller, self.controller.host.ready
        facts = ToolbarFacts(
            model=model_label(controller.host.model.name),
            title=simple_emoji(one_line(controller.label, 48)),
            branch=controller.place.branch,
            context_tokens=self._answering.num_context_tokens or self._num_context_tokens,
            about=about(controller.host.model),
            context_limit=ready.told_context_limit if ready is not None else None,
            warmth=self._warmth,
            attached=attached_in_words(
                [file.name for file in controller.attached],
                self._ahead.share,
                self._ahead.is_too_long,
            ),
            answering=self._answering.words,
            loading=self._stage or self._waiting,
            editing=controller.place.editing,
            num_queued=len(self._queue),
            escape=self._meaning_of_escape,
            context_policy=controller.options.context_policy,
        )
        return toolbar(facts, width, self._view.painter.look.glyphs)
