"""`kvchat config ...`: the commands' names, arguments and help. Knows no setting."""

from typing import Annotated

import typer

config_app = typer.Typer(rich_markup_mode=None, help="Settings and where they come from.")


@config_app.callback()
def config_default(context: typer.Context) -> None:
    """Show the settings in force, the configuration file, or change a setting in it."""
    if context.invoked_subcommand is None:
        config_show()


@config_app.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="say where each comes from")] = False,
) -> None:
    """Print every setting and its value."""
    from kvchat.cli import config

    config.show(origin)


@config_app.command("path")
def config_path() -> None:
    """Print where the configuration file is."""
    from kvchat.cli import config

    config.path()


# A value may begin with a dash, as -1 does.
@config_app.command("set", context_settings={"ignore_unknown_options": True})
def config_set(name: str, value: str) -> None:
    """Change a setting in the configuration file."""
    from kvchat.cli import config

    config.set_value(name, value)


@config_app.command("unset")
def config_unset(name: str) -> None:
    """Take a setting out of the configuration file."""
    from kvchat.cli import config

    config.unset(name)
