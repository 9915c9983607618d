"""Grammars: what ends by itself parses and is as its schema says, whatever a model prefers."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvchat.chat.detokenizer import TokenStream
from kvchat.chat.grammar import Grammar, Grammars, json_grammar
from kvchat.core.errors import UsageError
from kvchat.core.types import TokenConstraint
from support.tokenizer_zoo import END, byte_fallback, byte_level, unigram

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", 3, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "kind", "tags"]
        and len(value["name"]) <= 5
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["kind"] in ("a", "b", 3, None)
        and len(value["tags"]) <= 2
        and all(type(tag) is bool for tag in value["tags"])
    )


def compiled(tokenizer: Tokenizer, schema: dict[str, Any], *stops: str) -> Grammar:
    ids = frozenset(tokenizer.token_to_id(stop) for stop in stops or (END,))
    return Grammars(tokenizer.to_str()).compile(json_grammar(schema), ids)


def bits_of(constraint: TokenConstraint) -> list[int]:
    bits = constraint.allowed()
    assert bits is not None
    return [i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1]


def walk(constraint: TokenConstraint, stops: set[int], rng: random.Random, most: int) -> list[int]:
    """Return random allowed tokens up to the end of an answer."""
    ids: list[int] = []
    while len(ids) < most:
        token = rng.choice(bits_of(constraint))
        if token in stops:
            return ids
        ids.append(token)
        if constraint.accept(token):
            return ids
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize("kind", KINDS)
def test_random_answers_parse_and_are_as_the_schema_says(kind: str) -> None:
    tokenizer = KINDS[kind]()
    grammar = compiled(tokenizer, PERSON)
    stops = {tokenizer.token_to_id(END)}
    texts = set()
    for seed in range(40):
        ids = walk(grammar.constraint(), stops, random.Random(seed), 400)
        stream = TokenStream(tokenizer, (), frozenset())
        text = "".join(map(stream.feed, ids)) + stream.flush()
        assert is_person(json.loads(text)), text
        texts.add(text)
    assert len(texts) == 40


def test_an_answer_that_may_go_on_ends_only_by_a_token_that_ends_answers() -> None:
    tokenizer = byte_level()
    constraint = compiled(tokenizer, {"type": "integer"}).constraint()
    end = tokenizer.token_to_id(END)

    assert end not in bits_of(constraint)
    assert not constraint.accept(tokenizer.token_to_id("7"))
    assert {end, tokenizer.token_to_id("8")} <= set(bits_of(constraint))


def test_a_token_that_ends_answers_and_is_also_text_does_not_end_an_incomplete_one() -> None:
    """Some templates close answers with a token that the tokenizer does not call special. Within a
    JSON string it is text to the grammar, and to the engine the end of the answer."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<stop>", special=False)])
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    constraint = compiled(tokenizer, {"type": "string"}, "<stop>", END, "<end>").constraint()
    *stops, quote = (tokenizer.token_to_id(t) for t in ("<stop>", END, "<end>", '"'))

    constraint.accept(quote)
    assert not set(stops) & set(bits_of(constraint))
    assert constraint.accept(quote)
    assert bits_of(constraint) == sorted(stops)


def test_white_space_is_one_space_or_a_new_line_with_its_indentation() -> None:
    tokenizer = byte_level()
    grammar = compiled(tokenizer, {"type": "object"})
    value = {"a": [1, {"b": {}}], "c": "d  e"}

    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, indent="\t")):
        assert grammar.begun(text) is not grammar
    for text in ('{"a":  1}', '{\n\n"a": 1}', " {", '{"a": 1} '):
        with pytest.raises(UsageError, match="does not match"):
            grammar.begun(text)


def test_an_answer_that_has_begun_is_continued() -> None:
    tokenizer = byte_level()
    grammar = compiled(tokenizer, PERSON).begun('{"name": "Al')
    ids = walk(grammar.constraint(), set(), random.Random(1), 400)

    assert is_person(json.loads('{"name": "Al' + tokenizer.decode(ids)))


def test_thinking_is_free_and_cannot_end_the_answer() -> None:
    tokenizer = byte_level()
    grammar = compiled(tokenizer, PERSON)
    thinking = TokenStream(tokenizer, (), frozenset())
    constraint = grammar.constraint(thinking)
    end = tokenizer.token_to_id(END)

    for token in tokenizer.encode('I think: {"x"').ids:
        assert bits_of(constraint) == [i for i in bits_of(constraint) if i != end]
        assert token in bits_of(constraint)
        assert not constraint.accept(token)
    constraint.accept(tokenizer.token_to_id("</think>"))
    ids = walk(constraint, {end}, random.Random(3), 400)

    assert is_person(json.loads(tokenizer.decode(ids)))


def test_what_follows_thinking_within_its_last_token_counts() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("</think>{", special=False)])
    tokenizer.add_tokens([AddedToken("</think>!", special=False)])
    grammar = compiled(tokenizer, PERSON)

    constraint = grammar.constraint(TokenStream(tokenizer, (), frozenset()))
    constraint.accept(tokenizer.token_to_id("</think>{"))
    ids = walk(constraint, set(), random.Random(3), 400)
    assert is_person(json.loads("{" + tokenizer.decode(ids)))

    constraint = grammar.constraint(TokenStream(tokenizer, (), frozenset()))
    with pytest.raises(UsageError, match="could not follow"):
        constraint.accept(tokenizer.token_to_id("</think>!"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"type": "array", "uniqueItems": True},
        {"$ref": "http://localhost:1/schema"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"$ref": "#", "type": "object"},
        {"type": "string", "pattern": "(?=x)"},
        {"properties": 3},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"enum": []},
        {"type": "string", "maxLength": 10**12},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_in_one_line(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be followed") as caught:
        compiled(byte_level(), schema)

    assert "\n" not in str(caught.value)


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    tokenizer = unigram()
    tokenizer.decoder = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match="cannot follow a format"):
        compiled(tokenizer, PERSON)


def test_a_model_without_a_token_that_ends_answers_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot follow a format"):
        Grammars(byte_level().to_str()).compile(json_grammar(PERSON), frozenset())


def test_the_library_is_not_imported_before_a_grammar_is_compiled() -> None:
    code = "import sys, kvchat.server.app; sys.exit('llguidance' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
