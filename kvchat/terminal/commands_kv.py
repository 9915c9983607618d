"""/cache, /pin, /unpin and /forget: inspect, pin and remove the KV on disk."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from glob import glob
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from kvchat.chat.attachment import matching_files
from kvchat.chat.controller import ChatController
from kvchat.chat.keeping import (
    delete_conversation,
    delete_last_turn,
    file_context,
    pin_context,
    share_context,
    thin_pin,
    thin_pins,
)
from kvchat.chat.saved_chats import named_contexts, titles
from kvchat.core.errors import UsageError
from kvchat.core.paths import user_path
from kvchat.core.text import format_bytes, one_line, parse_size, shown
from kvchat.core.types import KeptPositions
from kvchat.terminal import cache_lines
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.commands_input import split_words
from kvchat.terminal.status import plural

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin

T = TypeVar("T")

_USAGE = "/cache [status|tree|why|verify|gc|clear|path]"
_HANGING = 4  # more than the lines of a list are indented


async def cache(context: "CommandContext", arguments: str) -> None:
    """KV kept on disk: how much; read it all, tidy it up, delete it"""
    if arguments == "why":
        context.say("\n".join(one_line(line, 4096) for line in context.controller.why()))
        return
    kept = context.controller.kept
    if kept is None:
        raise UsageError("This chat keeps no KV on disk.", "`kvchat cache` shows what others kept.")
    if arguments in ("clear", "clear --yes", "drop", "drop --yes"):
        await _clear(context, kept, needs_no_yes=arguments.endswith("--yes"))
        return
    if arguments == "path":
        context.say(one_line(str(kept.directory), 4096))
    elif arguments in ("", "status"):
        status = await asyncio.to_thread(kept.status)
        names = await asyncio.to_thread(titles, context.controller.host.store)
        context.say("\n".join(cache_lines.status_lines(status, names)), hanging=_HANGING)
    elif arguments == "tree":
        glyphs = context.page.painter.look.glyphs
        named = await asyncio.to_thread(named_contexts, context.controller.host.store)
        trees = await asyncio.to_thread(kept.tree, named)
        width = context.page.render_context.width
        context.say("\n".join(cache_lines.tree_lines(trees, glyphs, width)), hanging=_HANGING)
    elif arguments == "verify":
        reading = _while_wanted(kept.verify)
        stage, left = "reading all KV on disk", "not all KV on disk is verified."
        context.say(cache_lines.verified_line(await context.stoppable(reading, stage, left)))
    elif arguments == "gc":
        context.say(cache_lines.collected_line(await asyncio.to_thread(kept.gc)))
    else:
        raise UsageError(f"{one_line(arguments)} is unknown here.", _USAGE)


async def _clear(context: "CommandContext", kept: "StoreAdmin", needs_no_yes: bool) -> None:
    status = await asyncio.to_thread(kept.status)
    if not needs_no_yes and not await context.confirm(cache_lines.clearing_question(status)):
        context.say("Nothing is deleted.")
        return
    context.say(cache_lines.cleared_line(await asyncio.to_thread(kept.clear)))


async def _while_wanted(work: "Callable[[Callable[[], bool]], T]") -> T:
    """Run a long task on a thread; the thread ends soon if this coroutine is cancelled."""
    is_over = Event()
    try:
        return await asyncio.to_thread(work, lambda: not is_over.is_set())
    finally:
        is_over.set()


# `/file clear` and `/unpin all` mean something else.
_NO_LABELS = ("all", "clear")
_MAX_LABEL_CHARS = 64
_SURE = ("yes", "--yes")
_KEEP = re.compile(r"(?<!\S)--keep(?:[ =]+(\S+))?(?!\S)")
_NOT_PINNED = "nothing is pinned."
# Another day, hour, minute and second.
_ANOTHER_TIME_S = 86400.0 + 3600.0 + 60.0 + 1.0
_DATED = " The template writes the date before them: that holds as long as the date is the same."


async def pin(context: "CommandContext", arguments: str) -> None:
    """keep the KV of this conversation so far, or of files, while there is room"""
    kept = _kept(context)
    if arguments in ("list", "show"):
        names = await asyncio.to_thread(titles, context.controller.host.store)
        status = await asyncio.to_thread(kept.status)
        files = await asyncio.to_thread(context.controller.pins.paths)
        lines = [*cache_lines.pin_lines(status, names), *cache_lines.unkept_lines(status, files)]
        shares = await asyncio.to_thread(context.controller.pins.thinned.shares)
        lines += [
            f"{one_line(label, 64)}: keeps {part:.0%} of its KV in memory"
            for label, part in shares.items()
        ]
        context.say("\n".join(lines) if lines else "Nothing is pinned.", hanging=_HANGING)
        return
    controller = context.controller
    loaded = asyncio.wrap_future(controller.host.loaded())
    await context.stoppable(loaded, "waiting for the model", _NOT_PINNED)
    arguments, share = _kept_share(arguments)
    is_shared, arguments = _asks_to_share(arguments)
    if arguments:
        pinned = await asyncio.to_thread(controller.pins.paths)
        label, paths = _label_and_paths(arguments, pinned)
        token_ids = await _pin_files(context, label, paths, share)
    else:
        if share is not None:
            raise UsageError("--keep needs a pin of files.", "/pin NAME FILE... --keep 25%")
        token_ids = controller.context_ids
        label = controller.require_session().session_id
        if not token_ids:
            raise UsageError("There is nothing to pin yet.", "/pin FILE... pins files.")
        num_tokens = await pin_context(controller, token_ids, label)
        context.say(f"Pinned: {num_tokens:,} of {plural(len(token_ids), 'token')} stay on disk.")
    if is_shared and token_ids:
        await _share_pin(context, token_ids)


async def _share_pin(context: "CommandContext", token_ids: list[int]) -> None:
    """Let other machines have a context that was pinned, and say what it weighs."""
    num_tokens = await share_context(context.controller, token_ids)
    status = await context.controller.engine.status()
    num_bytes = num_tokens * status.block_bytes // status.block_size if status is not None else 0
    context.say(
        f"Shared: {num_tokens:,} of {plural(len(token_ids), 'token')}, {format_bytes(num_bytes)}."
    )


def _asks_to_share(arguments: str) -> tuple[bool, str]:
    """Return whether the first word asks to share the pin, and the other words."""
    first, _, rest = arguments.partition(" ")
    return (True, rest.strip()) if first == "--share" else (False, arguments)


async def _pin_files(
    context: "CommandContext", label: str, paths: list[Path], share: float | None
) -> list[int]:
    """Pin files; of their KV in memory a share stays, or all if `share` is None.

    Returns their token ids, none where the user does not want to pin them.
    """
    controller, now_s = context.controller, time.time()
    # On a thread: long files take seconds to read and tokenise, and the prompt stays usable.
    encoding = asyncio.to_thread(file_context, controller, paths, now_s)
    token_ids = await context.stoppable(encoding, "reading the files", _NOT_PINNED)
    limit = controller.host.ready.context_limit if controller.host.ready is not None else None
    if limit is not None and len(token_ids) >= limit:
        raise UsageError(
            f"These files have {len(token_ids):,} tokens, and the context holds {limit:,}.",
            "Pin fewer of them.",
        )
    openings = [file_context(controller, (), at_s) for at_s in (now_s, now_s + _ANOTHER_TIME_S)]
    is_dated = openings[0] != openings[1]
    cost = await controller.engine.cost(token_ids)
    if not await context.confirm_cost(cost, "/pin", "reads"):
        return []
    reading = asyncio.wrap_future(controller.host.read(token_ids))
    stage = f"reading {plural(len(token_ids), 'token')} for the pin"
    await context.stoppable(reading, stage, f"{_NOT_PINNED} What was read stays cached.")
    num_tokens = await pin_context(controller, token_ids, label)
    await asyncio.to_thread(controller.pins.put, label, paths)
    controller.pins.thinned.remove([label])
    thin_pins(controller)
    context.say(
        f"Pinned {one_line(label, 64)}: {num_tokens:,} of {plural(len(token_ids), 'token')} stay "
        f"on disk. {_attaching(label)}{_use(controller)}{_DATED if is_dated else ''}"
    )
    if share is not None and share < 1:
        thinning = thin_pin(controller, token_ids, label, share)
        stage = f"choosing which of {plural(len(token_ids), 'token')} to keep"
        kept = await context.stoppable(thinning, stage, "all of the pin's KV stays.")
        context.say(_thinned(kept, label))
    return token_ids


def _thinned(kept: KeptPositions, label: str) -> str:
    """Return sentences on a pin of which some KV is dropped."""
    share = len(kept.positions) / kept.num_tokens
    return (
        f"Kept {share:.0%} of {kept.num_tokens:,} positions ({kept.method}): chats that begin with "
        "this pin answer over these. What they add is not kept on disk: after a restart it is read "
        f"again. /pin {one_line(label, 64)} --keep 100% takes it back."
    )


def _use(controller: ChatController) -> str:
    """Return a sentence on the chats that a pin of files serves: by what stands before them."""
    system = controller.system
    before = (
        f'with the system prompt "{one_line(system, 40)}"' if system else "without a system prompt"
    )
    tools = " and with the same tools" if controller.tools is not None else ""
    return f" A new chat {before}{tools} that begins with the same files starts warm."


def _attaching(label: str) -> str:
    """Return a sentence on how to attach a pin; a label with spaces or @ needs quotation marks."""
    name = one_line(label, 64)
    word = name if name == "".join(name.split()) else f'"{name}"'
    return f"/file {word} attaches it."


def _kept_share(arguments: str) -> tuple[str, float | None]:
    """Return arguments without `--keep 25%`, and that share; None without one."""
    match = _KEEP.search(arguments)
    if match is None:
        return arguments, None
    share = parse_size(match[1] or "", "--keep").share
    if not share:
        raise UsageError(f"--keep is {shown(match[1])}, but must be a share like 25%.")
    return (arguments[: match.start()] + arguments[match.end() :]).strip(), share


def _label_and_paths(
    arguments: str, pinned: Mapping[str, Sequence[Path]]
) -> tuple[str, list[Path]]:
    """Parse `[NAME] FILE...`: the first word is a name if it is not a file and others follow, or if
    it is that of a pin.
    """
    if arguments in pinned and not user_path(arguments).exists():
        return arguments, list(pinned[arguments])
    words = split_words(arguments)
    first = user_path(words[0])
    is_file = first.exists() or bool(glob(str(first)))
    if not is_file and len(words) == 1:
        sentence = f"There is no file {one_line(words[0], 64)}, and no pin of that name."
        raise UsageError(sentence, "/pin alone pins this conversation.")
    has_name = not is_file
    if has_name and (words[0] in _NO_LABELS or len(words[0]) > _MAX_LABEL_CHARS):
        raise UsageError(f"A pin cannot be called {one_line(words[0], 64)}.", "/pin NAME FILE...")
    paths = [path for word in words[has_name:] for path in matching_files(word).paths]
    names = " ".join(path.name for path in paths)
    if len(names) > _MAX_LABEL_CHARS:
        names = f"{paths[0].name[:_MAX_LABEL_CHARS]} and {len(paths) - 1:,} more"
    return (words[0] if has_name else names), paths


async def unpin(context: "CommandContext", arguments: str) -> None:
    """remove a pin: its KV may be evicted again"""
    kept = _kept(context)
    status = await asyncio.to_thread(kept.status)
    pinned = {pin.label for model_dir in status.model_dirs for pin in model_dir.pins}
    labels = pinned | set(context.controller.pins.paths())
    if arguments == "all":
        wanted = labels
    elif arguments:
        wanted = {arguments} & labels
    else:
        wanted = {context.controller.require_session().session_id} & labels
    if not wanted:
        raise UsageError("There is no such pin.", "/pin list shows them.")
    for label in wanted:
        await asyncio.to_thread(kept.unpin, label)
    await asyncio.to_thread(context.controller.pins.remove, wanted)
    thin_pins(context.controller)
    context.say(
        f"{plural(len(wanted), 'pin')} removed. KV that was pinned stays while there is room."
    )


async def forget(context: "CommandContext", arguments: str) -> None:
    """delete this conversation or its last turn, text and KV, for good"""
    *words, last = arguments.split() or [""]
    is_sure = last in _SURE
    what = " ".join(words if is_sure else [*words, last]).strip()
    if what not in ("", "last", "conversation"):
        raise UsageError(f"{one_line(what)} is unknown here.", "/forget [last]")
    controller = context.controller
    if controller.session is None:
        raise UsageError("The conversation is empty.")
    is_last = what == "last"
    question = (
        f"Forget {'the last turn' if is_last else 'this conversation'} for good, text and KV? "
        "KV that others share stays."
    )
    if not is_sure and not await _confirm(context, question):
        context.say("Nothing is forgotten.")
        return
    session_id = controller.session.session_id
    gone = await (
        delete_last_turn(controller) if is_last else delete_conversation(controller, session_id)
    )
    context.page.unlearn(() if is_last else (session_id,), gone.texts)
    context.conversation_changed()
    forgotten = f"Forgotten: {'the last turn' if is_last else 'the conversation'}"
    gone.require_all(forgotten, "/cache clear deletes all KV, once it can be reached.")
    told = f", and {plural(gone.num_blocks, 'block')} of KV on disk" if controller.kept else ""
    context.say(f"{forgotten}{told}.")


async def _confirm(context: "CommandContext", question: str) -> bool:
    try:
        return await context.confirm(question)
    except UsageError as error:
        raise UsageError(error.message, "In a script: /forget yes, or /forget last yes") from error


def _kept(context: "CommandContext") -> "StoreAdmin":
    if context.controller.kept is None:
        raise UsageError("This chat keeps no KV on disk, so nothing can be pinned.")
    return context.controller.kept


COMMANDS = (
    Command(
        cache,
        Group.ENGINE,
        "[tree|why|verify|gc|clear]",
        subcommands=("status", "tree", "why", "verify", "gc", "clear", "path"),
    ),
    Command(
        pin,
        Group.INPUT,
        "[[NAME] FILE... [--keep 25%]|list]",
        argument=Argument.PATH,
        subcommands=("list",),
    ),
    Command(unpin, Group.INPUT, "[NAME|all]", argument=Argument.PIN, subcommands=("all",)),
    Command(forget, Group.ENGINE, "[last]", subcommands=("last",)),
)
