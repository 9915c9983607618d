"""The command on tools: which there are, which run without a question, and offering them here."""

from kvchat.core.errors import UsageError
from kvchat.core.text import one_line
from kvchat.terminal.commands import Command, CommandContext, Group
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Role
from kvchat.terminal.view import tell
from kvchat.tools.toolbox import Toolbox, call_in_words

_WORDS = {True: "runs at once", False: "never runs", None: "asks first"}


async def tools(context: CommandContext, arguments: str) -> None:
    word, _, name = arguments.strip().partition(" ")
    toolbox = _require(context)
    if not word:
        _list(context, toolbox)
    elif word == "here":
        await _offer(context, toolbox)
    elif word in ("allow", "ask", "never"):
        _decide(context, toolbox, word, name.strip())
    else:
        known = "/tools [here|allow NAME|ask NAME|never NAME]"
        raise UsageError(f"{one_line(word, 20)} is unknown here.", known)


def _require(context: CommandContext) -> Toolbox:
    if context.toolbox is None:
        raise UsageError(
            "No tools are offered to the model.",
            "Start with --tools, and with a model whose template takes tools.",
        )
    return context.toolbox


def _list(context: CommandContext, toolbox: Toolbox) -> None:
    indent = "" if context.page.painter.look.is_spoken else "  "
    for tool in toolbox.tools:
        calls = toolbox.permissions.allowed_calls(tool.name)
        state = _WORDS[toolbox.permissions.of(tool.name)]
        state += f", but for {plural(len(calls), 'allowed call')}" if calls else ""
        tell(context.page, f"{one_line(tool.name)} ({state})", Role.TITLE, gap=False)
        description = f"{indent}{one_line(tool.description, 200)}"
        tell(context.page, description, gap=False, hanging=len(indent))
        for call in calls:
            allowed = f"{indent}runs at once: {call_in_words(call)}"
            tell(context.page, allowed, gap=False, hanging=len(indent))
    context.page.write([context.page.painter.text("")])
    if not toolbox.is_complete:
        context.say("MCP servers are starting; their tools come later.")
    if context.controller.has_other_tools:
        context.say("This conversation began with other tools, or none: /tools here offers these.")


async def _offer(context: CommandContext, toolbox: Toolbox) -> None:
    controller = context.controller
    if not controller.has_other_tools:
        context.say("These tools are offered here already.")
        return
    cost = await controller.engine.cost(controller.ids_with_tools(toolbox.definitions))
    if not await context.confirm_cost(cost, "/tools here"):
        return
    controller.set_tools(toolbox.definitions)
    context.say("The tools are offered in this conversation from now on.")
    context.conversation_changed()


def _decide(context: CommandContext, toolbox: Toolbox, word: str, name: str) -> None:
    if not toolbox.has(name):
        known = ", ".join(one_line(tool.name) for tool in toolbox.tools)
        raise UsageError(f"{one_line(name, 40) or 'Nothing'} is no tool; there are {known}.")
    permissions = toolbox.permissions
    permissions.always.discard(name)
    permissions.never.discard(name)
    permissions.forget_calls(name)
    if word != "ask":
        (permissions.always if word == "allow" else permissions.never).add(name)
    context.say(f"{one_line(name)} {_WORDS[permissions.of(name)]}.")


COMMANDS = (
    Command(
        "tools",
        "the tools that the model may call, and which of them ask first",
        tools,
        Group.ENGINE,
        "[here|allow NAME|ask NAME|never NAME]",
        subcommands=("here", "allow", "ask", "never"),
    ),
)
