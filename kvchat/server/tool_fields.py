"""Reads the tools of a request, and whether the answer has to call one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.grammar import Grammar
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tool_grammar import CallGrammar, call_grammar
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import KvchatError, UsageError
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.fields import Fields
from kvchat.server.generation_fields import AnswerFormat, with_format
from kvchat.server.service import Service

_MOST_TOOLS = 1024
_FIELD = "tool_choice"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may have.

    max_calls     the most; None for any number, 0 reads calls as text
    is_required   whether it has to call a tool: `name`, or any if that is empty
    """

    max_calls: int | None = None
    is_required: bool = False
    name: str = ""


def read_tools(definitions: Iterable[Fields], schema: str = "parameters") -> ToolSet | None:
    """Return the tools of a request, None without any. `schema` is the field of the parameters."""
    read = [_definition(definition, schema) for definition in definitions]
    if len(read) > _MOST_TOOLS:
        raise ApiError(400, f"There are more than {_MOST_TOOLS} tools.", "tools", "invalid_value")
    try:
        return ToolSet(read) if read else None
    except KvchatError as error:
        raise replace(as_api_error(error), param="tools") from error


def _definition(definition: Fields, schema: str) -> dict[str, Any]:
    name = definition.text("name")
    if not name:
        raise definition.fault("name", "is missing")
    parameters = definition.nested(schema).values if schema in definition else None
    described = {"name": name, "description": definition.text("description")}
    return {**described, "parameters": parameters}


def openai_choice(fields: Fields) -> ToolChoice:
    """Return the choice of a chat completion or of a response."""
    most = 1 if fields.raw("parallel_tool_calls") is False else None
    given = fields.raw(_FIELD)
    if isinstance(given, dict):
        choice = fields.nested(_FIELD)
        if choice.text("type") != "function":
            raise choice.fault("type", "must be function")
        named = choice.nested("function") if "function" in choice else choice
        return _named(named)
    return _by_word(given, ("auto", "none", "required"), most)


def anthropic_choice(fields: Fields) -> ToolChoice:
    """Return the choice of a message."""
    choice = fields.nested(_FIELD)
    most = 1 if choice.flag("disable_parallel_tool_use") else None
    if choice.text("type") == "tool":
        return _named(choice)
    return _by_word(choice.text("type"), ("auto", "none", "any"), most)


def _named(holder: Fields) -> ToolChoice:
    name = holder.text("name")
    if not name:
        raise holder.fault("name", "is missing")
    return ToolChoice(1, True, name)


def _by_word(word: object, words: tuple[str, str, str], most: int | None) -> ToolChoice:
    auto, none, required = words
    if word is None or word == auto:
        return ToolChoice(most)
    if word == none:
        return ToolChoice(0)
    if word == required:
        return ToolChoice(1, True)
    sentence = f"{_FIELD} must be {auto}, {none}, {required} or a tool."
    raise ApiError(400, sentence, _FIELD, "invalid_value")


async def with_calls(
    service: Service,
    choice: ToolChoice,
    tools: ToolSet | None,
    options: AskOptions,
    wanted: AnswerFormat | None,
) -> AskOptions:
    """Return `options` with the grammar of the answer.

    An answer that has to call a tool is a call. One that may call a tool, and has a format, is
    either a call or follows the format. Raises ApiError for a tool that is not offered, and for a
    schema that cannot be followed.
    """
    options = await with_format(service, wanted, options)
    if choice.is_required:
        known = tools.names if tools is not None else []
        names = [choice.name] if choice.name else known
        if tools is None or not names or not set(names) <= set(known):
            sentence = f"{_FIELD} asks for a tool that is not offered."
            raise ApiError(400, sentence, _FIELD, "invalid_value")
        return replace(options, grammar=await _compiled(service, tools, names, _FIELD))
    if wanted is None or tools is None or options.max_calls == 0:
        return options
    grammar = await _compiled(service, tools, tools.names, "tools", wanted.schema)
    return replace(options, grammar=grammar)


async def _compiled(
    service: Service,
    tools: ToolSet,
    names: Sequence[str],
    param: str,
    schema: Mapping[str, Any] | None = None,
) -> Grammar:
    model = service.host.model

    def written() -> CallGrammar:
        if model.format.tools is None:
            raise UsageError(f"The chat template of {model.name} has no place for tools.")
        assert isinstance(model.tokenizer, ChatTokenizer), "the model is one of this machine"
        return call_grammar(model.format, model.tokenizer, tools, names, schema)

    try:
        grammar = await service.answering.on_encoder(written)  # it renders a call
        return await service.answering.on_compiler(
            lambda: grammar.compiled(model.tokenizer.grammars, model.stop_token_ids)
        )
    except KvchatError as error:
        raise replace(as_api_error(error), param=param) from error
