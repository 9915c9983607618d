"""Answering: sends a message and shows its reply on a view until it ends.

The dialogue decides when a message is sent.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvchat.chat.answer_settings import AskOptions, ContextPolicy
from kvchat.chat.attachment import Attached, unattached
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role as Speaker
from kvchat.chat.conversation import Turn
from kvchat.chat.events import AnswerEnded, AnswerFailed, ChatEvent
from kvchat.chat.keeping import keep_project
from kvchat.chat.making_room import summarise
from kvchat.chat.messages import answer_place
from kvchat.chat.reply import Reply
from kvchat.chat.turn_loop import EndlessCalls, ReplyStream, TurnLoop
from kvchat.core.errors import ContextTooLong, KvchatError, StoreError
from kvchat.core.text import one_line
from kvchat.terminal.answer_view import AnswerView, error_in_words
from kvchat.terminal.history_view import turn_summary
from kvchat.terminal.paint import Row
from kvchat.terminal.room import RoomMaker
from kvchat.terminal.status import StatsLevel, about, format_seconds, plural
from kvchat.terminal.theme import Role
from kvchat.terminal.tool_use import ToolUse
from kvchat.terminal.view import Choice, LiveState, View, tell

# A text with more characters for each token of the context does not fit with any tokenizer.
_CHARS_A_TOKEN = 16

# Starts a reply; its argument is the function that the reply calls when it has events.
_Ask = Callable[[Callable[[], None]], Reply]


@dataclass(slots=True)
class _Current:
    """The reply in progress; `num_before` tokens are before it, None for one that is aside."""

    reply: Reply
    stream: ReplyStream
    answer_view: AnswerView
    num_before: int | None
    is_stopping: bool = False


def _whole(text: str, attached: tuple[Attached, ...]) -> str:
    return "\n".join([*(file.text for file in attached), text])


class Answering:
    """Shows at most one reply at a time. `live_state` returns the state below the rows."""

    def __init__(
        self,
        controller: ChatController,
        view: View,
        refresh: Callable[[], None],
        live_state: Callable[[], LiveState],
        tools: ToolUse,
    ) -> None:
        self._controller = controller
        self._view = view
        self._refresh = refresh
        self._live_state = live_state
        self._current: _Current | None = None
        self._tools = tools
        self.hides_thinking = False
        self._name = "the answer"
        self._room = RoomMaker(
            controller,
            lambda plan: self.show_summary(plan, "", StatsLevel.OFF, is_unseen=True),
            lambda text: tell(view, text),
        )

    @property
    def is_running(self) -> bool:
        return self._current is not None or bool(self._tools.running)

    @property
    def is_open(self) -> bool:
        """Whether rows of the answer are shown, and not yet its last."""
        return self._current is not None and self._current.answer_view.has_text

    @property
    def name(self) -> str:
        """What is written or run, with its article."""
        return "the tool" if self._tools.running else self._name

    @property
    def tail(self) -> list[Row]:
        """The rows of the answer that may still change."""
        return self._current.answer_view.tail if self._current is not None else []

    @property
    def progress(self) -> str:
        return self._current.answer_view.progress if self._current is not None else ""

    @property
    def words(self) -> str:
        """The activity of the answer in progress, in a few words; "" while the model loads."""
        current = self._current
        if current is None:
            return f"running {self._tools.running}" if self._tools.running else ""
        if current.is_stopping:
            return "stopping"
        if self._controller.host.ready is None:
            return ""
        tokens = current.reply.num_tokens
        some = about(self._controller.host.model)
        words = some + plural(tokens, "token") if tokens else "reading"
        words = f"summarising, {words}" if current.answer_view.is_unseen else words
        seconds = int(current.answer_view.elapsed_s)
        return f"{words} {format_seconds(float(seconds))}" if seconds else words

    @property
    def num_context_tokens(self) -> int | None:
        """The tokens of the context with the answer so far; None if no answer joins it now."""
        if self._current is None or self._current.num_before is None:
            return None
        reply = self._current.reply
        return self._current.num_before + reply.num_tokens // reply.num_samples

    def model_is_ready(self) -> None:
        """Show the time of an answer that has waited for the model from now on."""
        if self._current is not None:
            self._current.answer_view.model_is_ready()

    def stop(self) -> None:
        """End the answer at the engine's next step; its text so far is saved and shown.

        A tool that runs is stopped.
        """
        self._tools.stop()
        if self._current is not None:
            self._current.is_stopping = True
            self._current.reply.cancel()
            self._current.stream.hurry()
            self._refresh()

    async def answer_message(
        self, text: str, stats_level: StatsLevel, edited: Turn | None = None
    ) -> bool:
        """Send a message with its attached files, and show the answer; false if it was refused.

        It takes the place of `edited`, or of the message that is being edited. If it cannot be
        answered, it goes back into the prompt, and the files stay attached.
        """
        attached = self._controller.attached
        edited = edited or self._controller.place.edited
        self._controller.place.edited = edited
        try:
            notes = self._controller.attach_mentioned(text)
            self._view.write_turn(text)
            sent = self._controller.attached
            names = ", ".join(one_line(file.name) for file in sent)
            if names:
                indent = "" if self._view.painter.look.is_plain else "  "
                tell(self._view, f"{indent}with {names}", gap=False)
            for note in notes:
                tell(self._view, note, gap=False)
            for why in unattached(text, self._controller.pins.paths()):
                tell(self._view, f"{why}: sent as text.", gap=False)
            self._write_gap()
            await self._wait_for_limit()
            if not await self._room.make(text):
                self._give_back(text, attached, edited)
                return False
            answer_view = await self._follow(
                lambda notify: self._controller.ask(text, notify),
                stats_level,
                asked=_whole(text, sent),
            )
        except KvchatError as error:
            asked = _whole(text, self._controller.attached)
            tell(self._view, await self._in_words(error, asked), Role.ERROR)
            # What is too long or cannot be saved is refused again as it is.
            gives_way = isinstance(error, StoreError | ContextTooLong)
            self._give_back(text, attached, edited, gives_way)
            return False
        if answer_view.too_long is not None:
            self._controller.drop_refused(is_given_back=not self._view.prompt_text)
            self._give_back(text, attached, edited, gives_way=True)
            return False
        await self._use_tools(answer_view.ended.values(), stats_level)
        await self._room.make_early()
        return True

    async def _use_tools(self, ended: Collection[AnswerEnded], stats_level: StatsLevel) -> None:
        """Run the calls of an answer, and show the answers to their results, until none calls."""
        turn = TurnLoop(self._controller.give_results, self._controller.hold_results)
        while calls := turn.calls(ended):
            results = await self._tools.results(calls)
            self._write_gap()
            if self._tools.was_stopped:
                turn.hold(results)
                tell(self._view, "Stopped. What the tools returned goes with your next message.")
                return
            try:
                if not await self._room.make(None, results):
                    turn.hold(results)
                    return
                answer_view = await self._follow(partial(turn.answer, results), stats_level)
                ended = answer_view.ended.values()
            except EndlessCalls as error:
                tell(self._view, f"{error.message} Send any message to go on.")
                return
            except KvchatError as error:
                tell(self._view, str(error), Role.ERROR)
                return

    async def answer_again(self, options: AskOptions, stats_level: StatsLevel) -> None:
        """Show another answer to the last message, or several to pick from."""
        self._write_gap()
        num_before = self._controller.place.num_answers
        if options.num_samples > 1:
            count = num_before + options.num_samples
            tell(self._view, f"Answer {num_before + 1} of {count}", Role.TITLE, gap=False)
        try:
            answer_view = await self._follow(
                lambda n: self._controller.retry(options, n), stats_level
            )
        except KvchatError as error:
            tell(self._view, str(error), Role.ERROR)
            return
        ended: Collection[AnswerEnded] = answer_view.ended.values()
        if len(ended) > 1:
            self._view.write(answer_view.others(num_before))
            ended = [await self._pick(answer_view)]
        await self._use_tools(ended, stats_level)

    async def continue_answer(self, stats_level: StatsLevel) -> None:
        """Continue the cut-off last answer, and show it."""

        def ask(notify: Callable[[], None]) -> Reply:
            reply = self._controller.continue_answer(notify)
            self._write_gap()
            return reply

        try:
            if not await self._room.make(None):
                return
            path = self._controller.require_conversation().path()
            is_begun = bool(path) and path[-1].role is Speaker.ASSISTANT
            answer_view = await self._follow(ask, stats_level, path[-1].text if is_begun else "")
        except KvchatError as error:
            tell(self._view, str(error), Role.ERROR)
            return
        await self._use_tools(answer_view.ended.values(), stats_level)

    async def answer_aside(self, question: str, stats_level: StatsLevel) -> None:
        """Show the answer to a question that does not join the conversation."""
        tell(self._view, "aside, not part of the conversation:", Role.TITLE, gap=False)
        try:
            await self._follow(
                lambda n: self._controller.ask_aside(question, n), stats_level, joins=False
            )
        except KvchatError as error:
            tell(self._view, str(error), Role.ERROR)

    async def show_summary(
        self, plan: CompactionPlan, focus: str, stats_level: StatsLevel, is_unseen: bool = False
    ) -> AnswerEnded:
        """Show a summary while the model writes it, but for one that `is_unseen`; raises the error
        that prevented it.
        """
        self._name = "the summary"
        try:
            answer_view = await self._follow(
                lambda n: summarise(self._controller, plan, focus, n),
                stats_level,
                joins=False,
                is_unseen=is_unseen,
            )
        finally:
            self._name = "the answer"
        failure = answer_view.failed.error if answer_view.failed else self._controller.host.failure
        if failure is not None:
            raise failure
        return answer_view.ended[0]

    async def _wait_for_limit(self) -> None:
        """Wait until the context's limit is known, if a message may need room to be made."""
        is_stopped = self._controller.options.context_policy is ContextPolicy.STOP
        if not is_stopped and self._controller.context_ids and self._controller.host.ready is None:
            with suppress(KvchatError):  # the answer tells it
                await asyncio.wrap_future(self._controller.host.loaded())

    def _context_limit(self) -> int | None:
        ready = self._controller.host.ready
        return ready.told_context_limit if ready is not None else None

    async def _follow(
        self,
        ask: _Ask,
        stats_level: StatsLevel,
        said_before: str = "",
        joins: bool = True,
        is_unseen: bool = False,
        asked: str = "",
    ) -> AnswerView:
        """Start a reply, which `joins` the conversation or not, and show it until it ends.

        `asked` is the whole text of a new message.
        """
        answer_view = AnswerView(
            self._view,
            self._context_limit,
            stats_level,
            said_before,
            self.hides_thinking,
            is_unseen=is_unseen,
        )
        stream = ReplyStream(
            asyncio.get_running_loop(), lambda events: self._draw(answer_view, events)
        )
        reply = ask(stream.notify)
        num_before = len(self._controller.context_ids) if joins else None
        self._current = _Current(reply, stream, answer_view, num_before)
        try:
            await stream.run(self._current.reply)
            self._note_ended(answer_view)
            if (too_long := answer_view.too_long) is not None and not is_unseen:
                tell(self._view, await self._in_words(too_long, asked), Role.ERROR)
        finally:
            self._current = None
            self._refresh()
        return answer_view

    def _note_ended(self, answer_view: AnswerView) -> None:
        """Remember how the answers ended, and say why more was read than the message."""
        painter, width = self._view.painter, self._view.render_context.width
        for ended in answer_view.ended.values():
            self._controller.note_ended(ended)
            keep_project(self._controller)
            if words := self._controller.why_so_much(ended):
                said = painter.wrapped(f"read again: {words} (/cache why)", width, Role.NOTE)
                self._view.write([*said, painter.text("")], self._live_state())

    async def _in_words(self, error: KvchatError, asked: str) -> str:
        """Return an error with what helps: of `asked` that no conversation has room for, a part."""
        controller, ready = self._controller, self._controller.host.ready
        if not isinstance(error, ContextTooLong) or ready is None:
            return str(error)
        some, limit = about(controller.host.model), ready.context_limit
        size, num_asked = f"{len(asked):,} characters", len(asked)
        if len(asked) < _CHARS_A_TOKEN * limit:  # counting megabytes takes minutes
            num_asked = await asyncio.to_thread(controller.num_tokens, asked)
            size = f"{some}{num_asked:,} tokens"
        num_before, what_has, way = self._before_messages()
        is_first = not controller.context_ids
        if num_before >= limit or (is_first and num_before > num_asked > 0):
            tokens = f"{some}{num_before:,} tokens, and the context holds {limit:,} in all"
            return f"{what_has} {tokens}: {way}."
        if num_asked < limit and not (is_first and asked):
            return error_in_words(error)
        holds = f"and the context holds {limit:,} with what stands around it"
        or_raise = ", or raise --device-cache" if "--device-cache" in error.hint else ""
        return f"Your message alone has {size}, {holds}: send a part of it{or_raise}."

    def _before_messages(self) -> tuple[int, str, str]:
        """Return the tokens of the longest of what stands before all messages, and words on it."""
        controller = self._controller
        tools = controller.tools.text if controller.tools else ""
        # A conversation that has begun may have another system prompt.
        system = controller.system or "" if not controller.context_ids else ""
        return max(
            (
                controller.num_tokens(tools),
                "The tools have",
                "start without --tools, or with fewer",
            ),
            (controller.num_tokens(system), "The system prompt has", "/system sets a shorter one"),
        )

    def _give_back(
        self,
        text: str,
        attached: tuple[Attached, ...],
        edited: Turn | None,
        gives_way: bool = False,
    ) -> None:
        """Put a message back into the prompt, unless the prompt has text, which is another message:
        then no message is being edited any more.

        If it `gives_way`, it would be refused again as it is: what is typed takes its place.
        """
        self._controller.attached = attached
        has_room = not self._view.prompt_text
        self._controller.place.edited = edited if has_room else None
        if not has_room:
            return
        self._view.put_back(text, gives_way)
        if gives_way and not self._view.painter.look.is_plain:
            words = "Your message is in the prompt again. Typing replaces it; Up returns it."
            tell(self._view, words)

    def _write_gap(self) -> None:
        if not self._view.painter.look.is_spoken:
            self._view.write([self._view.painter.text("")])

    def _draw(self, answer_view: AnswerView, events: list[ChatEvent]) -> None:
        # Leaving tells why there is no model; here it would be said twice.
        failure = self._controller.host.failure
        events = [e for e in events if not (isinstance(e, AnswerFailed) and e.error is failure)]
        rows = answer_view.take(events)
        if rows:
            self._view.write(rows, self._live_state())
        else:
            self._view.show(self._live_state())

    async def _pick(self, answer_view: AnswerView) -> AnswerEnded:
        """Let the user choose which of several answers becomes the tip; return that one."""
        ended = [answer_view.ended[sample] for sample in sorted(answer_view.ended)]
        conversation = self._controller.require_conversation()
        turns = [conversation.turn(answer.turn_id) for answer in ended]
        choices = [
            # The number that the toolbar and /tree show: earlier answers count.
            Choice(f"answer {answer_place(conversation, turn)[0]}", turn_summary(turn, 56))
            for turn in turns
        ]
        picked = ended[await self._view.choose("Go on from", choices) or 0]
        self._controller.place.move(picked.turn_id)
        return picked
