"""Answering: sends one message after another and follows its reply to the end, on a face.

Knows the desk, replies and faces; when it is a message's turn is the dialogue's business.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import Attached, mentioned_files
from kvchat.chat.controller import Desk
from kvchat.chat.events import ChatEvent
from kvchat.chat.reply import Reply
from kvchat.chat.reply_stream import ReplyPump
from kvchat.core.errors import ContextTooLong, KvchatError
from kvchat.core.text import one_line
from kvchat.terminal.answer_view import AnswerView
from kvchat.terminal.paint import Row
from kvchat.terminal.status import format_seconds, plural
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice, Face, LiveView, tell

# Asks the chat floor for a reply; gets what the reply calls when something has happened.
_Ask = Callable[[Callable[[], None]], Reply]


@dataclass(slots=True)
class _Current:
    """The reply in progress."""

    reply: Reply
    pump: ReplyPump
    view: AnswerView
    is_stopping: bool = False


class Answering:
    """At most one reply is followed at a time. `whole_view` gives what the face shows besides."""

    def __init__(
        self,
        desk: Desk,
        face: Face,
        refresh: Callable[[], None],
        whole_view: Callable[[], LiveView],
    ) -> None:
        self._desk = desk
        self._face = face
        self._refresh = refresh
        self._whole_view = whole_view
        self._current: _Current | None = None

    @property
    def is_running(self) -> bool:
        return self._current is not None

    @property
    def tail(self) -> list[Row]:
        """Rows of the answer that are still open."""
        return self._current.view.tail if self._current is not None else []

    @property
    def progress(self) -> str:
        return self._current.view.progress if self._current is not None else ""

    @property
    def words(self) -> str:
        """What the answer in progress is doing, in a few words."""
        current = self._current
        if current is None:
            return ""
        if current.is_stopping:
            return "stopping"
        tokens = current.reply.num_tokens
        words = plural(tokens, "token") if tokens else "reading"
        seconds = int(current.view.elapsed_s)
        return f"{words} {format_seconds(float(seconds))}" if seconds else words

    def stop(self) -> None:
        """End the answer at the engine's next step; what there is of it is kept and shown."""
        if self._current is not None:
            self._current.is_stopping = True
            self._current.reply.cancel()
            self._current.pump.hurry()
            self._refresh()

    async def answer_message(self, text: str, shows_stats: bool) -> None:
        """Send a message with what is attached to it, and show the answer.

        What cannot be answered is in the prompt again, and its attachments are kept for it.
        """
        attached = self._desk.attached
        try:
            for path in mentioned_files(text):
                self._desk.attach(path)
            self._face.write_turn(text)
            names = ", ".join(one_line(file.name) for file in self._desk.attached)
            if names:
                tell(self._face, f"with {names}", gap=False)
            self._write_gap()
            view = await self._follow(lambda notify: self._desk.ask(text, notify), shows_stats)
        except KvchatError as error:
            self._give_back(text, attached)
            tell(self._face, str(error), Role.ERROR)
            return
        if view.failed is not None and isinstance(view.failed.error, ContextTooLong):
            self._give_back(text, attached)

    async def answer_again(self, options: AskOptions, shows_stats: bool) -> None:
        """Show another answer to the last message, or several to pick from."""
        self._write_gap()
        if options.num_samples > 1:
            tell(self._face, f"Answer 1 of {options.num_samples}", Role.TITLE, gap=False)
        try:
            view = await self._follow(lambda n: self._desk.retry(options, n), shows_stats)
        except KvchatError as error:
            tell(self._face, str(error), Role.ERROR)
            return
        if len(view.ended) > 1:
            self._face.write(view.others())
            await self._pick(view)

    async def continue_answer(self, shows_stats: bool) -> None:
        """Show the last answer going on from where it was cut off."""
        path = self._desk.require_conversation().path()

        def ask(notify: Callable[[], None]) -> Reply:
            reply = self._desk.continue_answer(notify)
            self._write_gap()
            return reply

        try:
            await self._follow(ask, shows_stats, path[-1].text if path else "")
        except KvchatError as error:
            tell(self._face, str(error), Role.ERROR)

    async def _follow(self, ask: _Ask, shows_stats: bool, said_before: str = "") -> AnswerView:
        """Ask, and show the answer until it ends."""
        ready = self._desk.host.ready
        limit = ready.context_limit if ready is not None else None
        view = AnswerView(self._face, limit, shows_stats, said_before)
        pump = ReplyPump(asyncio.get_running_loop(), lambda events: self._draw(view, events))
        self._current = _Current(ask(pump.notify), pump, view)
        try:
            await pump.run(self._current.reply)
        finally:
            self._current = None
            self._refresh()
        for ended in view.ended.values():
            self._desk.note_ended(ended)
            if words := self._desk.why_so_much(ended):
                tell(self._face, f"read again: {words} (/cache why)")
        return view

    def _give_back(self, text: str, attached: tuple[Attached, ...]) -> None:
        """Put a message back into the prompt, unless that is in use."""
        self._desk.attached = attached
        if not self._face.prompt_text:
            self._face.put_back(text)

    def _write_gap(self) -> None:
        if not self._face.painter.look.is_spoken:
            self._face.write([self._face.painter.text("")])

    def _draw(self, view: AnswerView, events: list[ChatEvent]) -> None:
        rows = view.take(events)
        if rows:
            self._face.write(rows, self._whole_view())
        else:
            self._face.show(self._whole_view())

    async def _pick(self, view: AnswerView) -> None:
        """Let the user say which of several answers the conversation goes on from."""
        ended = [view.ended[sample] for sample in sorted(view.ended)]
        choices = [
            Choice(f"answer {number}", one_line(answer.text, 56))
            for number, answer in enumerate(ended, start=1)
        ]
        index = await self._face.choose("Go on from", choices)
        self._desk.move(ended[index or 0].turn_id)
