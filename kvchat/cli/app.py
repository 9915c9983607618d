"""The typer application: `kvchat`, its subcommands and their flags.

Each command creates what it needs, runs it and exits with its code. Slow imports happen only when a
command runs.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvchat import __version__
from kvchat.cli.command_line import ChatGroup
from kvchat.cli.settings import BY_NAME, OF_KV, unknown_variables
from kvchat.core.errors import UsageError
from kvchat_kernels.cpu.level import CPU_VARIABLE

# Commands that may run compiled kernels; None is the chat.
_RUNS_KERNELS = (None, "bench", "models", "serve")
config_app = typer.Typer(rich_markup_mode=None, help="Settings and where they come from.")


app = typer.Typer(
    name="kvchat",
    cls=ChatGroup,
    subcommand_metavar="[PROMPT | COMMAND [ARGS]...]",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

# The error of typer for a bad command line. typer exports only its subclasses.
UsageFault: type[Any] = typer.BadParameter.__bases__[0]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"kvchat {__version__}")
        raise typer.Exit


def _setting(name: str, *declarations: str, metavar: str | None = None) -> Any:
    """Return the typer option of a setting; its help comes from the table of settings."""
    setting = BY_NAME[name]
    flags = declarations or (setting.flag,)
    return typer.Option(*flags, help=setting.help, metavar=metavar, show_default=False)


def _file_path(text: str) -> Path:
    """Return the path of a file to attach: an empty text would name the working directory."""
    if not text:
        raise UsageError("-f names no file: it is an empty text.")
    return Path(text)


def _warn_of_unknown_variables(is_quiet: bool) -> None:
    if not is_quiet:
        for sentence in unknown_variables(os.environ):
            typer.echo(f"kvchat: {sentence}", err=True)


def _require_processor_level() -> None:
    """Raise UsageError if `KVCHAT_CPU` names a level that this processor cannot run.

    Code for such a level ends the process in an illegal instruction.
    """
    if os.environ.get(CPU_VARIABLE):
        from kvchat_kernels.cpu.code import processor_name  # imports LLVM

        try:
            processor_name()
        except RuntimeError as error:
            raise UsageError(str(error), "Unset it, or see docs/environment.md.") from error


@app.callback(invoke_without_command=True)
def chat(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="answer this and leave", metavar="TEXT")
    ] = None,
    model: Annotated[str | None, _setting("model", "-m", "--model", metavar="NAME")] = None,
    endpoint: Annotated[str | None, _setting("endpoint", metavar="URL|NAME")] = None,
    adapter: Annotated[str | None, _setting("adapter", metavar="DIR")] = None,
    system: Annotated[str | None, _setting("system", "-s", "--system", metavar="TEXT")] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", help="attach a text file or a pin (repeat)", metavar="PATH"),
    ] = None,
    continue_: Annotated[
        bool, typer.Option("-c", "--continue", help="go on with the last conversation")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "-r",
            "--resume",
            help="go on with this conversation: an id or a title; alone: choose one",
            metavar="[ID|TITLE]",
        ),
    ] = None,
    fork: Annotated[bool, typer.Option("--fork", help="with -c or -r: go on in a copy")] = False,
    title: Annotated[
        str, typer.Option(help="name the conversation", metavar="TEXT", show_default=False)
    ] = "",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object an answer")] = False,
    output_format: Annotated[
        str, typer.Option(help="text, json or stream-json", metavar="FORMAT")
    ] = "text",
    input_format: Annotated[
        str, typer.Option(help="text, lines (a turn or /command a line) or jsonl", metavar="FORMAT")
    ] = "text",
    raw: Annotated[
        bool, typer.Option("--raw", help="pass control characters of an answer through")
    ] = False,
    stats: Annotated[bool | None, _setting("stats", "--stats")] = None,
    quiet: Annotated[bool | None, _setting("quiet", "-q", "--quiet")] = None,
    temperature: Annotated[float | None, _setting("temperature", metavar="X")] = None,
    top_p: Annotated[float | None, _setting("top_p", metavar="X")] = None,
    top_k: Annotated[int | None, _setting("top_k", metavar="N")] = None,
    min_p: Annotated[float | None, _setting("min_p", metavar="X")] = None,
    repetition_penalty: Annotated[float | None, _setting("repetition_penalty", metavar="X")] = None,
    seed: Annotated[int | None, _setting("seed", metavar="N")] = None,
    max_tokens: Annotated[int | None, _setting("max_tokens", metavar="N")] = None,
    repetition_limit: Annotated[int | None, _setting("repetition_limit", metavar="N")] = None,
    stop: Annotated[list[str] | None, _setting("stop", metavar="TEXT")] = None,
    think: Annotated[str | None, _setting("think", metavar="HOW")] = None,
    context_policy: Annotated[str | None, _setting("context_policy", metavar="HOW")] = None,
    tools: Annotated[bool | None, _setting("tools", "--tools/--no-tools")] = None,
    allow_tool: Annotated[list[str] | None, _setting("allow_tool", metavar="NAME")] = None,
    tool_env: Annotated[list[str] | None, _setting("tool_env", metavar="NAME")] = None,
    timeout: Annotated[float | None, _setting("timeout", metavar="S")] = None,
    samples: Annotated[
        int, typer.Option("-n", "--samples", help="answers to the same prompt", metavar="N")
    ] = 1,
    spec: Annotated[bool | None, _setting("spec", "--spec/--no-spec")] = None,
    draft: Annotated[str | None, _setting("draft", metavar="NAME")] = None,
    device: Annotated[str | None, _setting("device", metavar="NAME")] = None,
    dtype: Annotated[str | None, _setting("dtype", metavar="NAME")] = None,
    weights: Annotated[str | None, _setting("weights", metavar="NAME")] = None,
    kv_dtype: Annotated[str | None, _setting("kv_dtype", metavar="NAME")] = None,
    block_size: Annotated[int | None, _setting("block_size", metavar="N")] = None,
    threads: Annotated[int | None, _setting("threads", metavar="N")] = None,
    device_cache: Annotated[str | None, _setting("device_cache", metavar="SIZE")] = None,
    host_cache: Annotated[str | None, _setting("host_cache", metavar="SIZE")] = None,
    disk_cache: Annotated[str | None, _setting("disk_cache", metavar="SIZE")] = None,
    cache_dir: Annotated[str | None, _setting("cache_dir", metavar="DIR")] = None,
    max_context: Annotated[int | None, _setting("max_context", metavar="N")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="never reuse KV")] = False,
    incognito: Annotated[bool | None, _setting("incognito", "--incognito")] = None,
    sessions_dir: Annotated[str | None, _setting("sessions_dir", metavar="DIR")] = None,
    color: Annotated[str | None, _setting("color", metavar="WHEN")] = None,
    accessible: Annotated[bool | None, _setting("accessible", "--accessible")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="log more, on stderr too")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="the version")
    ] = False,
) -> None:
    """Chat with local language models, and never read the same conversation twice.

    On a terminal this starts an interactive chat. With a prompt, as in `kvchat "Hello"` or with -p,
    or with input from a pipe, it answers and exits.
    """
    _warn_of_unknown_variables(bool(quiet))
    if context.invoked_subcommand in _RUNS_KERNELS:
        _require_processor_level()
    if context.invoked_subcommand is not None:
        return
    from kvchat.cli.chat import ChatRequest, run_chat

    flags = {name: value for name, value in context.params.items() if name in BY_NAME}
    if no_cache:
        flags["cache"] = False
    request = ChatRequest(
        prompt=prompt,
        files=tuple(map(_file_path, file or ())),
        is_continued=continue_,
        resume=resume,
        is_forked=fork,
        title=title,
        output_format="json" if json_ else output_format,
        input_format=input_format,
        is_raw=raw,
        num_samples=samples,
    )
    raise typer.Exit(run_chat(flags, request))


@app.command()
def bench(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            help="turns resume cold decode spec prefill tiers radix memory startup kernels "
            "weights replay equality clients concurrency kv"
        ),
    ] = None,
    model: Annotated[str | None, _setting("model", "-m", "--model", metavar="NAME")] = None,
    shape: Annotated[str, typer.Option(help="of random weights, without a model")] = "0.4b",
    dtype: Annotated[str, typer.Option(help="of random weights", metavar="NAME")] = "bfloat16",
    weights: Annotated[str, _setting("weights", metavar="NAME")] = "auto",
    kv_dtype: Annotated[str, _setting("kv_dtype", metavar="NAME")] = "auto",
    device: Annotated[str, _setting("device", metavar="NAME")] = "auto",
    device_cache: Annotated[str | None, _setting("device_cache", metavar="SIZE")] = None,
    block_size: Annotated[int, _setting("block_size", metavar="N")] = 16,
    threads: Annotated[int | None, _setting("threads", metavar="N")] = None,
    repeats: Annotated[int, typer.Option(help="of every measurement", metavar="N", min=1)] = 5,
    sessions: Annotated[Path | None, typer.Option(help="recorded conversations to replay")] = None,
    gguf: Annotated[Path | None, typer.Option(help="the same model for llama.cpp")] = None,
    record: Annotated[Path | None, typer.Option(help="a directory for the report")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="turns: measure this server instead", metavar="URL|NAME")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="small lengths: does it run? No figures to quote")
    ] = False,
) -> None:
    """Measure this machine: every figure beside its peer or its ceiling, JSON on the last line."""
    from kvchat.cli.bench import BenchRequest, run_bench

    run_bench(
        BenchRequest(
            scenarios=tuple(scenarios or ()),
            model=model,
            shape=shape,
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
            device=device,
            device_cache=device_cache,
            block_size=block_size,
            threads=threads,
            repeats=repeats,
            is_quick=quick,
            sessions=sessions,
            gguf=gguf,
            record=record,
            endpoint=endpoint,
        )
    )


@app.command()
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="the address to listen on", metavar="ADDRESS")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes a free one", metavar="N")] = 8642,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="clients must send this; default: KVCHAT_API_KEY; needed beyond this machine, and "
            "made by itself where other people use this machine",
            metavar="KEY",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="the file with the key, which no list of processes shows", metavar="PATH"
        ),
    ] = None,
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="let every user of this machine in")
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="another name for the model; * stands for any text (repeat)", metavar="NAME"
        ),
    ] = None,
    stabilise: Annotated[
        bool | None,
        typer.Option(
            "--stabilise/--no-stabilise",
            help="move lines of system prompts that change to the end, else only agents' (those of "
            "requests with tools): docs/serve.md",
        ),
    ] = None,
    model: Annotated[str | None, _setting("model", "-m", "--model", metavar="NAME")] = None,
    draft: Annotated[str | None, _setting("draft", metavar="NAME")] = None,
    spec: Annotated[bool | None, _setting("spec", "--spec/--no-spec")] = None,
    temperature: Annotated[float | None, _setting("temperature", metavar="X")] = None,
    max_tokens: Annotated[int | None, _setting("max_tokens", metavar="N")] = None,
    repetition_limit: Annotated[int | None, _setting("repetition_limit", metavar="N")] = None,
    device: Annotated[str | None, _setting("device", metavar="NAME")] = None,
    dtype: Annotated[str | None, _setting("dtype", metavar="NAME")] = None,
    weights: Annotated[str | None, _setting("weights", metavar="NAME")] = None,
    kv_dtype: Annotated[str | None, _setting("kv_dtype", metavar="NAME")] = None,
    threads: Annotated[int | None, _setting("threads", metavar="N")] = None,
    max_context: Annotated[int | None, _setting("max_context", metavar="N")] = None,
    device_cache: Annotated[str | None, _setting("device_cache", metavar="SIZE")] = None,
    host_cache: Annotated[str | None, _setting("host_cache", metavar="SIZE")] = None,
    disk_cache: Annotated[str | None, _setting("disk_cache", metavar="SIZE")] = None,
    cache_dir: Annotated[str | None, _setting("cache_dir", metavar="DIR")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="never reuse KV")] = False,
    incognito: Annotated[bool | None, _setting("incognito", "--incognito")] = None,
) -> None:
    """Serve the model to other programs: OpenAI's and Anthropic's HTTP interfaces, one cache."""
    from kvchat.cli.serve import ServeRequest, run_server
    from kvchat.cli.server_key import KeyRequest

    assert context.parent is not None
    own = {name for name in context.params if name in BY_NAME}
    given = {**context.parent.params, **{n: v for n in own if (v := context.params[n]) is not None}}
    flags = {setting: value for setting, value in given.items() if setting in BY_NAME}
    if no_cache or given["no_cache"]:
        flags["cache"] = False
    key = KeyRequest(api_key, api_key_file, no_api_key)
    request = ServeRequest(host, port, key, tuple(name or ()), stabilise)
    raise typer.Exit(run_server(flags, request))


sessions_app = typer.Typer(rich_markup_mode=None, help="Saved conversations.")
models_app = typer.Typer(rich_markup_mode=None, help="Models on this machine.")
cache_app = typer.Typer(rich_markup_mode=None, help="KV kept on disk between runs.")
app.add_typer(sessions_app, name="sessions", invoke_without_command=True)
app.add_typer(models_app, name="models", invoke_without_command=True)
app.add_typer(cache_app, name="cache", invoke_without_command=True)
app.add_typer(config_app, name="config", invoke_without_command=True)

_SessionsDir = Annotated[str | None, _setting("sessions_dir", metavar="DIR")]
_SessionId = Annotated[str, typer.Argument(metavar="ID|TITLE", help="or the beginning of one")]


def _given_before(context: typer.Context, name: str) -> Any:
    """Return a flag's value from before the subcommand, where it has the same meaning."""
    return context.parent.params.get(name) if context.parent is not None else None


