"""Reads the tools of a request, and whether the answer has to call one."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.fields import Fields
from kvchat.chat.grammar import Grammar, Grammars, json_grammar, spaced
from kvchat.chat.incoming import required_name
from kvchat.chat.template import TurnFormat
from kvchat.chat.thinking import split_thinking
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import KvchatError, UsageError
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.generation_fields import AnswerFormat, with_format
from kvchat.server.offered_tools import SEARCH, ToolKind, ToolReader
from kvchat.server.service import Service

# How a model writes a call is read from its template: a call with placeholders is written, and cut
# at them. Where arguments are JSON they follow the tool's schema; elsewhere only the beginning of
# the call is fixed, up to the tool's name.

_NAME, _KEY, _VALUE = "kv7_name_stands_here", "kv7_key_stands_here", "kv7_value_stands_here"
_WRITTEN = re.compile(rf"(.*?){_NAME}(.*?){_KEY}.*?{_VALUE}(.*)", re.S)
_JSON_BEGINS, _JSON_ENDS = re.compile(r"\{\s*\"$"), re.compile(r"^\"\s*\}")


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of one call of a tool, or of a text in a format. It is not compiled yet.

    opening      what every call begins with, in the form of llguidance, as the other parts
    names        the tools that may be called, and how each name is written
    parts        what stands before and after the arguments; None where they are no JSON
    unchecked    what follows the name where arguments are no JSON
    parameters   the schema of each tool's arguments
    schema       of the text that the answer may be instead; None for none
    """

    opening: str
    names: Mapping[str, str]
    parts: tuple[str, str] | None
    unchecked: str
    parameters: Mapping[str, Mapping[str, Any]]
    schema: Mapping[str, Any] | None

    def compiled(self, grammars: Grammars, stop_ids: frozenset[int]) -> Grammar:
        """Return the grammar for a model.

        A tool whose schema cannot be followed takes any object, if the answer may be something
        else. Raises UsageError if it may not, and for a format that cannot be followed.
        """
        try:
            return grammars.compile(self._text(frozenset()), stop_ids)
        except UsageError:
            problems = self._problems(grammars, stop_ids)
            if not problems:
                raise
            if len(problems) == len(self.names) and self.schema is None:
                name, problem = next(iter(problems.items()))
                raise UsageError(f"The parameters of {name!r}: {problem}") from None
            return grammars.compile(self._text(frozenset(problems)), stop_ids)

    def _problems(self, grammars: Grammars, stop_ids: frozenset[int]) -> dict[str, str]:
        """Return why the schema of each tool that has such a one cannot be followed."""
        problems = {}
        for name in self.names if self.parts is not None else ():
            try:
                grammars.compile(json_grammar(_of_object(self.parameters[name])), stop_ids)
            except UsageError as error:
                problems[name] = str(error)
        return problems

    def _text(self, unlimited: Set[str]) -> str:
        rules, choices = [], []
        for number, (name, written) in enumerate(self.names.items()):
            rest = f"rest{number}"
            choices.append(f"{written} {rest}")
            if self.parts is None:
                rules.append(f"{rest}: {self.unchecked} <[*]>*")
                continue
            schema = _of_object({} if name in unlimited else self.parameters[name])
            parts = (self.parts[0], f"arguments{number}", self.parts[1])
            rules.append(f"{rest}: {' '.join(part for part in parts if part)}")
            rules.append(f"arguments{number}: %json {json.dumps(spaced(schema))}")
        rules.insert(0, f"call: {self.opening} ({' | '.join(choices)})")
        start = "start: call"
        if self.schema is not None:
            start = f"{start} | text"
            rules.append(f"text: %json {json.dumps(spaced(self.schema))}")
        return "\n".join((start, *rules)) + "\n"


def _of_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments; one that names no type would allow a bare number."""
    return {"type": "object", **schema}


def call_grammar(
    format_: TurnFormat,
    tokenizer: ChatTokenizer,
    tools: ToolSet,
    names: Sequence[str],
    schema: Mapping[str, Any] | None = None,
) -> CallGrammar:
    """Return the grammar of one call of a tool among `names`.

    With `schema` the answer may be JSON that it describes instead.

    Raises UsageError for a template whose calls cannot be cut so.
    """
    segments = format_.given_calls("", [ToolCall(_NAME, {_KEY: _VALUE})])
    text = "".join(segment.text for segment in segments)
    closing = format_.tools.closing if format_.tools is not None else ""
    cut = _WRITTEN.fullmatch(split_thinking(text.removesuffix(closing))[1])
    if cut is None:
        raise UsageError("Calls of this model cannot be required: its template writes them so.")
    before, between, after = cut.groups()
    is_json = _JSON_BEGINS.search(between) is not None and _JSON_ENDS.search(after) is not None
    ends = (_JSON_BEGINS.sub("", between), _JSON_ENDS.sub("", after))
    return CallGrammar(
        _literal(before.lstrip(), tokenizer),
        {name: _literal(name, tokenizer) for name in names},
        (_literal(ends[0], tokenizer), _literal(ends[1], tokenizer)) if is_json else None,
        _literal(_punctuation(between), tokenizer),
        {name: tools.parameters(name) for name in names},
        schema,
    )


def _punctuation(text: str) -> str:
    """Return what stands directly after a name, so that no longer name can be written."""
    found = re.match(r"[^\w\s<]*\s*", text)
    return found[0] if found is not None else ""


def _literal(text: str, tokenizer: ChatTokenizer) -> str:
    """Return a text in the grammar's form; added tokens stand by their ids.

    The library takes some of them for special tokens although the tokenizer does not call them so,
    such as `<tool_call>`: these are no text to it.
    """
    parts, done = [], 0
    for token_id, begin, end in tokenizer.written(text):
        parts += [json.dumps(text[done:begin])] if done < begin else []
        parts.append(f"<[{token_id}]>")
        done = end
    parts += [json.dumps(text[done:])] if done < len(text) else []
    return " ".join(parts)


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
