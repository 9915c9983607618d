"""Help of commands, and the habits of other programs in command lines, before typer parses these.

A prompt may stand where a subcommand could, and `-r` may stand without a conversation. Both are
rewritten as flags that typer knows, so that all else has one meaning only.
"""

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvchat.core.errors import UsageError
from kvchat.core.parameters import Group
from kvchat.core.text import shown

_OTHERS = "Options"
_NO_BREAK, _MOST_PHRASE = "\u00a0", 28
# The widest first column, and of a narrow terminal.
_MOST_COLUMNS, _MOST_NARROW, _NARROW = 28, 22, 70


class _Helped:
    """A command whose options are listed by their groups; texts and switches stay as they are."""

    def parse_args(self: Any, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments."""
        _leave_values(self.get_params(ctx))
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        _write_options(self.get_params(ctx), ctx, formatter)


class HelpedCommand(_Helped, TyperCommand):
    """A command without subcommands."""


class HelpedGroup(_Helped, TyperGroup):
    """A command with subcommands, whose help has whole sentences on all of them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, and then the subcommands."""
        super().format_options(ctx, formatter)
        rows = [
            (name, command.get_short_help_str(limit=1 << 10))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _write_options(parameters: Iterable[Any], ctx: typer.Context, formatter: Any) -> None:
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    rows |= {name: [] for name in (*Group, _OTHERS)}
    for parameter in parameters:
        if (row := parameter.get_help_record(ctx)) is not None:
            is_argument = parameter.param_type_name == "argument"
            panel = "Arguments" if is_argument else parameter.rich_help_panel or _OTHERS
            rows[panel].append((_with_one_no(row[0]), row[1]))
    most = _MOST_COLUMNS if formatter.width >= _NARROW else _MOST_NARROW
    columns = max((len(name) for panel in rows.values() for name, _ in panel if len(name) <= most))
    for heading, panel in rows.items():
        if panel:
            aligned = [(f"{name:<{columns}}", _in_phrases(text)) for name, text in panel]
            with formatter.section(heading):
                formatter.write_dl(aligned, most)
    formatter.buffer[:] = [text.replace(_NO_BREAK, " ") for text in formatter.buffer]


def _in_phrases(text: str) -> str:
    """Return help in which no line ends inside a short phrase of the note in brackets."""
    help, bracket, note = text.partition("[")
    phrases = (p if len(p) > _MOST_PHRASE else p.replace(" ", _NO_BREAK) for p in note.split("; "))
    return help + bracket + "; ".join(phrases)


def _with_one_no(names: str) -> str:
    """Return `--[no-]spec` for `--spec / --no-spec`."""
    first, _, second = names.partition(" / --no-")
    return first.replace(f"--{second}", f"--[no-]{second}") if second else names


_PROMPT_FLAGS = ("-p", "--prompt")
_RESUME_FLAGS = ("-r", "--resume")
# Words that people try as a subcommand in other programs, and the right one here.
_OTHER_WORDS = {"help": "--help", "version": "--version", "list": "models list"}


class ChatGroup(HelpedGroup):
    """The `kvchat` command: subcommands, or a prompt in their place."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the rewritten arguments; a shell that completes a line gets them unchanged."""
        if not ctx.resilient_parsing:
            valued = {flag for p in self.params if not _is_switch(p) for flag in p.opts}
            known = {f for p in self.get_params(ctx) for f in (*p.opts, *p.secondary_opts)}
            if not _has_unknown_flag(args, valued, known, self.commands):  # else click names it
                args = spelled_out(args, valued, self.commands)
        return super().parse_args(ctx, args)


# What a flag or an argument of one of these types gives, the parser has already.
_PLAIN: tuple[Any, ...] = (str, bool, list[str])


class _AsGiven:
    """Takes what stands on the command line as it is: kvchat's own table checks and converts it."""

    def coerce(self, value: Any, param: Any, ctx: typer.Context) -> Any:
        is_list = param.multiple or param.nargs == -1
        return () if value is None and is_list else value


def _leave_values(parameters: Iterable[Any]) -> None:
    """Keep typer from importing a library for types, which takes longer than the parsing.

    Where typer converts texts and switches otherwise, this changes nothing.
    """
    for parameter in parameters:
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        if kind in _PLAIN and getattr(parameter, "_runtime_param", _AsGiven) is None:
            parameter._runtime_param = _AsGiven()


class BenchGroup(HelpedGroup):
    """The `kvchat bench` command: subcommands, or names of scenarios in their place."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments, with each name of a scenario as `--scenario`."""
        valued = {flag for p in self.params if not _is_switch(p) for flag in p.opts}
        kept: list[str] = []
        rest = list(args)
        while rest and rest[0] not in self.commands:
            argument = rest.pop(0)
            if not argument.startswith("-"):
                kept.append(f"--scenario={argument}")
                continue
            kept.append(argument)
            if _awaits_value(argument, valued) and rest:
                kept.append(rest.pop(0))
        return super().parse_args(ctx, [*kept, *rest])


def _is_switch(parameter: object) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def spelled_out(
    arguments: Sequence[str], valued_flags: Collection[str], commands: Collection[str]
) -> list[str]:
    """Return the arguments with a positional prompt as `--prompt`, and a bare `-r` as `--resume=`.

    What follows a subcommand's name is unchanged. `valued_flags` are the flags that take a value.
    Raises UsageError for two prompts, and for one word that looks like a mistyped subcommand.
    """
    kept: list[str] = []
    prompts: list[str] = []
    has_flag = False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            prompts += rest
            break
        if not argument.startswith("-") or argument == "-":
            if argument in commands and not prompts:
                return [*kept, argument, *rest]
            prompts.append(argument)
            continue
        has_flag = has_flag or _has_prompt(argument)
        if argument in _RESUME_FLAGS and not (rest and _is_value(rest[0])):
            kept.append("--resume=")
            continue
        kept.append(argument)
        if _awaits_value(argument, valued_flags) and rest:
            kept.append(rest.pop(0))
    return kept + _as_flag(prompts, has_flag, commands)


def _has_unknown_flag(
    arguments: Sequence[str],
    valued_flags: Collection[str],
    known: Collection[str],
    commands: Collection[str],
) -> bool:
    """Whether there is a long flag that does not exist, whose value would look like a prompt."""
    rest = list(arguments)
    while rest and (argument := rest.pop(0)) != "--" and argument not in commands:
        if argument.startswith("--") and argument.partition("=")[0] not in known:
            return True
        if argument.startswith("-") and _awaits_value(argument, valued_flags) and rest:
            rest.pop(0)
    return False


def _is_value(argument: str) -> bool:
    """Whether an argument after `-r` names a conversation and is not the next flag."""
    return not argument.startswith("-")


def _has_prompt(argument: str) -> bool:
    return argument in _PROMPT_FLAGS or argument.startswith("--prompt=")


def _awaits_value(argument: str, valued_flags: Collection[str]) -> bool:
    """Whether the next argument is this flag's value; of `-qp`, the last letter decides."""
    if argument.startswith("--"):
        return argument in valued_flags
    letters = [f"-{letter}" for letter in argument[1:]]
    first = next((i for i, letter in enumerate(letters) if letter in valued_flags), None)
    return first is not None and first == len(letters) - 1


def _as_flag(prompts: list[str], has_flag: bool, commands: Collection[str]) -> list[str]:
    if not prompts:
        return []
    if has_flag:
        raise UsageError(f"There are two prompts: {shown(prompts[0])} and that of --prompt.")
    if len(prompts) > 1:
        raise UsageError(
            f"There are {len(prompts)} prompts: {shown(prompts[0])}, {shown(prompts[1])}.",
            "Put a prompt of several words in quotes.",
        )
    [prompt] = prompts
    meant = _OTHER_WORDS.get(prompt) or _closest(prompt, commands)
    if meant is not None:
        raise UsageError(
            f"There is no command {shown(prompt)}.",
            f"Is `kvchat {meant}` meant? As a prompt: kvchat -p {prompt}",
        )
    return [f"--prompt={prompt}"]


def _closest(word: str, commands: Collection[str]) -> str | None:
    """Return the subcommand that a single word may be a misspelling of, None if there is none."""
    close = difflib.get_close_matches(word, commands, n=1, cutoff=0.75)
    return close[0] if close else None