@sessions_app.callback()
def sessions_default(context: typer.Context, sessions_dir: _SessionsDir = None) -> None:
    """List, show, export, import, rename or delete saved conversations."""
    context.obj = sessions_dir or _given_before(context, "sessions_dir")
    if context.invoked_subcommand is None:
        sessions_list(context)


@sessions_app.command("list")
def sessions_list(
    context: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """List conversations, the most recent first."""
    from kvchat.cli import sessions

    given = context.find_root().params
    kept = sessions.open_kept_kv(context.obj, {name: given.get(name) for name in OF_KV})
    sessions.list_sessions(sessions.open_store(context.obj), kept, json_)


@sessions_app.command("show")
def sessions_show(context: typer.Context, session: _SessionId) -> None:
    """Print a conversation as text."""
    from kvchat.cli import sessions

    sessions.show(sessions.open_store(context.obj), session)


@sessions_app.command("export")
def sessions_export(
    context: typer.Context,
    session: _SessionId,
    path: Annotated[Path | None, typer.Argument(help="a file; default: standard output")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="md, json or jsonl; default: FILE's ending, or md"),
    ] = None,
) -> None:
    """Write a conversation as Markdown, JSON messages, or a session file."""
    from kvchat.cli import sessions

    sessions.export(sessions.open_store(context.obj), session, path, format_)


