"""/model NAME: loads another model beside the present one and goes on with it.

The conversation stays; the present model answers until the other is there, and for good if it
cannot be loaded. Knows hosts and load events; draws nothing itself.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvchat.chat.host import ChatHost
from kvchat.core.events import LoadEvent, LoadFailed, LoadProgress, ModelReady
from kvchat.terminal.loading import LoadRelay
from kvchat.terminal.sanitize import one_line

if TYPE_CHECKING:
    from kvchat.terminal.command_context import CommandContext


async def _in_thread(make: Callable[[], ChatHost]) -> ChatHost:
    """Run a function on a thread that nobody waits for: a download must not keep kvchat alive."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[ChatHost] = loop.create_future()

    def settle(host: ChatHost | None, error: Exception | None) -> None:
        if made.done():
            return
        if host is not None:
            made.set_result(host)
        else:
            made.set_exception(error or AssertionError("neither a host nor a reason"))

    def run() -> None:
        host, failure = None, None
        try:
            host = make()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, host, failure)

    threading.Thread(target=run, name="kvchat-model-change", daemon=True).start()
    return await made


async def close_host(host: ChatHost) -> None:
    """Close a host; one that still loads is not waited for: it has nothing to save yet."""
    if host.ready is not None:
        await asyncio.to_thread(host.close)
    else:
        threading.Thread(target=host.close, daemon=True).start()


async def change_model(context: "CommandContext", name: str) -> None:
    """Load a model and go on with it; raises why it cannot be."""
    desk = context.desk
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[ModelReady] = loop.create_future()
    relay = LoadRelay()
    async with context.face.lent(takes_interrupts=False):  # a download shows its own bars
        host = await _in_thread(lambda: desk.new_host(name, relay.hear))

    def hear(event: LoadEvent) -> None:
        if isinstance(event, LoadProgress):
            context.show_stage(one_line(event.stage))
        elif outcome.done():
            return
        elif isinstance(event, LoadFailed):
            outcome.set_exception(event.error)
        else:
            outcome.set_result(event)

    relay.attach(loop, hear)
    try:
        ready = await outcome
        old = desk.change_host(host)
    except BaseException:
        await close_host(host)
        raise
    finally:
        context.show_stage("")
    context.say(f"Now with {one_line(ready.name)}, {ready.device}, {ready.dtype}.")
    for note in desk.session.notes if desk.session is not None else ():
        context.say(note)
    context.conversation_changed()
    await close_host(old)
