"""Reads the format that a request wants of its answer: JSON, one of some texts, or a pattern."""

import json
from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.fields import Fields
from kvchat.chat.grammar import Grammar, json_grammar
from kvchat.core.errors import UsageError
from kvchat.server.api_errors import ApiError
from kvchat.server.service import Service

_JSON = {"type": "object"}
_MOST_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format that a request asks for, and the field that has it.

    schema   the JSON schema
    lark     a grammar in its place, in the form of llguidance; empty for none
    """

    schema: dict[str, Any]
    param: str
    lark: str = ""

    @property
    def grammar(self) -> str:
        return self.lark or json_grammar(self.schema)


def answer_format(fields: Fields, name: str, schema_path: tuple[str, ...]) -> AnswerFormat | None:
    """Return the format that a request asks for, None for any text.

    name          the field of `fields` that holds the format
    schema_path   where in it the schema is; llama.cpp has it beside the type

    Raises ApiError for a format that is unknown.
    """
    format_fields = fields.nested(name)
    kind = format_fields.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = format_fields.nested("schema").values or _JSON
        return AnswerFormat(schema, fields.name_of(name))
    if kind != "json_schema":
        raise format_fields.fault("type", "must be text, json_object or json_schema")
    if schema_path[0] not in format_fields and "schema" in format_fields:
        schema_path = ("schema",)
    for part in schema_path[:-1]:
        format_fields = format_fields.nested(part)
    last = schema_path[-1]
    if format_fields.raw(last) is None:
        raise format_fields.fault(last, "is missing")
    format_fields.flag("strict")
    return AnswerFormat(format_fields.nested(last).values, format_fields.name_of(last))


def foreign_format(fields: Fields) -> AnswerFormat | None:
    """Return the format that the fields of vLLM, SGLang and llama.cpp ask for; None for any."""
    wanted = fields.nested("structured_outputs")
    wanted.refuse("grammar", "structural_tag", "whitespace_pattern")
    if wanted.flag("json_object"):
        return AnswerFormat(_JSON, wanted.name_of("json_object"))
    for holder, name in ((fields, "guided_json"), (fields, "json_schema"), (wanted, "json")):
        if name in holder:
            return AnswerFormat(_schema(holder, name), holder.name_of(name))
    for holder, name in ((fields, "guided_choice"), (wanted, "choice")):
        if name in holder:
            return AnswerFormat({}, holder.name_of(name), _choice(holder, name))
    for holder, name in ((fields, "guided_regex"), (fields, "regex"), (wanted, "regex")):
        if pattern := holder.text(name):
            pattern = pattern.replace("/", r"\/").replace("\n", r"\n")
            return AnswerFormat({}, holder.name_of(name), f"start: /{pattern}/")
    return None


def _schema(holder: Fields, name: str) -> dict[str, Any]:
    """Return a schema, which vLLM takes as text too."""
    if not isinstance(text := holder.raw(name), str):
        return holder.nested(name).values
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    return Fields({name: schema if schema is not None else text}).nested(name).values


def _choice(holder: Fields, name: str) -> str:
    """Return the grammar of one of some texts."""
    texts = holder.raw(name)
    is_list = isinstance(texts, list) and 0 < len(texts) <= _MOST_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise holder.fault(name, f"must be a list of at most {_MOST_CHOICES} texts")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


async def with_format(
    service: Service, wanted: AnswerFormat | None, options: AskOptions
) -> AskOptions:
    """Return `options` with the grammar of a format.

    Raises ApiError for a schema that cannot be followed.
    """
    if wanted is None:
        return options
    grammar = await _compiled(service, wanted)
    return replace(options, grammar=grammar)


async def _compiled(service: Service, wanted: AnswerFormat) -> Grammar:
    model, param = service.host.model, wanted.param
    try:
        grammar = wanted.grammar
        return await service.answering.on_compiler(
            lambda: model.tokenizer.grammars.compile(grammar, model.stop_token_ids)
        )
    except UsageError as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from error
    except RecursionError:
        raise ApiError(400, f"{param} is nested too deeply.", param, "invalid_value") from None
