"""Commands on input: files, the system prompt, settings, the editor, the clipboard."""

import re
import shlex

from kvchat.chat import answer_settings
from kvchat.chat.attachment import matching_files
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import Role
from kvchat.chat.messages import MessageNumbers, in_words
from kvchat.chat.thinking import Think, split_thinking
from kvchat.core.errors import UsageError
from kvchat.core.paths import text_or_file, user_path
from kvchat.core.text import one_line, whole_number
from kvchat.terminal.commands import Argument, Command, CommandContext, Group
from kvchat.terminal.commands_engine import MODEL_COLUMNS, describe_model
from kvchat.terminal.history_view import show_turns
from kvchat.terminal.status import StatsLevel, about, plural
from kvchat.terminal.view import Choice

_SETTING_COLUMNS = 21  # the longest name, and space after it
_NAME_AND_VALUE = re.compile(r"([^\s=]*)(?:\s*=\s*|\s+)?(.*)", re.DOTALL)
_CODE_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


async def file(context: "CommandContext", arguments: str) -> None:
    """attach text files or a pin to the next message (at the prompt also @path in it)"""
    controller = context.controller
    if arguments == "clear":
        context.say(
            "No file is attached any more." if controller.attached else "No file was attached."
        )
        controller.attached = ()
        return
    if not arguments and controller.attached:
        names = ", ".join(one_line(file.name) for file in controller.attached)
        context.say(f"Attached for your next message: {names}. /file clear takes them away.")
        return
    if not arguments:
        raise UsageError("Which file?", "/file PATH...")
    before = controller.attached
    for name in split_words(arguments):
        attach_named(context, name)
    for file in controller.attached:
        if file.note and file not in before:
            context.say(file.note)


def attach_named(context: "CommandContext", name: str) -> None:
    """Attach the pin of a name, or the files that it names as a path or a pattern."""
    controller = context.controller
    pins = controller.pins.paths()
    if name in pins and not user_path(name).exists():
        tokens, note = controller.attach_pin(name)
        what = f"{one_line(name, 64)}, {plural(len(pins[name]), 'file')}"
        _tell_attached(context, what, tokens)
        if note:
            context.say(note)
        return
    files, before = matching_files(name), controller.attached
    try:
        tokens = sum(controller.attach(each) for each in files.read())
    except UsageError:
        controller.attached = before  # all of them or none
        raise
    count = f", {plural(len(files.paths), 'file')}" if files.is_many else ""
    own_name = name if files.is_many else files.paths[0].name
    _tell_attached(context, one_line(own_name, 64) + count, tokens)


def _tell_attached(context: "CommandContext", what: str, num_tokens: int) -> None:
    tokens = about(context.controller.host.model) + plural(num_tokens, "token")
    context.say(f"Attached {what}, {tokens}: it goes with your next message.")


def split_words(arguments: str) -> list[str]:
    """Return the words of a line as a shell splits them; where it cannot, the line alone."""
    try:
        return shlex.split(arguments)
    except ValueError:
        return [arguments]


# The argument of /project with which a first chat in a directory asks.
ASK = "ask"


async def project(context: "CommandContext", arguments: str) -> None:
    """have AGENTS.md or CLAUDE.md of this directory in the system prompt, or not"""
    controller, project = context.controller, context.controller.surroundings.project
    if (path := project.path) is None:
        raise UsageError("There is no AGENTS.md and no CLAUDE.md in this directory.")
    if arguments == ASK:
        question = f"Use {path.name} of this directory in the system prompt of chats here?"
        answer = await context.page.choose(question, [Choice("no"), Choice("yes")])
        arguments = "on" if answer == 1 else "off"
    if arguments not in ("", "on", "off"):
        raise UsageError(f"{one_line(arguments, 32)} is unknown here.", "/project [on|off]")
    if arguments:
        text = project.read() if arguments == "on" else ""  # before anything is decided
        before = present_system(controller)
        system = project.joined(project.without(before), text) if text else project.without(before)
        if system != before and not await _set_system(context, system, "/project"):
            return
        project.use(arguments == "on")
    is_used = "is in the system prompt of" if project.is_used else "is left out of"
    context.say(f"{path.name} {is_used} chats in this directory.")


def present_system(controller: ChatController) -> str | None:
    """Return the system prompt of the open conversation, else that of the next one."""
    conversation = controller.conversation
    return conversation.system if conversation is not None else controller.system


async def _set_system(context: "CommandContext", text: str | None, action: str) -> bool:
    """Set the system prompt if it leaves room and its price is accepted; return whether it is."""
    controller = context.controller
    _require_room(controller, text or "")
    cost = await controller.engine.cost(controller.ids_with_system(text))
    if not await context.confirm_cost(cost, action):
        return False
    controller.set_system(text)
    context.conversation_changed()
    return True


async def system(context: "CommandContext", arguments: str) -> None:
    """show, set or clear the system prompt"""
    controller = context.controller
    if arguments in ("", "show"):
        prompt = present_system(controller)
        context.say(f"System prompt: {prompt}" if prompt else "There is no system prompt.")
        return
    text = None if arguments == "clear" else arguments
    text = text_or_file(text) if text is not None else None
    if await _set_system(context, text, "/system"):
        context.say("The system prompt is set." if text else "There is no system prompt any more.")


def _require_room(controller: ChatController, system: str) -> None:
    """Raise UsageError if a system prompt would leave no message any room."""
    count, ready = controller.num_tokens(system), controller.host.ready
    if ready is not None and count >= ready.context_limit:
        raise UsageError(
            f"This system prompt has {count:,} tokens, and the context holds "
            f"{ready.context_limit:,}.",
            "Shorten it.",
        )


