"""/preset: begins a conversation with a preset, and saves how this one goes as one."""

import asyncio
from typing import Any

from kvchat.chat.answer_settings import with_values
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation_settings import changes
from kvchat.chat.host import ChatHost
from kvchat.chat.presets import Preset
from kvchat.core.errors import UsageError
from kvchat.core.parameters import BY_NAME, OF_ANSWERS
from kvchat.core.paths import as_text, from_anywhere, text_or_file
from kvchat.core.text import one_line
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.commands_engine import load_host
from kvchat.terminal.commands_input import attach_named, present_system, split_words
from kvchat.terminal.theme import Role

_USAGE = "[NAME|save NAME [FILE|PIN...]|rm NAME]"


async def preset(context: CommandContext, arguments: str) -> None:
    """begin with a saved model, prompt and settings, or save those of this chat"""
    words = split_words(arguments) if arguments else []
    if not words:
        _list(context)
    elif words[0] == "save" and len(words) > 1:
        _save(context, words[1], tuple(map(from_anywhere, words[2:])))
    elif words[0] == "rm" and len(words) == 2:
        context.controller.surroundings.presets.remove(words[1])
        context.say(f"Deleted: {one_line(words[1], 64)}")
    elif len(words) == 1 and words[0] not in ("save", "rm"):
        await _begin_with(context, words[0])
    else:
        raise UsageError("/preset takes a name.", f"/preset {_USAGE}")


def _list(context: CommandContext) -> None:
    known = context.controller.surroundings.presets.lines()
    width = max((len(name) for name in known), default=0) + 2
    lines = [f"{name:{width}}{line}" for name, line in known.items()]
    lines.append("/preset NAME begins a conversation with one, /preset save NAME keeps this one's.")
    context.say("\n".join(lines), hanging=width)


def _save(context: CommandContext, name: str, files: tuple[str, ...]) -> None:
    controller = context.controller
    values: dict[str, Any] = {"model": from_anywhere(controller.host.model.name)}
    values |= controller.host.settings
    system = controller.surroundings.project.without(present_system(controller))
    values |= {"system": as_text(system)} if system else {}
    values |= {"tools": True} if controller.tools is not None else {}
    chosen = changes(controller.options, controller.settings.plain)
    values |= {name: value for name, value in chosen.items() if value is not None}
    saved = Preset(values, files)
    path = controller.surroundings.presets.write(name, saved)
    context.say(f"Saved in {path}: {saved.line()}. `kvchat --preset {name}` begins with it.")


async def _begin_with(context: CommandContext, name: str) -> None:
    """Begin a new conversation; the model is loaded before the open one is left."""
    controller = context.controller
    chosen = controller.surroundings.presets.read(name)
    system = _system_of(controller, chosen)
    host = await _loaded(context, chosen)
    problem = controller.begin_new()
    old = controller.change_host(host) if host is not None else None
    try:
        options = with_values(controller.settings.plain, _of_answers(chosen))
        controller.take_options(with_values(options, controller.settings.given))
        controller.set_system(system)
        context.conversation_changed()
        context.say(f"A new conversation with {name}: {chosen.line()}.")
        if problem is not None:
            context.say(problem, Role.WARNING)
        for word in chosen.files:
            attach_named(context, word)
        if late := [BY_NAME[key].dashed for key in chosen.values if key in _NEEDS_A_START]:
            told = f"kvchat --preset {name} starts with what a chat cannot change: "
            context.say(f"{told}{', '.join(late)}.")
    finally:
        if old is not None:
            await asyncio.to_thread(old.close)


def _system_of(controller: ChatController, chosen: Preset) -> str | None:
    """Return the system prompt with a preset, and the project's file; raises UnreadableFile."""
    project = controller.surroundings.project
    if (given := chosen.values.get("system")) is not None:
        return project.joined(text_or_file(given))
    return project.joined(project.without(controller.system))


async def _loaded(context: CommandContext, chosen: Preset) -> ChatHost | None:
    """Return a host with the model of a preset, None where the chat has it already."""
    model = chosen.values.get("model")
    if model is None or from_anywhere(model) == context.controller.host.model.name:
        return None
    return await load_host(context, model)


# What is decided when a process starts, and not with a conversation.
_NEEDS_A_START = frozenset(BY_NAME) - {"model", "system", *(p.name for p in OF_ANSWERS)}


def _of_answers(chosen: Preset) -> dict[str, Any]:
    names = {parameter.name for parameter in OF_ANSWERS}
    return {name: value for name, value in chosen.values.items() if name in names}


COMMANDS = (
    Command(
        preset,
        Group.CONVERSATION,
        _USAGE,
        ("presets",),
        argument=Argument.PRESET,
        subcommands=("save", "rm"),
    ),
)
