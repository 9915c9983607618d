"""The Jinja environment chat templates are written for.

Sandboxed, with the few names transformers gives templates, and a clock that stands still. Knows
Jinja; knows neither tokens nor conversations. Sets no bounds: `template_child.py` has it run where
the kernel does.
"""

import json
from collections.abc import Sequence
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
