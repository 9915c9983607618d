"""The typer application: `kvchat`, its subcommands and their flags.

Each command creates what it needs, runs it and exits with its code. Slow imports happen only when a
command runs.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvchat import __version__
from kvchat.cli.command_line import BenchGroup, ChatGroup, HelpedCommand
from kvchat.cli.flags import (
    CHAT_FLAGS,
    OF_BENCH,
    OF_CHAT,
    OF_PLAN,
    OF_PREFILL,
    OF_SERVER,
    OF_TRACE,
    SERVE_FLAGS,
    takes,
    values_of,
)
from kvchat.cli.settings import unknown_variables
from kvchat.cli.store_commands import (
    cache_app,
    config_app,
    given_before,
    models_app,
    presets_app,
    sessions_app,
)
from kvchat.core.errors import UsageError
from kvchat.core.parameters import BY_NAME
from kvchat.core.text import parse_size
from kvchat_kernels.cpu.level import CPU_VARIABLE

_CLIENTS = "claude, codex, opencode, qwen, aider or llm"
# Commands that may run compiled kernels; None is the chat.
_RUNS_KERNELS = (None, "bench", "models", "serve")


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
@takes(OF_CHAT)
def chat(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="log more, on stderr too")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="the version")
    ] = False,
    **flags: Any,
) -> None:
    """Chat with local language models, and never read the same conversation twice.

    On a terminal this starts an interactive chat. With a prompt, as in `kvchat "Hello"` or with -p,
    or with input from a pipe, it answers and exits.
    """
    _warn_of_unknown_variables(bool(flags["quiet"]))
    if context.invoked_subcommand in _RUNS_KERNELS:
        _require_processor_level()
    if context.invoked_subcommand is not None:
        return
    from kvchat.cli.chat import ChatRequest, run_chat
    from kvchat.cli.presets import with_preset

    given = values_of(CHAT_FLAGS, flags)
    flags["format"] = given["schema"] or flags["format"]
    settings, files = with_preset(_settings_in(flags), given["preset"])
    is_new = not given["continue_"] and given["resume"] is None
    request = ChatRequest(
        prompt=given["prompt"],
        files=tuple(map(Path, (*(files if is_new else ()), *given["file"]))),
        is_continued=given["continue_"],
        takes_one_shots=given["last"],
        resume=given["resume"],
        is_forked=given["fork"],
        title=given["title"],
        output_format="json" if given["json"] else given["output_format"],
        input_format=given["input_format"],
        is_raw=given["raw"],
        num_samples=given["samples"],
    )
    raise typer.Exit(run_chat(settings, request))


def _settings_in(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that are settings."""
    return {name: value for name, value in flags.items() if name in BY_NAME}


