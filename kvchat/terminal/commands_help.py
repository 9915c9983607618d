"""/help: the commands of every day, all commands, one command, or the keys.

The first page fits on a screen: it explains what is used daily, and only names the rest; on a small
screen it only names, and on a smaller one only what is used daily.
"""

from rich.text import Text

from kvchat.core.errors import UsageError
from kvchat.core.text import one_line
from kvchat.terminal.commands import DAILY, Argument, Command, CommandContext, Group
from kvchat.terminal.paint import Row, prefixed
from kvchat.terminal.theme import Role

Example = tuple[str, str]

EXAMPLES: dict[str, tuple[Example, Example]] = {
    "help": (("/help edit", "what /edit does"), ("/help all", "every command")),
    "exit": (("/exit", "leave"), ("/bye", "the same")),
    "new": (("/new", "begin afresh"), ("/new Holiday plans", "begin with a title")),
    "resume": (
        ("/resume", "choose from a list"),
        ("/resume holiday", "the conversation with that word in its title"),
    ),
    "preset": (
        ("/preset coder", "a new conversation with its model, prompt and settings"),
        ("/preset save coder manual", "keep this conversation's, with the pin manual"),
    ),
    "rename": (("/rename Holiday plans", "a title"), ("/rename Rex, part 2", "another")),
    "delete": (
        ("/delete", "this conversation"),
        ("/delete holiday", "the one with that word in its title"),
    ),
    "export": (
        ("/export", "as Markdown, in this directory"),
        ("/export chat.html", "as a page for a browser, with all branches"),
    ),
    "import": (
        ("/import chat.json", "messages in JSON"),
        ("/import ~/old/20260101-120000-abcd.jsonl", "a session file"),
    ),
    "undo": (("/undo", "before your last message"), ("/undo 3", "before the last three")),
    "redo": (("/redo", "take the last /undo back"), ("/redo", "after /undo 3: all three again")),
    "rewind": (("/rewind", "choose a message"), ("/rewind 2", "back to message 2")),
    "edit": (
        ("/edit 2", "message 2, as /tree numbers it; alone: the last one"),
        ("/edit 2 Hello there", "send this in its place"),
    ),
    "retry": (("/retry", "one more answer"), ("/retry -n 3", "three, to choose from")),
    "compact": (
        ("/compact", "summarise all but the last two messages"),
        ("/compact the names and the dates", "and keep those above all"),
    ),
    "btw": (
        ("/btw What is a fjord?", "ask aside"),
        ("/btw Was that right?", "about the last answer"),
    ),
    "continue": (("/continue", "after a cut-off answer"), ("/continue", "as often as needed")),
    "fork": (("/fork", "a copy"), ("/fork Plan B", "a copy with a title")),
    "tree": (("/tree", "all branches"), ("/branches", "the same")),
    "switch": (("/switch 3", "the branch with message 3"), ("/switch 3.2", "its second answer")),
    "file": (
        ("/file notes.txt", "one file"),
        ("/file manual", "the files of /pin manual docs/*.md"),
    ),
    "run": (("!git diff", "run it, and attach what it prints"), ("/run make test", "the same")),
    "project": (
        ("/project on", "AGENTS.md joins the system prompt of chats in this directory"),
        ("/project", "whether it does"),
    ),
    "system": (
        ("/system Answer in one sentence.", "set it"),
        ("/system @persona.txt", "set it from a file"),
    ),
    "set": (("/set temperature 0", "always the likeliest token"), ("/set", "all settings")),
    "show": (("/show chat", "the whole conversation"), ("/show settings", "the settings")),
    "think": (("/think off", "answer at once"), ("/think hide", "think, but do not show it")),
    "editor": (("/editor", "write in your editor"), ("/e", "the same")),
    "copy": (("/copy", "the last answer"), ("/copy code", "its last code block")),
    "model": (
        ("/model", "this model and those on this machine"),
        ("/model Qwen/Qwen3-0.6B", "go on with that one"),
    ),
    "stats": (("/stats", "all figures"), ("/stats off", "none after answers")),
    "spec": (("/spec off", "one token a step"), ("/spec auto", "draft where it pays")),
    "context": (("/context", "how full it is"), ("/tokens", "the same")),
    "tools": (
        ("/tools", "the tools, and which ask first"),
        ("/tools allow read_file", "run it without a question"),
    ),
    "cache": (("/cache", "what is kept"), ("/cache why", "why the last answer read so much")),
    "pin": (
        ("/pin", "this conversation; --share first: for other machines too"),
        ("/pin manual docs/*.md", "files, under a name"),
    ),
    "unpin": (("/unpin manual", "that pin"), ("/unpin all", "every pin")),
    "forget": (("/forget last", "the last message and its answer"), ("/forget", "all of it")),
}


