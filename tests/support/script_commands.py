"""Commands that a test carries out as a script does. Knows no model."""

from kvchat.chat.controller import ChatController
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Invocation
from kvchat.terminal.paint import Painter
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look


class SureCommands(ScriptCommands):
    """A user who says yes; `asked` has the questions."""

    asked: tuple[str, ...] = ()

    async def confirm(self, question: str) -> bool:
        self.asked = (*self.asked, question)
        return True


def carry_out(
    controller: ChatController,
    line: str,
    kind: type[ScriptCommands] = ScriptCommands,
    page_class: type[ScriptPage] = ScriptPage,
    num_columns: int = 200,
) -> str:
    """Carry out a command; return the questions that it asked `SureCommands`, and what it said."""
    said: list[str] = []
    page = page_class(said.append, Painter(Look(has_colour=False, is_plain=True)), num_columns)
    commands = kind(controller, page, build_registry(), StatsLevel.OFF)
    parsed = commands.registry.parse(line, is_typed=kind.is_at_terminal)
    assert isinstance(parsed, Invocation), line
    commands.carry_out(parsed)
    return "".join([*getattr(commands, "asked", ()), *said])