def _settings_with(context: typer.Context, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a subcommand's flags that are settings, with those from before it."""
    assert context.parent is not None
    here = {name: v for name, v in _settings_in(flags).items() if v not in (None, [])}
    return {**_settings_in(context.parent.params), **here}


bench_app = typer.Typer(
    cls=BenchGroup,
    rich_markup_mode=None,
    subcommand_metavar="[SCENARIOS | COMMAND [ARGS]...]",
)
app.add_typer(bench_app, name="bench", invoke_without_command=True)


@bench_app.callback()
@takes(OF_BENCH)
def bench(
    context: typer.Context,
    scenario: Annotated[list[str] | None, typer.Option("--scenario", hidden=True)] = None,
    **flags: Any,
) -> None:
    """Measure this machine: every figure beside its peer or its ceiling, JSON on the last line.

    Scenarios: turns resume cold decode spec prefill tiers radix memory startup kernels weights
    replay equality clients concurrency kv
    """
    if context.invoked_subcommand is not None:
        return
    from kvchat.cli.bench import BenchRequest, run_bench

    given = values_of(OF_BENCH, flags)
    for name in ("sessions", "gguf", "peer", "record"):
        given[name] = given[name] and Path(given[name])
    model, quick = flags["model"], given.pop("quick")
    run_bench(BenchRequest(tuple(scenario or ()), **{**given, "model": model, "is_quick": quick}))


@bench_app.command("trace", cls=HelpedCommand)
@takes((BY_NAME["model"], *OF_TRACE))
def bench_trace(
    trace: Annotated[
        str, typer.Argument(help="a file of block hashes, or chats agents documents scans mixed")
    ],
    **flags: Any,
) -> None:
    """Replay a trace through tiers: hits and first tokens by kvchat's rule, LRU, LFU, Belady's."""
    from kvchat.cli.bench_trace import TraceRun, run_trace, speed_of

    given = values_of(OF_TRACE, flags)
    speed = speed_of(flags["model"], given["token_bytes"], given["prefill"])
    counts = (given["machines"], given["requests"], given["seed"])
    run_trace(TraceRun(trace, tuple(given["tier"]), speed, *counts))


@bench_app.command("plan", cls=HelpedCommand)
@takes((BY_NAME["model"], BY_NAME["kv_dtype"], *OF_PLAN))
def bench_plan(**flags: Any) -> None:
    """Say how many sessions a memory holds, and what resuming one costs from each tier."""
    from kvchat.cli.sizing import PlanRequest, run_plan

    given = values_of(OF_PLAN, flags)
    memory = parse_size(given["memory"], "--memory").resolve(0)
    reserve = parse_size(given["reserve"], "--reserve").resolve(memory)
    run_plan(
        PlanRequest(
            flags["model"] or "demo",
            memory,
            reserve,
            given["sessions"],
            given["tokens"],
            given["reserved"],
            given["bits"],
            flags["kv_dtype"] or "auto",
            given["run"],
            given["json"],
        )
    )


@app.command(cls=HelpedCommand)
@takes(OF_SERVER)
def serve(context: typer.Context, **flags: Any) -> None:
    """Serve the model to other programs: OpenAI's, Anthropic's and ollama's HTTP interfaces."""
    from kvchat.cli.presets import with_preset
    from kvchat.cli.serve import ServeRequest, run_server
    from kvchat.cli.server_key import KeyRequest

    assert context.parent is not None
    given = values_of(SERVE_FLAGS, flags)
    path = given["api_key_file"]
    key = KeyRequest(given["api_key"], path and Path(path), given["no_api_key"])
    request = ServeRequest(
        given["host"],
        given["port"],
        key,
        given["name"],
        given["stabilise"],
        prefills=given["role"] == "prefill",
        socket=given["socket"] or "",
        has_chat_page=given["web"],
        pooling=given["pooling"],
    )
    preset = given["preset"] or context.parent.params["preset"]
    settings, _ = with_preset(_settings_with(context, flags), preset)
    raise typer.Exit(run_server(settings, request))


@app.command(cls=HelpedCommand)
@takes(OF_PREFILL)
def prefill(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="FILE...|SESSION", help="what to read")],
    **flags: Any,
) -> None:
    """Read files or a conversation for the machines that share --shared-cache."""
    from kvchat.cli.prefill import run_prefill

    run_prefill(_settings_with(context, flags), names)


@app.command(
    cls=HelpedCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@takes((BY_NAME["model"], BY_NAME["max_context"], BY_NAME["keep_alive"]))
def launch(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help=_CLIENTS)],
    warm: Annotated[
        bool, typer.Option("--warm", help="let it read its own prompt before, once")
    ] = False,
    **flags: Any,
) -> None:
    """Start an agent or another client on a server here; its own flags stand behind --."""
    from kvchat.cli.launch import launch as start

    raise typer.Exit(start(client, context.args, _settings_with(context, flags), warm))


@app.command(cls=HelpedCommand)
def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[:QUANT]", help="a model of the hub")],
) -> None:
    """Download a model from the Hugging Face hub; of several formats you choose one."""
    from kvchat.cli.pull import pull as download

    download(model)


@app.command(cls=HelpedCommand)
def ps() -> None:
    """Show the server that runs here, in the background or not, and the memory that it holds."""
    from kvchat.cli import background

    background.show()


@app.command(cls=HelpedCommand)
def stop() -> None:
    """Stop the server that runs here; the next use loads the model again."""
    from kvchat.cli import background

    background.stop()


app.add_typer(sessions_app, name="sessions", invoke_without_command=True)
app.add_typer(models_app, name="models", invoke_without_command=True)
app.add_typer(cache_app, name="cache", invoke_without_command=True)
app.add_typer(config_app, name="config", invoke_without_command=True)
app.add_typer(presets_app, name="presets", invoke_without_command=True)


@app.command(cls=HelpedCommand)
@takes((BY_NAME["sessions_dir"],))
def doctor(context: typer.Context, **flags: Any) -> None:
    """Check terminal, Python, torch, GPU, disk, KV, shared cache, sessions; 0 if all is well."""
    from kvchat.cli.doctor import examine

    raise typer.Exit(examine(flags["sessions_dir"] or given_before(context, "sessions_dir")))