@sessions_app.command("import")
def sessions_import(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="a session file or JSON messages")],
) -> None:
    """Add a conversation from a file."""
    from kvchat.cli import sessions

    sessions.import_file(sessions.open_store(context.obj), path)


@sessions_app.command("rename")
def sessions_rename(context: typer.Context, session: _SessionId, title: str) -> None:
    """Give a conversation a title."""
    from kvchat.cli import sessions

    sessions.rename(sessions.open_store(context.obj), session, title)


@sessions_app.command("rm")
def sessions_remove(
    context: typer.Context,
    session: Annotated[list[str], typer.Argument(metavar="ID|TITLE...")],
) -> None:
    """Delete conversations permanently, with their KV and what was typed in them."""
    from kvchat.cli import sessions

    given = context.find_root().params
    of_kv = {name: given.get(name) for name in OF_KV}
    sessions.remove(sessions.open_places(context.obj, of_kv), session)


@models_app.callback()
def models_default(context: typer.Context) -> None:
    """List the models on this machine, or describe one and say whether it is supported."""
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list() -> None:
    """List the models on this machine with their sizes."""
    from kvchat.cli import models

    models.list_models()


@models_app.command("info")
def models_info(
    model: Annotated[str, typer.Argument(help=BY_NAME["model"].help)] = "demo",
    adapter: Annotated[str | None, _setting("adapter", metavar="DIR")] = None,
    device: Annotated[str | None, _setting("device", metavar="NAME")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Print a model's properties, the size of its KV, and whether kvchat can run it."""
    from kvchat.cli import models

    models.info(model, device or "auto", json_, adapter)


_Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@cache_app.callback()
def cache_default(
    context: typer.Context,
    cache_dir: Annotated[str | None, _setting("cache_dir", metavar="DIR")] = None,
    disk_cache: Annotated[str | None, _setting("disk_cache", metavar="SIZE")] = None,
    json_: _Json = False,
) -> None:
    """Show, verify, clean up or delete the KV on disk; conversations are kept."""
    flags = {"cache_dir": cache_dir, "disk_cache": disk_cache}
    flags |= dict.fromkeys(("sessions_dir", *OF_KV))
    context.obj = {name: value or _given_before(context, name) for name, value in flags.items()}
    if context.invoked_subcommand is None:
        cache_status(context, json_)


@cache_app.command("status")
def cache_status(context: typer.Context, json_: _Json = False) -> None:
    """Print the store's directory, its size, and when it was last used."""
    from kvchat.cli import cache

    store = cache.open_sessions(context.obj)
    cache.show_status(cache.open_store(context.obj), store, json_)


@cache_app.command("tree")
def cache_tree(context: typer.Context) -> None:
    """Print every pack, below the pack that it continues."""
    from kvchat.cli import cache

    cache.show_tree(cache.open_store(context.obj), cache.open_sessions(context.obj))


@cache_app.command("why")
def cache_why(context: typer.Context, session: _SessionId) -> None:
    """Say what the next message of a conversation has to read, and why."""
    from kvchat.cli import cache

    cache.show_why(cache.open_store(context.obj), cache.open_sessions(context.obj), session)


@cache_app.command("verify")
def cache_verify(context: typer.Context) -> None:
    """Read every pack and remove damaged ones; exit 1 if there were any."""
    from kvchat.cli import cache

    raise typer.Exit(cache.verify(cache.open_store(context.obj)))


@cache_app.command("gc")
def cache_collect(context: typer.Context) -> None:
    """Remove KV that is out of date or exceeds --disk-cache."""
    from kvchat.cli import cache

    cache.collect(cache.open_store(context.obj))


@cache_app.command("clear")
def cache_clear(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing")] = False,
) -> None:
    """Delete all KV on disk."""
    from kvchat.cli import cache

    cache.clear(cache.open_store(context.obj), yes)


@cache_app.command("path")
def cache_path(context: typer.Context) -> None:
    """Print the store's directory."""
    from kvchat.cli import cache

    cache.show_path(cache.open_store(context.obj))


@app.command()
def doctor(context: typer.Context, sessions_dir: _SessionsDir = None) -> None:
    """Check terminal, Python, torch, GPU, disk, kept KV, sessions; exit 0 only if all is well."""
    from kvchat.cli.doctor import examine

    raise typer.Exit(examine(sessions_dir or _given_before(context, "sessions_dir")))


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
    from kvchat.cli import config

    root = context.find_root().params
    config.show({name: root[name] for name in BY_NAME if name in root}, origin)


@config_app.command("path")
def config_path() -> None:
    """Print the path of the configuration file."""
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
    """Remove a setting from the configuration file."""
    from kvchat.cli import config

    config.unset(name)
