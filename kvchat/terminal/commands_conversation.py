"""Commands on whole conversations: begin, resume, rename, export, import, delete, leave."""

import asyncio
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from kvchat.chat import documents
from kvchat.chat.controller import ChatController
from kvchat.chat.documents import import_file
from kvchat.chat.host import ChatHost
from kvchat.chat.keeping import delete_conversation
from kvchat.chat.saved_chats import SavedChat, read_chats
from kvchat.chat.store import SessionStore, SessionSummary
from kvchat.core.errors import (
    ExitCode,
    KvchatError,
    ModelError,
    SessionNotFound,
    StoreError,
    UsageError,
)
from kvchat.core.paths import is_same_place, user_path
from kvchat.core.text import format_age, model_label, one_line, whole_number
from kvchat.terminal import warmth
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.commands_engine import load_host, say_model
from kvchat.terminal.history_view import show_where_it_stands
from kvchat.terminal.pickers import SEPARATOR
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice

# The list says what the next message of each conversation costs. The KV of the highlighted one is
# prefetched; the next one highlighted replaces it, and so does the open conversation if none is
# picked.

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
    details = [*(["open elsewhere"] if is_open_elsewhere else []), age]
    details += [plural(chat.summary.num_turns, "turn")]
    details += [model_label(chat.model)] if chat.model else []
    return Choice(
        chat.label,
        SEPARATOR.join(details),
        name=one_line(chat.summary.title),
        preview=chat.preview,
        searched=chat.text,
        is_hidden=chat.is_one_shot and hides_one_shots,
    )


async def exit_(context: "CommandContext", arguments: str) -> None:
    """leave; the conversation is kept"""
    context.leave(ExitCode.OK)


async def new(context: "CommandContext", arguments: str) -> None:
    """begin another conversation"""
    kept = context.controller.session is not None and context.controller.host.store is not None
    problem = context.controller.begin_new(one_line(arguments))
    is_kept = kept and problem is None
    context.say("A new conversation." + (" The last one is kept: /resume." if is_kept else ""))
    if problem is not None:
        context.say(problem, Role.WARNING)
    context.conversation_changed()


async def resume(context: "CommandContext", arguments: str) -> None:
    """go on with a saved conversation"""
    store = _store(context)
    session_id = await _pick_session(context, store, arguments, "Go on with")
    if session_id is None:
        return
    await _go_on_with(context, session_id, takes_model=True)


async def import_(context: "CommandContext", arguments: str) -> None:
    """take over a conversation from a file, and go on with it"""
    store = _store(context)
    if not arguments:
        raise UsageError("/import needs a file: a session, or messages in JSON.", "/import PATH")
    path = user_path(arguments)
    session_id = await asyncio.to_thread(import_file, store, path)
    context.say(f"A copy of {one_line(str(path))} is saved and open.")
    await _go_on_with(context, session_id)


async def _go_on_with(
    context: "CommandContext", session_id: str, takes_model: bool = False
) -> None:
    """Open a conversation, with the model that it had if it `takes_model`."""
    old = await _open_with_its_model(context, session_id) if takes_model else None
    session = context.controller.open(session_id)
    for note in session.notes:
        context.say(note)
    show_where_it_stands(session.conversation, context.page)
    cost = await context.controller.engine.cost_at_opening()
    if cost is not None:
        context.say(warmth.sentence(cost))
    context.conversation_changed()
    if old is not None:
        await asyncio.to_thread(old.close)


async def _open_with_its_model(context: "CommandContext", session_id: str) -> ChatHost | None:
    """Open a conversation whose model is not the one here; return the host to close.

    None, and nothing is opened, if the model is the one here, a flag chose that, or the other
    cannot be loaded, which is said.
    """
    controller = context.controller
    try:
        read = await asyncio.to_thread(_store(context).read, session_id)
        name, here = read.model, controller.host.model.name
        is_here = not name or is_same_place(name, here) or controller.settings.keeps_model
        if is_here or _is_open(controller, session_id):
            return None
        host = await load_host(context, name, read.conversation.settings or {})
    except (ModelError, UsageError) as error:
        context.say(str(error), Role.WARNING)
        return None
    try:
        old = controller.open_with(host, session_id)
    except BaseException:
        await asyncio.to_thread(host.close)
        raise
    say_model(context)
    return old


def _is_open(controller: ChatController, session_id: str) -> bool:
    return controller.session is not None and controller.session.session_id == session_id


async def rename(context: "CommandContext", arguments: str) -> None:
    """give the conversation a title"""
    title = one_line(arguments)
    if not title:
        raise UsageError("A conversation needs a title.", "/rename TITLE")
    if context.controller.session is None:
        context.controller.title = title
    else:
        context.controller.session.rename(title)
    context.say(f"This conversation is called: {title}")
    if (problem := context.controller.saving_problem()) is not None:
        context.say(f"{problem} Until it is, the title is lost at the end.", Role.WARNING)
    context.refresh()


