"""Flags: the options of each command, from the table of parameters and the command's own rows.

typer reads them from a signature that `takes` writes. Their values are texts, which the parameter
reads, so that a bad one is refused in the words of every other place.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from kvchat.cli.settings import flag_value
from kvchat.core.parameters import (
    BY_NAME,
    DTYPES,
    PARAMETERS,
    Group,
    Kind,
    Parameter,
    grouped,
    new_choice,
    new_name,
    new_path,
    new_switch,
    new_text,
    new_texts,
    new_whole,
)
from kvchat.core.schemas import read_format

F = TypeVar("F", bound=Callable[..., Any])

MOST_SAMPLES = 1024


_switch = partial(new_switch, switches_off=False, default=False)

_PRESET = new_name("preset", "take the model, the prompt and all else from this preset")

# What `kvchat` takes besides the settings.
CHAT_FLAGS = (
    _PRESET,
    *grouped(
        Group.CONVERSATION,
        new_text("prompt", "answer this and leave", short="-p"),
        new_texts("file", "attach a text file or a pin (repeat)", unit="PATH", short="-f"),
        _switch("continue_", "go on with the last conversation and its model", short="-c"),
        _switch("last", "with -c: the answer to a single prompt too"),
        new_text(
            "resume",
            "go on with this conversation: an id or a title; alone: choose one",
            unit="[ID|TITLE]",
            short="-r",
        ),
        _switch("fork", "with -c or -r: go on in a copy"),
        new_text("title", "name the conversation", default=""),
    ),
    *grouped(
        Group.ANSWER,
        new_whole(
            "samples",
            "answers to the same prompt",
            default=1,
            least=1,
            most=MOST_SAMPLES,
            short="-n",
        ),
        new_text(
            "schema",
            "answer as this schema says: --format under another name",
            unit="SCHEMA",
            read=read_format,
        ),
    ),
    *grouped(
        Group.SCRIPTS,
        _switch("json", "print one JSON object an answer"),
        new_choice("output_format", "what is printed", ("text", "json", "stream-json"), "FORMAT"),
        new_choice(
            "input_format",
            "what is read; lines: a turn or /command a line; jsonl: a request a line",
            ("text", "lines", "jsonl"),
            "FORMAT",
        ),
        _switch("raw", "pass control characters of an answer through"),
    ),
)

SERVE_FLAGS = grouped(
    Group.SERVER,
    _PRESET,
    new_name("host", "the address to listen on", unit="ADDRESS", default="127.0.0.1"),
    new_whole("port", "0 takes a free one", default=8642, least=0, most=65535),
    new_path("socket", "a socket of yours to listen on in place of the network", unit="PATH"),
    new_text(
        "api_key",
        "clients must send this; needed beyond this machine, and made by itself where other "
        "people use this machine",
        unit="KEY",
        otherwise="KVCHAT_API_KEY",
    ),
    new_path(
        "api_key_file", "the file with the key, which no list of processes shows", unit="PATH"
    ),
    _switch("no_api_key", "let every user of this machine in"),
    new_choice(
        "role",
        "chat: answer; prefill: only read prompts for chats elsewhere",
        ("chat", "prefill"),
        "ROLE",
    ),
    new_choice("pooling", "of the hidden states in embeddings", ("mean", "last"), "POOLING"),
    _switch("web", "give browsers with the key a page to chat on"),
    new_texts("name", "another name for the model; * stands for any text (repeat)"),
    new_switch(
        "stabilise",
        "move lines of system prompts that change to the end: docs/serve.md",
        otherwise="in requests with tools",
    ),
)

BENCH_FLAGS = grouped(
    Group.BENCH,
    new_name("shape", "of random weights, without a model", default="0.4b"),
    new_text("dtype", "of random weights", unit="NAME", default="bfloat16", choices=DTYPES[1:]),
    new_whole("repeats", "of every measurement", default=5, least=1),
    new_path("sessions", "recorded conversations to replay", unit="PATH"),
    new_path("gguf", "the same model for llama.cpp", unit="PATH"),
    new_name("draft", "spec: a draft model, or an EAGLE-3 head", unit="NAME|DIR"),
    new_path("peer", "a llama-bench to run beside, of ik_llama.cpp", unit="PATH"),
    new_path("record", "a directory for the report", unit="PATH"),
    new_name("endpoint", "turns: measure this server instead", unit="URL|NAME"),
    _switch("quick", "small lengths: does it run? No figures to quote"),
)

OF_TRACE = grouped(
    Group.BENCH,
    new_texts(
        "tier",
        "NAME:SIZE[,SIZE...][:RATE[:LATENCY[:PRICE]]], the fastest first (repeat); shared is one "
        "for all machines, PRICE is of a GB a month",
        unit="TIER",
        otherwise="memory:4G disk:20G:1G:2ms",
    ),
    new_text("token_bytes", "of a token's KV", unit="SIZE", otherwise="128K, or -m's"),
    new_whole(
        "prefill", "first tokens computed a second", otherwise="1,000, or -m's here", least=1
    ),
    new_whole("machines", "requests are shared out to", default=1, least=1, most=100_000),
    new_whole("requests", "of a synthetic trace", default=20_000, least=1, most=100_000_000),
    new_whole("seed", "of a synthetic trace", default=0, least=0),
)

OF_PLAN = grouped(
    Group.BENCH,
    new_text("memory", "for weights and KV", unit="SIZE", default="24G"),
    new_text("reserve", "of it kept free for activations: 2G", unit="SIZE", default="10%"),
    new_whole("sessions", "that are to be resumed", default=10, least=1, most=10_000_000),
    new_whole("tokens", "of a session", default=2048, least=1, most=100_000_000),
    new_whole(
        "reserved",
        "tokens that a contiguous cache reserves a session",
        otherwise="the longest context",
        least=1,
    ),
    new_whole("bits", "of a weight, for models of the table", otherwise="4.85", least=1, most=32),
    _switch("run", "fill a real pool of as many blocks, and count"),
    _switch("json", "print one JSON object"),
)

# A server's clients have their own conversations, screens, tools and formats.
_NOT_SERVED = (Group.CONVERSATION, Group.TERMINAL, Group.TOOLS)
OF_CHAT = (*CHAT_FLAGS, *PARAMETERS)
_SERVED = (p for p in PARAMETERS if p.group not in _NOT_SERVED and p.name != "format")
OF_SERVER = (*SERVE_FLAGS, *_SERVED)
# What is read for other machines needs a model, its KV and a beginning.
_READ_WITH = (Group.MODEL, Group.CACHE)
OF_PREFILL = (BY_NAME["system"], *(p for p in PARAMETERS if p.group in _READ_WITH))
_BENCH_SETTINGS = (
    "model",
    "weights",
    "kv_dtype",
    "device",
    "device_cache",
    "block_size",
    "threads",
)
OF_BENCH = (*BENCH_FLAGS, *(BY_NAME[name] for name in _BENCH_SETTINGS))


def takes(parameters: tuple[Parameter, ...]) -> Callable[[F], F]:
    """Return a decorator: typer gives the function these flags as keyword arguments.

    A flag that was not given is None, or an empty list.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(
                parameter.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=flag(parameter),
            )
            for parameter in parameters
        ]
        function.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
        return function

    return decorate


def flag(parameter: Parameter) -> Any:
    """Return the type and the typer option of a parameter's flag."""
    long = parameter.flag
    is_switch = parameter.kind is Kind.SWITCH
    if is_switch and parameter.switches_off:
        long = f"{long}/--no-{parameter.dashed}"
    kind: Any = bool | None if is_switch else str | None
    option = typer.Option(
        *([parameter.short] if parameter.short else []),
        long,
        help=parameter.full_help,
        metavar=parameter.unit or None,
        show_default=False,
        rich_help_panel=parameter.group,
    )
    return Annotated[list[str] | None if parameter.kind is Kind.TEXTS else kind, option]


def values_of(parameters: tuple[Parameter, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each parameter, its default where no flag gives one.

    Raises UsageError for a bad value.
    """
    return {
        p.name: p.default if given.get(p.name) in (None, [], ()) else flag_value(p, given[p.name])
        for p in parameters
    }
