"""A call that has to be made: as the template writes it, whatever kind of tokens its marks are."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvchat.chat.call_grammar import call_grammar
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.grammar import Grammar
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError
from support import template_zoo as zoo
from support.scripted_engine import text_model, write_text_checkpoint

ARGUMENTS = {"q": "a <tool_call> b"}
TEXTS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
UNLIMITED = {"type": "object", "properties": {"q": {"type": "array", "uniqueItems": True}}}


def model_with(tmp_path: Path, *marks: AddedToken, template: str = zoo.TOOLS_AS_JSON) -> ChatModel:
    directory = write_text_checkpoint(tmp_path / "m", template.replace("<|im_", "<|"))
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(list(marks))
    tokenizer.save(path)
    return text_model(directory)


def required(
    model: ChatModel, tools: dict[str, Any], schema: dict[str, Any] | None = None
) -> Grammar:
    offered = ToolSet({"name": name, "parameters": value} for name, value in tools.items())
    assert isinstance(model.tokenizer, ChatTokenizer)
    grammar = call_grammar(model.format, model.tokenizer, offered, offered.names, schema)
    return grammar.compiled(model.tokenizer.grammars, model.stop_token_ids)


def allows(grammar: Grammar, token_ids: list[int]) -> bool:
    constraint = grammar.constraint()
    for token_id in token_ids:
        bits = constraint.allowed()
        assert bits is not None
        if not bits[token_id // 8] >> token_id % 8 & 1:
            return False
        if constraint.accept(token_id):
            return True
    return True


MARKS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("is_special", [True, False, None])
@pytest.mark.parametrize("template", ["json", "elements"])
def test_a_required_call_is_written_with_the_tokens_of_its_template(tmp_path, template, is_special):
    """The marks of Qwen's calls are added tokens that are not special: no call could begin."""
    marks = () if is_special is None else MARKS
    added = [AddedToken(mark, special=bool(is_special)) for mark in marks]
    model = model_with(tmp_path, *added, template=zoo.TOOLS[template])
    grammar = required(model, {"find": TEXTS})

    def written(name: str) -> list[int]:
        return model.tokenizer.encode(model.format.given_calls("", [ToolCall(name, ARGUMENTS)]))

    assert allows(grammar, written("find"))
    assert not allows(grammar, written("other"))


def as_written(model: ChatModel, name: str, arguments: object) -> list[int]:
    call = json.dumps({"name": name, "arguments": arguments})
    return model.tokenizer.encode_raw(f"<tool_call>\n{call}\n</tool_call>")


def test_one_tool_that_cannot_be_followed_stops_no_other(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    grammar = required(model, {"find": TEXTS, "tag": UNLIMITED})

    assert allows(grammar, as_written(model, "find", {"q": "x"}))
    assert not allows(grammar, as_written(model, "find", {"q": 1}))
    assert allows(grammar, as_written(model, "tag", {"q": ["a", "a"]}))
    assert not allows(grammar, as_written(model, "tag", 3))

    with pytest.raises(UsageError, match=r"'tag'.*uniqueItems"):
        required(model, {"tag": UNLIMITED})
    either = required(model, {"tag": UNLIMITED}, {"type": "object"})
    assert allows(either, as_written(model, "tag", {}))
    assert allows(either, model.tokenizer.encode_raw("{}"))


def test_arguments_are_an_object_even_if_their_schema_is_silent(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    referred = {"$ref": "#/$defs/a", "$defs": {"a": TEXTS}}
    grammar = required(model, {"free": {}, "referred": referred})

    assert allows(grammar, as_written(model, "free", {"a": 1}))
    assert not allows(grammar, as_written(model, "free", 1))
    assert not allows(grammar, as_written(model, "referred", {"q": 1}))
    assert allows(grammar, as_written(model, "referred", {"q": ""}))