async def delete(context: "CommandContext", arguments: str) -> None:
    """delete this conversation or another, text and KV"""
    store = _store(context)
    controller = context.controller
    current = controller.session.session_id if controller.session is not None else None
    if arguments:
        session_id = await _pick_session(context, store, arguments, "Delete")
    else:
        session_id = current
    if session_id is None and arguments:
        context.say("Nothing is deleted.")
        return
    if session_id is None:
        raise UsageError(
            "No conversation is open here.",
            "/resume lists the saved ones, /delete NAME deletes one.",
        )
    label = _label(store, session_id)
    if not await context.confirm(f"Delete “{label}” for good?"):
        context.say(f"Kept: {label}")
        return
    gone = await delete_conversation(controller, session_id)
    context.page.unlearn((session_id,), gone.texts)
    context.conversation_changed()
    gone.require_all(f"Deleted: {label}", "/cache clear deletes all KV, once it can be reached.")
    context.say(f"Deleted: {label}")


def _label(store: SessionStore, session_id: str) -> str:
    """Return a session's label, or its id if it cannot be read."""
    try:
        return one_line(store.read(session_id).conversation.label, 48)
    except StoreError:
        return session_id


async def export(context: "CommandContext", arguments: str) -> None:
    """write the conversation to a file"""
    session = context.controller.require_session()
    kind, path = _export_target(arguments, session.session_id)
    if kind == "jsonl":
        content = documents.saved_document(_store(context), session.session_id)
    else:
        model = model_label(context.controller.host.model.name)
        content = documents.document(session.conversation, kind, model)
    documents.write_new(path, content)
    is_saved = context.controller.host.store and context.controller.saving_problem() is None
    also = " (Conversations are also saved by themselves.)" if is_saved else ""
    context.say(f"Written to {path}.{also}")


_KINDS = {**{kind: kind for kind in documents.KINDS}, "markdown": "md"}
_OTHER_KINDS = ("pdf", "txt", "text", "csv", "xml", "yaml", "docx")


def _export_target(arguments: str, session_id: str) -> tuple[str, Path]:
    """Return the kind of document and its path; the default name has no conversation text."""
    first, _, rest = arguments.partition(" ")
    word = first.lower().removeprefix(".")
    if word in _KINDS:
        kind, name = _KINDS[word], rest.strip()
    elif word in _OTHER_KINDS:
        raise UsageError(
            f"{one_line(first)} is no format of /export.", "/export md|html|json|jsonl"
        )
    else:
        name = arguments
        suffix = Path(name).suffix.removeprefix(".").lower()
        if suffix in _OTHER_KINDS and suffix != "txt":
            raise UsageError(
                f"{suffix} is no format of /export.", "/export md|html|json|jsonl PATH"
            )
        kind = documents.kind_of(Path(name))
    own_name = f"kvchat-{session_id}.{kind}"
    path = user_path(name or own_name)
    if path.is_dir():
        path /= own_name
    return kind, _free(path) if path.name == own_name else path


def _free(path: Path) -> Path:
    """Return `path`, or with a number before the suffix the first one that does not exist."""
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _store(context: "CommandContext") -> SessionStore:
    store = context.controller.host.store
    if store is None:
        raise UsageError("Nothing is saved in this chat, so there is nothing to go back to.")
    return store


async def _pick_session(
    context: "CommandContext", store: SessionStore, text: str, title: str
) -> str | None:
    """Return the session that a number, an id or title words name; else let the user pick one."""
    # One that was stepped back to its beginning, or has only what waits, has a title all the same.
    summaries = [
        summary
        for summary in await asyncio.to_thread(store.summaries)
        if summary.num_turns or summary.title or not summary.is_readable
    ]
    if not summaries:
        raise SessionNotFound("There is no saved conversation yet.")
    number = whole_number(text)
    if number is not None and 1 <= number <= len(summaries):
        return summaries[number - 1].session_id
    if text:
        exact = [s for s in summaries if s.session_id.startswith(text)]
        found = exact or [s for s in summaries if text.lower() in s.title.lower()]
        if not found:
            raise SessionNotFound(
                f"No saved conversation has {one_line(text)} in its title.",
                store.near(text) or "/resume lists them.",
            )
        if len(found) == 1:
            return found[0].session_id
        summaries = found
    return await pick_session(context, store, summaries, title)


COMMANDS = (
    Command(exit_, Group.CONVERSATION, aliases=("quit", "bye"), takes_turn=False),
    Command(new, Group.CONVERSATION, "[title]", ("clear", "reset")),
    Command(
        resume,
        Group.CONVERSATION,
        "[id or words]",
        ("load", "chats", "session"),
        argument=Argument.SESSION,
    ),
    Command(rename, Group.CONVERSATION, "TITLE", takes_turn=False),
    Command(delete, Group.CONVERSATION, "[id or words]", argument=Argument.SESSION),
    Command(
        export,
        Group.CONVERSATION,
        "[md|html|json|jsonl] [PATH]",
        ("save",),
        argument=Argument.PATH,
        subcommands=documents.KINDS,
    ),
    Command(import_, Group.CONVERSATION, "PATH", argument=Argument.PATH),
)