_KEYS = (
    ("Enter", "send; while an answer comes, queue"),
    ("Alt-Enter, Ctrl-J, \\ Enter", 'a new line; """ opens and closes a block'),
    ("Esc, Ctrl-C", "stop the answer, keep what there is"),
    ("Esc Esc", "clear the prompt; on an empty one, go back to an earlier message"),
    ("Ctrl-C Ctrl-C, Ctrl-D", "leave"),
    ("Up, Down, Ctrl-R", "history; while an answer comes, edit the queue"),
    ("Tab, Right", "complete; take the suggestion"),
    ("Alt-Left, Alt-Right", "other answers to the same message"),
    ("Ctrl-G", "write in your editor"),
    ("F2", "statistics after answers: one line, all figures, none"),
)
_NAME_COLUMNS = 37  # the longest name and usage fit
_DAILY_COLUMNS = 11  # the longest daily name fits


async def help_(context: CommandContext, arguments: str) -> None:
    """this list; of all commands, of one, or of the keys"""
    if arguments == "keys":
        rows = [row for keys, meaning in _KEYS for row in _entry(context, keys, meaning)]
    elif arguments == "all":
        rows = _all_rows(context)
    elif arguments:
        rows = _command_rows(context, arguments)
    else:
        rows = _first_page(context)
    context.page.write([*rows, Text(end="")])


def _first_page(context: CommandContext) -> list[Row]:
    """Return rows on the daily commands and the names of the others; less on a small screen."""
    painter, width = context.page.painter, context.page.render_context.width
    explained = [painter.text("every day", Role.TITLE)]
    for name in DAILY:
        command = context.registry.find(name)
        assert command is not None
        explained += _entry(context, f"/{name}", command.help, _DAILY_COLUMNS)
    daily = ", ".join(f"/{name}" for name in DAILY)
    named = painter.wrapped(f"every day: {daily}", width, hanging=2)
    others = [painter.text("more", Role.TITLE)]
    for group in Group:
        names = (c.name for c in context.registry.commands if c.group is group)
        listed = ", ".join(f"/{name}" for name in names if name not in DAILY)
        others += painter.wrapped(f"  {group}: {listed}", width, hanging=4)
    more = "/help all explains all of them, /help COMMAND one of them, /help keys the keys. "
    end = _what_is_a_message(context, more)
    short_end = painter.wrapped("/help all has all, /help COMMAND explains one.", width, Role.DIM)
    pages = ([*explained, *others, *end], [*named, *others, *end], [*named, *short_end])
    return next(filter(context.page.has_room, pages), pages[-1])


def _all_rows(context: CommandContext) -> list[Row]:
    rows = []
    for group in Group:
        rows.append(context.page.painter.text(str(group), Role.TITLE))
        for command in context.registry.commands:
            if command.group is group:
                rows += _entry(context, f"/{command.name} {command.usage}".rstrip(), command.help)
    return [*rows, *_what_is_a_message(context, "/help COMMAND says more. ")]


def _what_is_a_message(context: CommandContext, before: str) -> list[Row]:
    message = "A line that begins with a space, // or a path like /usr/bin is a message."
    width = context.page.render_context.width
    return context.page.painter.wrapped(before + message, width, Role.DIM)


def _command_rows(context: CommandContext, name: str) -> list[Row]:
    """Return rows on one command, with its examples; raises UsageError for an unknown name."""
    command = context.registry.find(name.removeprefix("/"))
    if command is None:
        raise UsageError(f"There is no command {one_line(name)}.", "/help lists them.")
    also = ", ".join(f"/{alias}" for alias in command.aliases)
    text = f"/{command.name} {command.usage}".rstrip() + f"\n  {command.help}"
    text += f"\n  also {also}" if also else ""
    rows = context.page.painter.wrapped(text, context.page.render_context.width, hanging=2)
    for typed, meaning in EXAMPLES.get(command.name, ()):
        rows += _entry(context, typed, meaning)
    return rows


def _entry(
    context: CommandContext, name: str, meaning: str, name_columns: int = _NAME_COLUMNS
) -> list[Row]:
    """Return rows with a name and its meaning, side by side if the width allows it."""
    painter, width = context.page.painter, context.page.render_context.width
    if painter.look.is_spoken:
        return painter.wrapped(f"{name}: {meaning}", width)
    if width < 2 * name_columns:
        indented = painter.text("      ")
        rows = painter.wrapped(meaning, width - indented.cell_len, Role.DIM)
        named = painter.wrapped(f"  {name}", width, hanging=4)
        return [*named, *(prefixed(row, indented) for row in rows)]
    lead = painter.text(f"  {name}  ".ljust(name_columns))
    below = painter.text(" " * name_columns)
    wrapped = painter.wrapped(meaning, width - lead.cell_len, Role.DIM)
    return [prefixed(row, below if number else lead) for number, row in enumerate(wrapped)]


COMMANDS = (
    Command(
        help_,
        Group.CONVERSATION,
        "[command|all|keys]",
        ("?",),
        takes_turn=False,
        argument=Argument.COMMAND,
        subcommands=("all", "keys"),
    ),
)
