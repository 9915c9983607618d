"""The process that renders a checkpoint's chat template: one JSON line in, one out.

A template is a program from somewhere: it may loop for ever, make gigabytes, or overflow a stack,
within one call that no thread can be kept from. Here the kernel ends it. Jinja runs sandboxed, with
the few names that transformers gives templates, and a clock that stands still. Runs as a program,
started by `template_process.py`.
"""

import json
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What an expression in a template can raise besides Jinja's own errors.
_FAULTS = (
    *(ArithmeticError, AttributeError, AssertionError, LookupError, NameError),
    *(RecursionError, RuntimeError, SyntaxError, TypeError, ValueError),
)


class TemplateFailed(Exception):
    """The template is not valid, or refused or could not render a conversation; says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; rendering just keeps what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate:
    """A chat template, compiled once."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[dict[str, str]],
        variables: dict[str, object],
        clock: datetime,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation as of `clock`; raises TemplateFailed where the template refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                strftime_now=clock.strftime,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error).rstrip(".") or type(error).__name__) from error
        except _FAULTS as error:
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def compile_template(source: str) -> CompiledTemplate:
    """Compile a template; raises TemplateFailed where it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return CompiledTemplate(environment.from_string(source))
    except jinja2.TemplateError as error:
        raise TemplateFailed(str(error).rstrip(".")) from error
    except _FAULTS as error:  # Python compiles what Jinja makes of it, and has limits of its own
        raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Jinja's own filter, but without escaping for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_SHORTEST_S = 0.01  # nothing at all would set no timer


def main(cpu_limit_s: float, memory_bytes: int, text_bytes: int) -> None:
    """Answer requests until standard input ends.

    The first has the template's source. Work of more than `cpu_limit_s` on one request, or than the
    request's own `limit_s`, ends the process by SIGPROF: seconds of the processor, so that a busy
    machine makes no difference. Text of more than `text_bytes` is refused.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    template: CompiledTemplate | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            request = json.loads(line)
            allowed_s = min(request.get("limit_s") or cpu_limit_s, cpu_limit_s)
            signal.setitimer(signal.ITIMER_PROF, max(allowed_s, _SHORTEST_S))
            if template is None:
                template, reply = compile_template(request["source"]), {}
            else:
                reply = {"text": _render(template, request, text_bytes)}
        except TemplateFailed as error:
            reply = {"failed": " ".join(str(error).split())[:500]}
        except MemoryError:
            reply = {"failed": f"it needs more than {memory_bytes >> 20} MiB of memory"}
        answer = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _limit(what: int, most: int) -> None:
    """Lower a limit of this process; a system without it, or with a lower one, keeps its own."""
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most, most))


def _render(template: CompiledTemplate, request: dict[str, Any], text_bytes: int) -> str:
    clock = datetime.fromisoformat(request["clock"])
    text = template.render(request["messages"], request["variables"], clock, True)
    if len(text) > text_bytes or len(text.encode("utf-8", "surrogatepass")) > text_bytes:
        raise TemplateFailed(f"it writes more than {text_bytes >> 20} MiB")
    return text
