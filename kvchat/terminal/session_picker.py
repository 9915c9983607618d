"""SessionPicker: lets the user pick a saved conversation from a list that tells them apart.

Each has what its next message costs. The KV of the highlighted one is prefetched; the next one
highlighted replaces it, and so does the open conversation if none is picked.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from kvchat.chat.keeping import delete_conversation
from kvchat.chat.saved_chats import SavedChat, read_chats
from kvchat.chat.store import SessionStore, SessionSummary
from kvchat.core.errors import KvchatError
from kvchat.core.text import one_line
from kvchat.terminal import warmth
from kvchat.terminal.commands import CommandContext
from kvchat.terminal.pickers import SEPARATOR
from kvchat.terminal.status import plural
from kvchat.terminal.view import Choice

# A highlight that moves on sooner prefetches nothing.
_PAUSE_S = 0.15
# Costs are looked up for so many conversations at a time, the newest first.
_BATCH = 25


async def pick_session(
    context: CommandContext, store: SessionStore, summaries: list[SessionSummary], title: str
) -> str | None:
    """Return the id of the conversation that the user picks; None if none."""
    chats = await asyncio.to_thread(read_chats, store, summaries)
    own = context.controller.conversation
    others = {each.session_id for each in summaries} - {own.session_id if own is not None else ""}
    elsewhere = await asyncio.to_thread(store.open_elsewhere, others)
    picker = SessionPicker(context, store, chats, elsewhere)
    if context.page.painter.look.is_plain:  # a list that cannot change once it is shown
        await picker.look_up()
        return await picker.choose(title)
    looking = asyncio.get_running_loop().create_task(picker.look_up())
    try:
        return await picker.choose(title)
    finally:
        looking.cancel()


class SessionPicker:
    """Implements `PickerActions` for the chats of one list; those `elsewhere` are open there."""

    def __init__(
        self,
        context: CommandContext,
        store: SessionStore,
        chats: list[SavedChat],
        elsewhere: Collection[str] = (),
    ) -> None:
        self._context = context
        self._store = store
        self._chats = chats
        all_hidden = all(chat.is_one_shot for chat in chats)
        self._choices = [
            _choice(chat, not all_hidden, chat.summary.session_id in elsewhere) for chat in chats
        ]
        self._prefetching: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Task[None]] = set()

    async def choose(self, title: str) -> str | None:
        """Show the list; return the id of the chat that is picked, None if none is."""
        index = None
        try:
            index = await self._context.page.choose(title, self._choices, 0, self)
        finally:
            await asyncio.gather(*self._deleting)
            if self._prefetching is not None:
                self._prefetching.cancel()
                if index is None:
                    controller = self._context.controller
                    controller.host.prefetch(controller.context_ids)
        return None if index is None else self._chats[index].summary.session_id

    async def look_up(self) -> None:
        """Enter into the list what each conversation's next message costs."""
        for start in range(0, len(self._chats), _BATCH):
            batch = self._chats[start : start + _BATCH]
            contexts = [list(chat.context_ids) for chat in batch]
            places = await self._context.controller.engine.locate(contexts)
            for number, each in enumerate(places or (), start=start):
                if each.num_tokens:
                    choice = self._choices[number]
                    detail = f"{warmth.for_list(each.cost())}{SEPARATOR}{choice.detail}"
                    self._choices[number] = replace(choice, detail=detail)
            self._context.page.choices_changed()

    # PickerActions

    def highlighted(self, index: int | None) -> None:
        if self._prefetching is not None:
            self._prefetching.cancel()
        self._prefetching = asyncio.get_running_loop().create_task(self._prefetch(index))

    async def _prefetch(self, index: int | None) -> None:
        await asyncio.sleep(_PAUSE_S)
        ids = list(self._chats[index].context_ids) if index is not None else []
        self._context.controller.host.prefetch(ids)

    def rename(self, index: int, title: str) -> None:
        chat, title = self._chats[index], one_line(title)
        session = self._context.controller.session
        if session is not None and session.session_id == chat.summary.session_id:
            session.rename(title)
            if (problem := self._context.controller.saving_problem()) is not None:
                self._context.notice(problem)
        elif not self._changed(lambda: self._store.rename(chat.summary.session_id, title)):
            return
        self._choices[index] = replace(self._choices[index], label=title, name=title)

    def delete(self, index: int) -> None:
        session_id = self._chats[index].summary.session_id
        session = self._context.controller.session
        if session is not None and session.session_id == session_id:
            self._context.notice("This conversation is open: /delete deletes it.")
        else:
            self._deleting.add(asyncio.get_running_loop().create_task(self._delete(index)))

    async def _delete(self, index: int) -> None:
        session_id = self._chats[index].summary.session_id
        try:
            gone = await delete_conversation(self._context.controller, session_id)
        except KvchatError as error:
            self._context.notice(str(error))
            return
        self._context.page.unlearn((session_id,), gone.texts)
        self._choices[index] = replace(self._choices[index], is_gone=True)
        self._context.page.choices_changed()
        if gone.trouble:
            self._context.notice(gone.trouble)

    def _changed(self, change: Callable[[], None]) -> bool:
        """Make a change; tell the user why, and return false, if the store refuses it."""
        try:
            change()
        except KvchatError as error:
            self._context.notice(str(error))
            return False
        return True


def _choice(chat: SavedChat, hides_one_shots: bool, is_open_elsewhere: bool) -> Choice:
    age = format_age(time.time() - chat.summary.modified_s)
    is_open = f"open elsewhere{SEPARATOR}" if is_open_elsewhere else ""
    return Choice(
        chat.label,
        f"{is_open}{age}{SEPARATOR}{plural(chat.summary.num_turns, 'turn')}",
        name=one_line(chat.summary.title),
        preview=chat.preview,
        searched=chat.text,
        is_hidden=chat.is_one_shot and hides_one_shots,
    )


def format_age(seconds: float) -> str:
    """Return a phrase for a time this many seconds ago."""
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    if minutes < 48 * 60:
        return f"{minutes // 60} h ago"
    return f"{minutes // (24 * 60)} days ago"
