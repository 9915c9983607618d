"""/pin, /unpin and /forget: what is never forgotten, and what is forgotten for good."""

import asyncio
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from kvchat.chat.attachment import read_attachment
from kvchat.chat.conversation import ROOT, Conversation, Role
from kvchat.chat.why import common_len
from kvchat.core.errors import KvchatError, StoreError, StoreInUse, UsageError
from kvchat.core.paths import user_path
from kvchat.terminal import kept_kv
from kvchat.terminal.commands import Argument, Command, Group
from kvchat.terminal.kept_kv import KeptKv
from kvchat.terminal.sanitize import one_line
from kvchat.terminal.status import plural

if TYPE_CHECKING:
    from kvchat.terminal.command_context import CommandContext
    from kvchat.terminal.desk import Desk

# Opening the disk tier and writing what waits may take so long; then it is not worth waiting for.
_PATIENCE_S = 30.0
_SURE = ("yes", "--yes")
# Messages that begin differently: what they have in common behind a file belongs to the file.
_PROBES = ("a", "Z")
# Another day, hour, minute and second.
_ANOTHER_TIME_S = 86400.0 + 3600.0 + 60.0 + 1.0
_USE = " A chat that begins with the same files starts warm."
_DATED_USE = (
    " The model's template writes the date before them: a chat that begins with the same files "
    "starts warm as long as that is the same."
)


async def pin(context: "CommandContext", arguments: str) -> None:
    kept = _kept(context)
    if arguments in ("list", "show"):
        lines = kept_kv.pin_lines(await asyncio.to_thread(kept.status))
        context.say("\n".join(lines) if lines else "Nothing is pinned.")
        return
    desk = context.desk
    await asyncio.to_thread(desk.host.wait_until_ready)
    use = ""
    if arguments:
        label, paths = _label_and_paths(arguments)
        now_s = time.time()
        # Long files take seconds to read and tokenise: the prompt stays alive meanwhile.
        token_ids = await asyncio.to_thread(_file_context, desk, paths, now_s)
        openings = [_file_context(desk, (), at_s) for at_s in (now_s, now_s + _ANOTHER_TIME_S)]
        is_dated = openings[0] != openings[1]
        use = _DATED_USE if is_dated else _USE
        await asyncio.wrap_future(desk.host.read(token_ids))
    else:
        token_ids, label = desk.context_ids, desk.require_session().session_id
        if not token_ids:
            raise UsageError("There is nothing to pin yet.", "/pin FILE... pins files.")
    num_tokens = await _pinned(desk, token_ids, label)
    name = f"{one_line(label, 64)}: " if arguments else ""
    context.say(
        f"Pinned: {name}{num_tokens:,} of {plural(len(token_ids), 'token')} stay on disk.{use}"
    )


async def _pinned(desk: "Desk", token_ids: list[int], label: str) -> int:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = await asyncio.wrap_future(desk.host.pin(token_ids, label))
    except TimeoutError:
        raise UsageError("The disk cache does not answer.", "Try again in a moment.") from None
    if not num_tokens:
        raise UsageError(
            "Nothing of it is kept on disk, so there is nothing to pin.",
            "It may be shorter than a block, or --disk-cache has no room: /stats.",
        )
    return num_tokens


def _label_and_paths(arguments: str) -> tuple[str, list[Path]]:
    """Read `[NAME] FILE...`: the first word is a name if it is no file and others follow."""
    try:
        words = shlex.split(arguments)
    except ValueError:
        words = [arguments]
    first = user_path(words[0])
    has_name = len(words) > 1 and not first.exists() and not glob(str(first))
    paths = [path for word in words[has_name:] for path in _matches(word)]
    return (words[0] if has_name else " ".join(path.name for path in paths)), paths


def _matches(word: str) -> list[Path]:
    path = user_path(word)
    found = [] if path.exists() else sorted(glob(str(path)))
    return [Path(name) for name in found] or [path]


def _file_context(desk: "Desk", paths: Iterable[Path], created_s: float) -> list[int]:
    """Return how a conversation begins whose first message has these files attached.

    `created_s` is when it begins: a template may write the date.
    """
    text = "".join(f"{read_attachment(path)}\n" for path in paths)
    empty = Conversation("", created_s, desk.system)
    one, other = (desk.host.model.user_ids(empty, ROOT, text + end, desk.system) for end in _PROBES)
    return list(one[: common_len(one, other)])


async def unpin(context: "CommandContext", arguments: str) -> None:
    kept = _kept(context)
    status = await asyncio.to_thread(kept.status)
    labels = {pin.label for model_dir in status.model_dirs for pin in model_dir.pins}
    if arguments == "all":
        wanted = labels
    elif arguments:
        wanted = {arguments} & labels
    else:
        wanted = {context.desk.require_session().session_id} & labels
    if not wanted:
        raise UsageError("There is no such pin.", "/pin list shows them.")
    for label in wanted:
        await asyncio.to_thread(kept.unpin, label)
    context.say(f"{plural(len(wanted), 'pin')} removed. What it held may be forgotten now.")


