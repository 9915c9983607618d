"""Schemas: annotations limit nothing, and an argument without quotes is what its schema says."""

from typing import Any

import pytest

from kvchat.chat.grammar import Grammars, json_grammar
from kvchat.chat.tools import ToolSet, limits_of
from kvchat.core.errors import UsageError
from support.tokenizer_zoo import END, byte_level

TEXT = {"type": "string"}
ANNOTATED: dict[str, dict[str, Any]] = {
    "pydantic's Path": {"type": "string", "format": "path"},
    "bytes": {"type": "string", "format": "binary"},
    "OpenAPI's integers": {"type": "integer", "format": "int32"},
    "no text": {"type": "string", "format": 3},
    "a property of that name": {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "path"}},
        "$defs": {"format": {"anyOf": [{"format": "x"}, {"items": {"format": "x"}}]}},
    },
    "keywords that limit nothing": {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": False}},
        "unevaluatedProperties": True,
        "propertyNames": TEXT,
        "dependentRequired": {},
    },
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_level().to_str())


def stops() -> frozenset[int]:
    return frozenset({byte_level().token_to_id(END)})


@pytest.mark.parametrize("name", ANNOTATED)
def test_annotations_are_no_reason_to_refuse(grammars: Grammars, name: str) -> None:
    grammars.compile(json_grammar(ANNOTATED[name]), stops())


ENFORCED = ("date-time", "time", "date", "duration", "email", "hostname")
MORE_ENFORCED = ("ipv4", "ipv6", "uuid", "uri")


@pytest.mark.parametrize("format_", ENFORCED + MORE_ENFORCED)
def test_formats_that_can_be_enforced_stay(grammars: Grammars, format_: str) -> None:
    schema = {"type": "string", "format": format_}

    assert limits_of(schema) == schema
    grammars.compile(json_grammar(schema), stops())


@pytest.mark.parametrize(
    "schema",
    [{"uniqueItems": True}, {"not": TEXT}, {"propertyNames": {"pattern": "^a"}}, {"contains": {}}],
)
def test_what_limits_a_value_and_cannot_be_enforced_is_refused(grammars, schema):
    with pytest.raises(UsageError, match=next(iter(schema))):
        grammars.compile(json_grammar(schema), stops())


def test_values_that_look_like_keywords_stay() -> None:
    schema = {"const": {"format": "path"}, "enum": [{"format": "x"}], "default": {"not": False}}

    assert limits_of(schema) == schema


OPTIONAL = {"anyOf": [TEXT, {"type": "null"}]}
SHAS: dict[str, Any] = {
    "a text": TEXT,
    "optional": OPTIONAL,
    "two types": {"type": ["string", "null"]},
    "a reference": {"$ref": "#/$defs/sha"},
    "a reference to a reference": {"$ref": "#/$defs/other"},
    "all of": {"allOf": [{"$ref": "#/$defs/sha"}, {"pattern": "."}]},
    "an enumeration": {"enum": ["1234e56", "1.10", "true", "12345", "null", "NaN"]},
    "a constant": {"oneOf": [{"const": v} for v in ("1234e56", "1.10", "true", "12345")]},
    "nothing said": {},
}
VALUES = ("1234e56", "1.10", "true", "12345")


def value_of(schema: Any, text: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"v": schema},
        "$defs": {"sha": TEXT, "other": {"$ref": "#/$defs/sha"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    return ToolSet([{"name": "f", "parameters": parameters}]).unquoted_value("f", "v", text)


@pytest.mark.parametrize("text", VALUES)
@pytest.mark.parametrize("name", [name for name in SHAS if name != "nothing said"])
def test_what_may_be_a_text_stays_one(name: str, text: str) -> None:
    """The commit 1234e56 became 1.234e+59, and the version 1.10 became 1.1."""
    assert value_of(SHAS[name], text) == text


OTHERS: tuple[tuple[Any, str, Any], ...] = (
    ({}, "1234e56", "1234e56"),
    ({}, "1.10", "1.10"),
    ({}, "12345", 12345),
    ({}, '["a"]', ["a"]),
    ({}, "NaN", "NaN"),
    ({"$ref": "#/$defs/loop"}, "x", "x"),
    ({"$ref": "other.json"}, "1.10", "1.10"),
    (OPTIONAL, "null", None),
    ({"type": "integer"}, "3", 3),
    ({"type": "number"}, "1.10", 1.1),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"enum": [1, 2]}, "2", 2),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "number"]}, "1e3", "1e3"),
    ({"anyOf": [{"type": "object"}, TEXT]}, '{"a": 1.10}', {"a": 1.1}),
    ({"type": "array"}, '["a\n"]', ["a\n"]),
    (TEXT, '"quoted"', '"quoted"'),
)


@pytest.mark.parametrize(("schema", "text", "value"), OTHERS)
def test_other_values_are_what_their_schema_says(schema: Any, text: str, value: Any) -> None:
    read = value_of(schema, text)

    assert read == value
    assert type(read) is type(value)


def test_properties_without_names_have_their_schema_too() -> None:
    tools = ToolSet([{"name": "f", "parameters": {"additionalProperties": TEXT}}])

    assert tools.unquoted_value("f", "any", "1.10") == "1.10"
    assert tools.unquoted_value("unknown", "any", "12") == 12
