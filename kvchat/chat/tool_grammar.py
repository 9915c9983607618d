"""Grammars for answers that have to call a tool, or may call one and else follow a format.

How a model writes a call is read from its template: a call with placeholders is written, and cut at
them. Where arguments are JSON they follow the tool's schema; elsewhere only the beginning of the
call is fixed, up to the tool's name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvchat.chat.grammar import spaced
from kvchat.chat.template import TurnFormat
from kvchat.chat.thinking import split_thinking
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError

_NAME, _KEY, _VALUE = "kv7_name_stands_here", "kv7_key_stands_here", "kv7_value_stands_here"
_WRITTEN = re.compile(rf"(.*?){_NAME}(.*?){_KEY}.*?{_VALUE}(.*)", re.S)
_JSON_BEGINS, _JSON_ENDS = re.compile(r"\{\s*\"$"), re.compile(r"^\"\s*\}")


def call_grammar(
    format_: TurnFormat,
    tokenizer: ChatTokenizer,
    tools: ToolSet,
    names: Sequence[str],
    schema: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar, in the form of llguidance, of one call of a tool among `names`.

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
    rules, choices = [], []
    for number, name in enumerate(names):
        rest = f"rest{number}"
        choices.append(f"{_literal(name, tokenizer)} {rest}")
        if is_json:
            middle, end = _JSON_BEGINS.sub("", between), _JSON_ENDS.sub("", after)
            parts = (_literal(middle, tokenizer), f"arguments{number}", _literal(end, tokenizer))
            rules.append(f"{rest}: {' '.join(part for part in parts if part)}")
            rules.append(f"arguments{number}: %json {json.dumps(tools.parameters(name))}")
        else:
            rules.append(f"{rest}: {_literal(_punctuation(between), tokenizer)} <[*]>*")
    rules.insert(0, f"call: {_literal(before.lstrip(), tokenizer)} ({' | '.join(choices)})")
    if schema is None:
        return "\n".join(("start: call", *rules)) + "\n"
    text = f"text: %json {json.dumps(spaced(schema))}"
    return "\n".join(("start: call | text", text, *rules)) + "\n"


def _punctuation(text: str) -> str:
    """Return what stands directly after a name, so that no longer name can be written."""
    found = re.match(r"[^\w\s<]*\s*", text)
    return found[0] if found is not None else ""


def _literal(text: str, tokenizer: ChatTokenizer) -> str:
    """Return a text in the grammar's form; special tokens stand by their ids."""
    parts, done = [], 0
    for token_id, begin, end in tokenizer.written(text):
        if tokenizer.is_special(token_id):
            parts += [json.dumps(text[done:begin])] if done < begin else []
            parts.append(f"<[{token_id}]>")
            done = end
    parts += [json.dumps(text[done:])] if done < len(text) else []
    return " ".join(parts)
