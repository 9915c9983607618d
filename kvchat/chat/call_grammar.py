"""CallGrammar: what limits an answer to one call of a tool, or to a text in a format.

How a model writes a call is read from its template: a call with placeholders is written, and cut
at them. Where arguments are JSON they follow the tool's schema; elsewhere only the beginning of the
call is fixed, up to the tool's name.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvchat.chat.grammar import Grammar, Grammars, json_grammar, spaced
from kvchat.chat.template import TurnFormat
from kvchat.chat.thinking import split_thinking
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError

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
