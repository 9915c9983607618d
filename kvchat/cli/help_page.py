"""Help of commands: options under headings, and every sentence whole."""

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvchat.core.parameters import Group

_OTHERS = "Options"
_NO_BREAK, _MOST_PHRASE = "\u00a0", 28
# The widest first column, and of a narrow terminal.
_MOST_COLUMNS, _MOST_NARROW, _NARROW = 28, 22, 70


class HelpedCommand(TyperCommand):
    """A command whose options are listed by their groups."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the arguments and options."""
        _write_options(self.get_params(ctx), ctx, formatter)


class HelpedGroup(TyperGroup):
    """A command with subcommands, whose help has whole sentences on all of them."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the options, and then the subcommands."""
        _write_options(self.get_params(ctx), ctx, formatter)
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
