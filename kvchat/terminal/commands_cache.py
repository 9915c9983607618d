"""/cache: what is kept of the KV on disk, and what may be done to it."""

import asyncio
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from kvchat.core.errors import UsageError
from kvchat.terminal import kept_kv
from kvchat.terminal.commands import Command, Group
from kvchat.terminal.kept_kv import KeptKv
from kvchat.terminal.sanitize import one_line

if TYPE_CHECKING:
    from kvchat.terminal.command_context import CommandContext

T = TypeVar("T")

_USAGE = "/cache [status|tree|why|verify|gc|clear|path]"


async def cache(context: "CommandContext", arguments: str) -> None:
    if arguments == "why":
        context.say("\n".join(one_line(line, 4096) for line in context.desk.why()))
        return
    kept = context.desk.kept
    if kept is None:
        raise UsageError("This chat keeps no KV on disk.", "`kvchat cache` shows what others kept.")
    if arguments in ("clear", "clear --yes", "drop", "drop --yes"):
        await _clear(context, kept, needs_no_yes=arguments.endswith("--yes"))
        return
    if arguments == "path":
        context.say(one_line(str(kept.directory), 4096))
    elif arguments in ("", "status"):
        context.say("\n".join(kept_kv.status_lines(await asyncio.to_thread(kept.status))))
    elif arguments == "tree":
        glyphs = context.face.painter.look.glyphs
        trees = await asyncio.to_thread(kept.tree)
        context.say("\n".join(kept_kv.tree_lines(trees, glyphs)))
    elif arguments == "verify":
        context.say(kept_kv.verified_line(await _while_wanted(kept.verify)))
    elif arguments == "gc":
        context.say(kept_kv.collected_line(await asyncio.to_thread(kept.gc)))
    else:
        raise UsageError(f"{one_line(arguments)} is unknown here.", _USAGE)


async def _clear(context: "CommandContext", kept: KeptKv, needs_no_yes: bool) -> None:
    status = await asyncio.to_thread(kept.status)
    if not needs_no_yes and not await context.confirm(kept_kv.clearing_question(status)):
        context.say("Nothing is deleted.")
        return
    context.say(kept_kv.cleared_line(await asyncio.to_thread(kept.clear)))


async def _while_wanted(work: "Callable[[Callable[[], bool]], T]") -> T:
    """Run what takes long on a thread, which ends soon if nobody waits for it any more."""
    is_over = Event()
    try:
        return await asyncio.to_thread(work, lambda: not is_over.is_set())
    finally:
        is_over.set()


COMMANDS = (
    Command(
        "cache",
        "KV kept on disk: how much; read it all, tidy it up, delete it",
        cache,
        Group.ENGINE,
        "[tree|why|verify|gc|clear]",
    ),
)
