"""Commands on stores: conversations, models, KV, settings and presets.

`app.py` joins them to the program.
"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvchat.cli.command_line import HelpedCommand, HelpedGroup
from kvchat.cli.flags import takes
from kvchat.cli.made_at_use import made_at_use
from kvchat.core.parameters import BY_NAME, OF_KV

if TYPE_CHECKING:
    from kvchat.chat.store import SessionStore
    from kvchat.cli import build, cache, config, model_lists, models, presets, sessions, sizing
else:  # a command's modules are imported when it runs
    _NAMES = ("build", "cache", "config", "model_lists", "models", "presets", "sessions", "sizing")
    build, cache, config, model_lists, models, presets, sessions, sizing = (
        made_at_use(partial(import_module, f"kvchat.cli.{name}")) for name in _NAMES
    )


def _new_app(help: str) -> typer.Typer:
    return typer.Typer(cls=HelpedGroup, rich_markup_mode=None, help=help)


sessions_app = _new_app("Saved conversations.")
models_app = _new_app("Models on this machine.")
cache_app = _new_app("KV kept on disk between runs.")
config_app = _new_app("Settings and where they come from.")
presets_app = _new_app("Presets: names for a model, a prompt, parameters and files.")

_takes_sessions_dir = takes((BY_NAME["sessions_dir"],))
_SessionId = Annotated[str, typer.Argument(metavar="ID|TITLE", help="or the beginning of one")]


def given_before(context: typer.Context, name: str) -> Any:
    """Return a flag's value from before the subcommand, where it has the same meaning."""
    return context.parent.params.get(name) if context.parent is not None else None


@sessions_app.callback()
@_takes_sessions_dir
def sessions_default(context: typer.Context, **flags: Any) -> None:
    """List, show, export, import, rename or delete saved conversations."""
    of_kv = {name: context.find_root().params.get(name) for name in OF_KV}
    sessions_dir = flags["sessions_dir"] or given_before(context, "sessions_dir")
    context.obj = {"sessions_dir": sessions_dir, **of_kv}
    if context.invoked_subcommand is None:
        sessions_list(context)


def _store(context: typer.Context) -> "SessionStore":
    return build.session_store(build.settings_of(context.obj))


@sessions_app.command("list")
def sessions_list(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """List conversations, the most recent first."""
    sessions.list_sessions(build.settings_of(context.obj), json_)


@sessions_app.command("show")
def sessions_show(context: typer.Context, session: _SessionId) -> None:
    """Print a conversation as text."""
    sessions.show(_store(context), session)


@sessions_app.command("export")
def sessions_export(
    context: typer.Context,
    session: _SessionId,
    path: Annotated[Path | None, typer.Argument(help="a file; default: standard output")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="md, html, json or jsonl; default: FILE's ending, or md"),
    ] = None,
) -> None:
    """Write a conversation as Markdown, HTML, JSON messages, or a session file."""
    sessions.export(_store(context), session, path, format_)


@sessions_app.command("import")
def sessions_import(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="a session file or JSON messages")],
) -> None:
    """Add a conversation from a file."""
    sessions.import_file(_store(context), path)


@sessions_app.command("rename")
def sessions_rename(context: typer.Context, session: _SessionId, title: str) -> None:
    """Give a conversation a title."""
    sessions.rename(_store(context), session, title)


@sessions_app.command("rm")
def sessions_remove(
    context: typer.Context, session: Annotated[list[str], typer.Argument(metavar="ID|TITLE...")]
) -> None:
    """Delete conversations permanently, with their KV and what was typed in them."""
    settings = build.settings_of({**context.obj, "incognito": False})
    sessions.remove(build.saved_places(settings), session)


@models_app.callback()
@takes((BY_NAME["model_dir"],))
def models_default(context: typer.Context, **flags: Any) -> None:
    """List the models on this machine, or describe one and say whether it is supported."""
    context.obj = {"model_dir": flags["model_dir"] or given_before(context, "model_dir")}
    if context.invoked_subcommand is None:
        models_list(context)


@models_app.command("list", cls=HelpedCommand)
def models_list(context: typer.Context) -> None:
    """List the models on this machine: format, size, place, last use, warm conversations."""
    model_lists.list_models(context.obj)


@models_app.command("alias")
def models_alias(
    name: Annotated[str | None, typer.Argument(help="the alias; without it all are listed")] = None,
    model: Annotated[str | None, typer.Argument(help="what it stands for")] = None,
    rm: Annotated[bool, typer.Option("--rm", help="delete the alias")] = False,
) -> None:
    """Let a short name stand for a model, or list such names."""
    model_lists.alias(name, model, rm)


@models_app.command("rm", cls=HelpedCommand)
def models_rm(
    model: Annotated[str, typer.Argument(metavar="NAME", help="a model of the hub's cache")],
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Delete a downloaded model after saying what that frees; files of your own stay."""
    model_lists.remove(model, yes)


@models_app.command("info", cls=HelpedCommand)
@takes((BY_NAME["adapter"], BY_NAME["device"]))
def models_info(
    model: Annotated[str, typer.Argument(help=BY_NAME["model"].help)] = "demo",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    **flags: Any,
) -> None:
    """Print a model's properties, the size of its KV, and whether kvchat can run it."""
    models.info(model, flags["device"] or "auto", json_, flags["adapter"])


@models_app.command("fit", cls=HelpedCommand)
def models_fit(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|FILE]...", help="default: local and known")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
) -> None:
    """Say which models this machine runs well: weights, KV, first token and tokens a second."""
    sizing.run_fit(tuple(models or ()), json_)


_Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


_SHARED = ("shared_cache", "shared_key_file", "shared_encryption", "shared_deadline")


@cache_app.callback()
@takes(tuple(BY_NAME[name] for name in ("cache_dir", "disk_cache", *_SHARED)))
def cache_default(context: typer.Context, json_: _Json = False, **flags: Any) -> None:
    """Show, verify, clean up or delete the KV on disk; conversations are kept."""
    flags |= dict.fromkeys(("sessions_dir", *OF_KV))
    context.obj = {name: value or given_before(context, name) for name, value in flags.items()}
    if context.invoked_subcommand is None:
        cache_status(context, json_)


@cache_app.command("status")
def cache_status(context: typer.Context, json_: _Json = False) -> None:
    """Print the store's directory, its size, and when it was last used."""
    cache.show_status(build.settings_of(context.obj), json_)


@cache_app.command("tree")
def cache_tree(context: typer.Context) -> None:
    """Print every pack, below the pack that it continues."""
    cache.show_tree(build.settings_of(context.obj))


@cache_app.command("why")
def cache_why(context: typer.Context, session: _SessionId) -> None:
    """Say what the next message of a conversation has to read, and why."""
    cache.show_why(build.settings_of(context.obj), session)


@cache_app.command("verify")
def cache_verify(context: typer.Context) -> None:
    """Read every pack and remove damaged ones; exit 1 if there were any."""
    raise typer.Exit(cache.verify(build.settings_of(context.obj)))


@cache_app.command("gc")
def cache_collect(context: typer.Context) -> None:
    """Remove KV that is out of date or exceeds --disk-cache."""
    cache.collect(build.settings_of(context.obj))


@cache_app.command("clear")
def cache_clear(
    context: typer.Context, yes: Annotated[bool, typer.Option("--yes", help="ask nothing")] = False
) -> None:
    """Delete all KV on disk."""
    cache.clear(build.settings_of(context.obj), yes)


_Copied = Annotated[
    str, typer.Argument(metavar="NAME", help="a pin, or a conversation's id or title")
]


@cache_app.command("push")
def cache_push(context: typer.Context, name: _Copied) -> None:
    """Copy the KV of a pin or a conversation from the disk to --shared-cache."""
    cache.push(build.settings_of(context.obj), name)


@cache_app.command("pull")
def cache_pull(
    context: typer.Context,
    name: _Copied,
    price: Annotated[bool, typer.Option("--price", help="only say how much it is")] = False,
) -> None:
    """Copy the KV of a pin or a conversation from --shared-cache to the disk."""
    cache.pull(build.settings_of(context.obj), name, price)


@cache_app.command("path")
def cache_path(context: typer.Context) -> None:
    """Print the store's directory."""
    cache.show_path(build.settings_of(context.obj))


@config_app.callback()
def config_default(context: typer.Context) -> None:
    """Show the current settings or the configuration file's path, or change a setting in it."""
    if context.invoked_subcommand is None:
        config_show(context)


@config_app.command("show")
def config_show(
    context: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="say where each comes from")] = False,
) -> None:
    """Print every setting and the value that a chat would use."""
    root = context.find_root().params
    config.show({name: root[name] for name in BY_NAME if name in root}, origin)


@config_app.command("path")
def config_path() -> None:
    """Print the path of the configuration file."""
    config.path()


# A value may begin with a dash, as -1 does.
@config_app.command("set", context_settings={"ignore_unknown_options": True})
def config_set(name: str, value: str) -> None:
    """Change a setting in the configuration file."""
    config.set_value(name, value)


@config_app.command("unset")
def config_unset(name: str) -> None:
    """Remove a setting from the configuration file."""
    config.unset(name)


_PresetName = Annotated[str, typer.Argument(metavar="NAME", help="the preset's name")]


@presets_app.callback()
def presets_default(context: typer.Context) -> None:
    """List presets, show or delete one, or make one of a Modelfile; --preset NAME takes one."""
    if context.invoked_subcommand is None:
        presets_list()


@presets_app.command("list")
def presets_list() -> None:
    """List the presets and what they hold."""
    presets.list_presets()


@presets_app.command("show")
def presets_show(name: _PresetName) -> None:
    """Print a preset."""
    presets.show(name)


@presets_app.command("rm")
def presets_remove(name: _PresetName) -> None:
    """Delete a preset."""
    presets.remove(name)


@presets_app.command("import")
def presets_import(
    name: _PresetName,
    file: Annotated[str, typer.Argument(metavar="MODELFILE", help="a Modelfile of ollama")],
) -> None:
    """Make a preset of a Modelfile's FROM, SYSTEM, PARAMETER and ADAPTER."""
    presets.import_modelfile(name, file)
