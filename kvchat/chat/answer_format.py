"""AnswerFormat: the form that an answer is held to, as a request or a setting asks for it."""

from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.fields import Fields
from kvchat.chat.grammar import Grammar, json_grammar
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import UsageError
from kvchat.core.schemas import schema_of

ANY_OBJECT = {"type": "object"}


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

    Raises FieldFault for a format that is unknown.
    """
    format_fields = fields.nested(name)
    kind = format_fields.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = format_fields.nested("schema").values or ANY_OBJECT
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


def with_grammar(options: AskOptions, model: ChatModel, tools: ToolSet | None) -> AskOptions:
    """Return options with the grammar of their format.

    An answer that may call one of `tools` is a call, or follows the format. A server in the place
    of an engine gets the schema instead. Raises UsageError for a schema that cannot be followed.
    """
    schema = schema_of(options.format)
    if schema is None or options.grammar is not None:
        return options
    from kvchat.chat.tokenizer import ChatTokenizer

    if not isinstance(model.tokenizer, ChatTokenizer):
        return options
    try:
        return replace(options, grammar=_grammar(schema, options, model, tools))
    except UsageError as error:
        raise UsageError(f"The format cannot be used. {error.message}", error.hint) from error
    except RecursionError:
        raise UsageError("The format's schema is nested too deeply.") from None


def _grammar(
    schema: dict[str, Any], options: AskOptions, model: ChatModel, tools: ToolSet | None
) -> Grammar:
    from kvchat.chat.call_grammar import call_grammar
    from kvchat.chat.tokenizer import ChatTokenizer

    tokenizer = model.tokenizer
    assert isinstance(tokenizer, ChatTokenizer)
    if tools is not None and model.format.tools is not None and options.max_calls != 0:
        grammar = call_grammar(model.format, tokenizer, tools, tools.names, schema)
        return grammar.compiled(tokenizer.grammars, model.stop_token_ids)
    return tokenizer.grammars.compile(json_grammar(schema), model.stop_token_ids)