async def forget(context: "CommandContext", arguments: str) -> None:
    *words, last = arguments.split() or [""]
    is_sure = last in _SURE
    what = " ".join(words if is_sure else [*words, last]).strip()
    if what not in ("", "last", "conversation"):
        raise UsageError(f"{one_line(what)} is unknown here.", "/forget [last]")
    desk = context.desk
    if desk.session is None:
        raise UsageError("The conversation is empty.")
    is_last = what == "last"
    question = (
        f"Forget {'the last turn' if is_last else 'this conversation'} for good, text and KV? "
        "What others share stays."
    )
    if not is_sure and not await _confirm(context, question):
        context.say("Nothing is forgotten.")
        return
    texts = _texts(desk.session.conversation, is_last)
    gone = await (_forget_last(desk) if is_last else _forget_conversation(desk))
    context.face.unlearn(texts)
    context.conversation_changed()
    forgotten = f"Forgotten: {'the last turn' if is_last else 'the conversation'}"
    if gone.trouble:
        raise StoreError(
            f"{forgotten}, but not what may be kept of its KV. {gone.trouble}",
            "/cache clear deletes all KV, once it can be reached.",
        )
    told = f", and {plural(gone.num_blocks, 'block')} of KV on disk" if desk.kept else ""
    context.say(f"{forgotten}{told}.")


def _texts(conversation: Conversation, is_last: bool) -> set[str]:
    """Return what the user said in what is to be forgotten."""
    turns = [turn.text for turn in conversation.turns() if turn.role is Role.USER]
    last = [turn.text for turn in conversation.path() if turn.role is Role.USER][-1:]
    return set(last if is_last else turns)


async def _confirm(context: "CommandContext", question: str) -> bool:
    try:
        return await context.confirm(question)
    except UsageError as error:
        raise UsageError(error.message, "In a script: /forget yes, or /forget last yes") from error


@dataclass(frozen=True, slots=True)
class _GoneKv:
    """How many blocks went from disk. `trouble` says in a sentence why none could."""

    num_blocks: int = 0
    trouble: str = ""


async def _forget_conversation(desk: "Desk") -> _GoneKv:
    """KV goes first: whoever is interrupted still has the words to do it again."""
    session = desk.session
    assert session is not None
    store, session_id = desk.host.store, session.session_id
    contexts = session.conversation.contexts()
    if store is not None:
        contexts += store.read(session_id).conversation.contexts()  # as another model wrote them
    shared = await asyncio.to_thread(_others, desk, session_id)
    gone = await _forget_kv(desk, contexts, shared, session_id)
    desk.begin_new()
    if store is not None:
        store.remove(session_id)
    return gone


async def _forget_last(desk: "Desk") -> _GoneKv:
    session = desk.require_session()
    conversation = session.conversation
    asked = [turn for turn in conversation.path() if turn.role is Role.USER]
    if not asked:
        raise UsageError("There is nothing to forget.")
    last = asked[-1]
    below = conversation.contexts(last.turn_id)
    beside = [ids for ids in conversation.contexts() if ids not in below]
    before = conversation.context_ids(last.parent_id)
    others = await asyncio.to_thread(_others, desk, session.session_id)
    gone = await _forget_kv(desk, below, [*others, *beside, before], "")
    desk.forget(last.turn_id)
    return gone


async def _forget_kv(
    desk: "Desk", contexts: list[list[int]], shared: list[list[int]], label: str
) -> _GoneKv:
    """Remove the KV of contexts, as far as it is not shared. Raises StoreInUse where others are at
    the store: that passes, and the words stay to do it again by. What does not pass keeps no words.
    """
    kept_lengths = [
        max((common_len(ids, other) for other in shared), default=0) for ids in contexts
    ]
    if desk.host.ready is not None:
        asked = desk.host.forget(list(zip(contexts, kept_lengths, strict=True)))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.wrap_future(asked)
        except TimeoutError:
            raise UsageError("The disk cache does not answer.", "Try again.") from None
    if desk.kept is None:
        return _GoneKv()
    try:
        return _GoneKv(await asyncio.to_thread(desk.kept.forget, contexts, shared, label))
    except StoreInUse:
        raise
    except StoreError as error:
        return _GoneKv(trouble=one_line(error.message, 4096))


def _others(desk: "Desk", session_id: str) -> list[list[int]]:
    """Return the contexts of all other saved conversations."""
    store = desk.host.store
    contexts = []
    for other in store.ids() if store is not None else ():
        if other == session_id:
            continue
        try:
            contexts += store.read(other).conversation.contexts() if store is not None else []
        except KvchatError:  # a damaged one says nothing of what it shares
            continue
    return contexts


def _kept(context: "CommandContext") -> KeptKv:
    if context.desk.kept is None:
        raise UsageError("This chat keeps no KV on disk, so nothing can be pinned.")
    return context.desk.kept


COMMANDS = (
    Command(
        "pin",
        "keep the KV of this conversation so far, or of files, while there is room",
        pin,
        Group.INPUT,
        "[[NAME] FILE...|list]",
        argument=Argument.PATH,
    ),
    Command("unpin", "let it be forgotten again", unpin, Group.INPUT, "[NAME|all]"),
    Command(
        "forget",
        "delete this conversation or its last turn, text and KV, for good",
        forget,
        Group.ENGINE,
        "[last]",
    ),
)