async def set_(context: "CommandContext", arguments: str) -> None:
    """change how answers are generated"""
    arguments = arguments.removeprefix("parameter ").strip()
    if not arguments:
        _show_settings(context)
        return
    name, value = _NAME_AND_VALUE.fullmatch(arguments).groups(default="")  # type: ignore[union-attr]
    name = answer_settings.as_named(name)
    if name == "system":
        await system(context, value)
    elif name in ("verbose", "quiet", "stats"):
        context.say(context.set_stats(_wanted_stats(name, value)))
    elif not value:
        name = answer_settings.known(name).dashed
        context.say(answer_settings.said(context.controller.options, name))
    else:
        _change(context, name, value)


def _change(context: "CommandContext", name: str, value: str) -> None:
    """Change a setting, say what it is now, and that a value is far from what is usual."""
    controller = context.controller
    options = answer_settings.changed(controller.options, name, value)
    controller.options = options.for_model(controller.host.model.sampling_defaults)
    context.say(answer_settings.said(controller.options, name))


def _wanted_stats(name: str, value: str) -> StatsLevel:
    """Return which figures `/set verbose`, `/set quiet` and `/set stats on|off` ask for."""
    if value not in ("", "on", "off"):
        raise UsageError(f"{one_line(value, 32)} is unknown here.", f"/set {name} [on|off]")
    is_on = (value != "off") is (name != "quiet")
    return StatsLevel.LINE if is_on else StatsLevel.OFF


def _show_settings(context: "CommandContext") -> None:
    settings = answer_settings.describe(context.controller.options)
    lines = (f"{name:<{_SETTING_COLUMNS}}{value}" for name, value in settings)
    context.say("\n".join(lines), hanging=_SETTING_COLUMNS)


async def think(context: "CommandContext", arguments: str) -> None:
    """let the model think first, or not; show or hide its thinking"""
    controller = context.controller
    word = arguments.lower()
    if word in ("show", "hide"):
        context.hide_thinking(word == "hide")
        context.say(f"Thinking is {'hidden' if word == 'hide' else 'shown'}.")
        return
    if not word:
        problem = controller.host.model.think_problem(Think.ON)
        way = "/think on, off or auto changes it, /think hide and show what is seen of it."
        context.say(f"Thinking is {controller.options.think}. {problem or way}")
        return
    options = answer_settings.changed(controller.options, "think", word)
    if (problem := controller.host.model.think_problem(options.think)) is not None:
        raise UsageError(problem)
    controller.options = options
    context.say(f"Thinking is {controller.options.think}, from the next message on.")


async def show(context: "CommandContext", arguments: str) -> None:
    """show the conversation, the system prompt, the settings or the model"""
    what = arguments or "settings"
    if what == "chat":
        show_turns(context.controller.require_conversation().path(), context.page)
    elif what == "system":
        await system(context, "")
    elif what in ("settings", "parameters"):
        _show_settings(context)
    elif what in ("model", "info"):
        others = "/model also lists the models on this machine."
        text = f"{describe_model(context.controller)}\n{others}"
        context.say(text, hanging=MODEL_COLUMNS)
    else:
        raise UsageError(
            f"{one_line(what)} cannot be shown.", "/show chat, system, settings or model"
        )


async def editor(context: "CommandContext", arguments: str) -> None:
    """write the message in your editor"""
    text = await context.page.edit(context.page.prompt_text)
    context.page.put_text(text)


async def copy(context: "CommandContext", arguments: str) -> None:
    """copy an answer, or its last code block"""
    conversation = context.controller.require_conversation()
    numbers = MessageNumbers(conversation)
    answers = {
        numbers.of(turn): split_thinking(turn.text)[1]
        for turn in conversation.path()
        if turn.role is Role.ASSISTANT and turn.summary_of is None
    }
    text = _wanted(answers, arguments)
    context.page.copy(text)
    context.say(f"Sent {plural(len(text), 'character')} to the terminal's clipboard.")


def _wanted(answers: dict[int, str], arguments: str) -> str:
    """Return the answer or code block that /copy's argument selects; answers by their message."""
    if not answers:
        raise UsageError("There is no answer to copy yet.")
    last = list(answers.values())[-1]
    if arguments == "code":
        blocks = [match[2] for match in _CODE_BLOCK.finditer(last)]
        if not blocks:
            raise UsageError("The last answer has no code block.", "/copy copies all of it.")
        return blocks[-1].rstrip("\n")
    if not arguments:
        return last
    number = whole_number(arguments)
    if number is None or number not in answers:
        raise UsageError(f"The messages with an answer here are {in_words(list(answers))}.")
    return answers[number]


COMMANDS = (
    Command(
        file,
        Group.INPUT,
        "PATH|PIN...|clear",
        ("read", "add"),
        takes_turn=False,
        argument=Argument.ATTACHABLE,
        subcommands=("clear",),
    ),
    Command(project, Group.INPUT, "[on|off]", subcommands=("on", "off")),
    Command(system, Group.INPUT, "[TEXT|@PATH|clear]", subcommands=("show", "clear")),
    Command(set_, Group.INPUT, "[name value]", takes_turn=False, argument=Argument.SETTING),
    Command(
        show,
        Group.INPUT,
        "[chat|system|settings|model]",
        takes_turn=False,
        subcommands=("chat", "system", "settings", "model"),
    ),
    Command(
        think,
        Group.INPUT,
        "[on|off|show|hide]",
        takes_turn=False,
        subcommands=("on", "off", "show", "hide", "low", "medium", "high", "auto"),
    ),
    Command(editor, Group.INPUT, aliases=("e",)),
    Command(copy, Group.INPUT, "[message|code]", takes_turn=False, subcommands=("code",)),
)
