"""Child process that renders a checkpoint's chat template: one JSON line in, one JSON line out.

A template is an untrusted program: one call may loop for ever, allocate gigabytes or overflow the
stack, and a thread cannot be interrupted in such a call. In a process the kernel's limits end it.
Jinja runs sandboxed, with the names that transformers gives templates and a fixed clock.
`template_process.py` starts this process.
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
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Exceptions that an expression in a template can raise, besides Jinja's own errors.
_FAULTS = (
    *(ArithmeticError, AttributeError, AssertionError, LookupError, NameError),
    *(RecursionError, RuntimeError, SyntaxError, TypeError, ValueError),
)


class TemplateFailed(Exception):
    """The template is not valid, or it refused or failed to render; the message says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; rendering keeps the text inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate:
    """A chat template, compiled once. `names` are the variables that it reads, in order."""

    def __init__(self, template: jinja2.Template, names: Sequence[str]) -> None:
        self._template = template
        self.names = names

    def render(
        self,
        messages: Sequence[dict[str, object]],
        variables: dict[str, object],
        clock: datetime,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, object]] | None = None,
    ) -> str:
        """Render a conversation at the time `clock`; raises TemplateFailed if that fails."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                strftime_now=clock.strftime,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error).rstrip(".") or type(error).__name__) from error
        except _FAULTS as error:
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def compile_template(source: str) -> CompiledTemplate:
    """Compile a template; raises TemplateFailed if it is not valid Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        names = sorted(meta.find_undeclared_variables(environment.parse(source)))
        return CompiledTemplate(environment.from_string(source), names)
    except jinja2.TemplateError as error:
        raise TemplateFailed(str(error).rstrip(".")) from error
    except _FAULTS as error:  # Python compiles Jinja's output, and its compiler has limits too
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
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_SHORTEST_S = 0.01  # 0 would disable the timer


def main(cpu_limit_s: float, memory_bytes: int, text_bytes: int) -> None:
    """Answer requests until standard input ends. The first request holds the template's source.

    A request that needs more CPU time than `cpu_limit_s`, or than its own `limit_s`, ends the
    process with SIGPROF. CPU time is used so that a busy machine makes no difference. Rendered text
    of more than `text_bytes` is refused.
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
                template = compile_template(request["source"])
                reply: dict[str, object] = {"names": template.names}
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
    """Lower a resource limit of this process, if the system has it and its limit is not lower."""
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most, most))


def _render(template: CompiledTemplate, request: dict[str, Any], text_bytes: int) -> str:
    clock = datetime.fromisoformat(request["clock"])
    is_open, tools = request["is_open"], request["tools"]
    text = template.render(request["messages"], request["variables"], clock, is_open, tools)
    if len(text) > text_bytes or len(text.encode("utf-8", "surrogatepass")) > text_bytes:
        raise TemplateFailed(f"it writes more than {text_bytes >> 20} MiB")
    return text
