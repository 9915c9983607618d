"""Reads the tools of a request, and whether the answer has to call one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.answer_format import AnswerFormat
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.call_grammar import CallGrammar, call_grammar
from kvchat.chat.fields import Fields
from kvchat.chat.grammar import Grammar
from kvchat.chat.incoming import required_name
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolSet
from kvchat.core.errors import KvchatError, UsageError
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.generation_fields import with_format
from kvchat.server.offered_tools import SEARCH, ToolKind, ToolReader
from kvchat.server.service import Service

_FIELD = "tool_choice"
_WORDS, _ALLOWED = ("auto", "none", "required"), "allowed_tools"
_CALLED = (ToolKind.FUNCTION.value, ToolKind.CUSTOM.value)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may have.

    max_calls     the most; None for any number, 0 reads calls as text
    is_required   whether it has to call a tool: one of `names`, or any if there are none
    names         the only tools that it may call, by the model's names; empty for all
    """

    max_calls: int | None = None
    is_required: bool = False
    names: tuple[str, ...] = ()

    @property
    def offered(self) -> frozenset[str] | None:
        """The only tools to write in the prompt, None for all.

        Where a call is required its grammar holds the model to the names, and the prompt stays.
        """
        return frozenset(self.names) if self.names and not self.is_required else None


def read_tools(fields: Fields, is_nested: bool = False) -> ToolReader:
    """Return the reader of a request's tools. A chat's have their fields nested in another."""
    reader = ToolReader()
    for tool in fields.objects_if_any("tools"):
        add_tool(reader, tool, is_nested)
    return reader


def add_tool(
    reader: ToolReader, tool: Fields, is_nested: bool = False, namespace: str | None = None
) -> list[str]:
    """Add a tool, or those of a namespace; return the model's names of what was added."""
    kind = tool.text("type") or ToolKind.FUNCTION.value
    is_below = kind in tool or (is_nested and "name" not in tool)
    own = tool.nested(kind) if kind in _CALLED and is_below else tool
    if kind == ToolKind.FUNCTION.value:
        return [reader.add_function(own, namespace)]
    if kind == ToolKind.CUSTOM.value:
        return [reader.add_custom(own, namespace)]
    if kind == "namespace" and namespace is None:
        if not (name := tool.text("name")):
            raise tool.fault("name", "is missing")
        parts = (add_tool(reader, part, False, name) for part in tool.objects_if_any("tools"))
        return [each for names in parts for each in names]
    reader.add_search(tool) if kind == SEARCH else reader.leave_out_tool(kind)
    return []


def openai_choice(fields: Fields) -> ToolChoice:
    """Return the choice of a chat completion or of a response."""
    most = 1 if fields.raw("parallel_tool_calls") is False else None
    given = fields.raw(_FIELD)
    if not isinstance(given, dict):
        return _by_word(given, _WORDS, most)
    choice = fields.nested(_FIELD)
    kind = choice.text("type") or ""
    if kind in _CALLED:
        return ToolChoice(1, True, (_name_of(choice),))
    if kind == _ALLOWED:
        allowed = choice.nested(kind) if kind in choice else choice
        names = tuple(_name_of(tool) for tool in allowed.objects("tools") if _is_called(tool))
        if not names:
            return ToolChoice(0)
        return replace(_by_word(allowed.text("mode"), _WORDS, most), names=names)
    if kind not in _WORDS:
        raise choice.fault("type", f"must be {', '.join((*_CALLED, _ALLOWED))} or a word")
    return _by_word(kind, _WORDS, most)


def _is_called(tool: Fields) -> bool:
    return (tool.text("type") or ToolKind.FUNCTION.value) in _CALLED


def _name_of(tool: Fields) -> str:
    """Return the model's name of a tool that a choice names."""
    kind = tool.text("type") or ToolKind.FUNCTION.value
    named = tool.nested(kind) if kind in tool else tool
    return required_name(named)


def anthropic_choice(fields: Fields) -> ToolChoice:
    """Return the choice of a message."""
    words, given = ("auto", "none", "any"), fields.raw(_FIELD)
    if isinstance(given, str):
        return _by_word(given, words, None)
    choice = fields.nested(_FIELD)
    most = 1 if choice.flag("disable_parallel_tool_use") else None
    if choice.text("type") == "tool":
        return ToolChoice(1, True, (required_name(choice),))
    return _by_word(choice.text("type"), words, most)


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
        names = list(choice.names) or known
        if tools is None or not names or not set(names) <= set(known):
            sentence = f"{_FIELD} asks for a tool that is not offered."
            raise ApiError(400, sentence, _FIELD, "invalid_value")
        return replace(options, grammar=await _compiled(service, tools, names, _FIELD))
    if wanted is None or tools is None or options.max_calls == 0:
        return options
    if wanted.lark:
        sentence = f"{wanted.param} and tools do not go together; set tool_choice to none."
        raise ApiError(400, sentence, wanted.param, "unsupported_parameter")
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
