"""/run, and a line that begins with `!`: a command of the shell, whose output can be attached."""

import asyncio
import os
import threading
from pathlib import Path

from kvchat.chat.attachment import attached_text
from kvchat.core.errors import UsageError
from kvchat.core.text import one_line
from kvchat.terminal.commands import Command, CommandContext, Group
from kvchat.terminal.status import about, plural
from kvchat.tools.run_command import RunCommand

# More of an output is not shown. What `run_command` keeps of it, 64,000 bytes, is attached.
_SHOWN_LINES = 40


async def run(context: CommandContext, arguments: str) -> None:
    """run a command of the shell (or type !COMMAND), and attach its output"""
    if not arguments:
        raise UsageError("Which command?", "!COMMAND, as in !git diff")
    if not context.is_at_terminal:
        raise UsageError("Commands of the shell are run for a person at a terminal only.")
    output = await _output(context, arguments)
    lines = output.split("\n")
    left_out = len(lines) - _SHOWN_LINES
    shown = [f"[{plural(left_out, 'line')} before]"] if left_out > 0 else []
    context.say("\n".join([*shown, *lines[-_SHOWN_LINES:]]))
    controller = context.controller
    attached = attached_text(f"{one_line(arguments, 60)}.txt", output)
    tokens = about(controller.host.model) + plural(controller.num_tokens(attached.text), "token")
    if await context.confirm(f"Attach this, {tokens}, to your next message?"):
        controller.attach(attached)
        context.say("It goes with your next message; /file clear takes it away.")


async def _output(context: CommandContext, command: str) -> str:
    """Run a command, as the user would: with all variables. Esc ends it."""
    stop = threading.Event()
    tool = RunCommand(Path.cwd(), allowed_secrets=tuple(os.environ))
    work = asyncio.to_thread(tool.run, {"command": command}, stop)
    try:
        return await context.stoppable(work, f"running {one_line(command, 40)}", "it is ended.")
    finally:
        stop.set()


COMMANDS = (Command(run, Group.INPUT, "COMMAND"),)
