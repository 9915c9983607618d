"""The formats of answers: words, schemas as JSON, in files and in the short form."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.schemas import read_format, schema_of

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def fields(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("name: string, age: int", fields(name=STRING, age=INTEGER)),
        ("{name: string; age: integer;}", fields(name=STRING, age=INTEGER)),
        ("name, age: int", fields(name=STRING, age=INTEGER)),
        ("name?: text", fields(name=STRING) | {"required": []}),
        ("'two words': string", fields(**{"two words": STRING})),
        ("x: string[][]", fields(x={"type": "array", "items": {"type": "array", "items": STRING}})),
        ("[string]", {"type": "array", "items": STRING}),
        ("String", STRING),
        ("{}", {}),
        ("Array<number>", {"type": "array", "items": {"type": "number"}}),
        ("{x: int}[]", {"type": "array", "items": fields(x=INTEGER)}),
        ("k: 'a' | 'b' | 3", fields(k={"enum": ["a", "b", 3]})),
        ("k: string | null", fields(k={"anyOf": [STRING, {"type": "null"}]})),
        (
            "k: (string | integer)[]",
            fields(k={"type": "array", "items": {"anyOf": [STRING, INTEGER]}}),
        ),
        ("in: {a: bool, b: any}", fields(**{"in": fields(a={"type": "boolean"}, b={})})),
    ],
)
def test_the_short_form_is_a_schema(text: str, schema: dict[str, Any]) -> None:
    assert schema_of(read_format(text, "--schema")) == schema


@pytest.mark.parametrize("place", ["{path}", "@{path}"])
@pytest.mark.parametrize("text", ['{"type": "string"}', "string | null"])
def test_a_file_holds_a_schema_in_either_form(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)

    read = read_format(place.format(path=path), "--schema")

    assert read == read_format(text, "--schema")
    assert read_format(read, "format") == read  # as a conversation keeps it


def test_words_and_objects() -> None:
    assert (schema_of(read_format(" TEXT ", "f")), read_format("json", "f")) == (None, "json")
    assert schema_of("json") == {"type": "object"}
    assert json.loads(read_format(STRING, "f")) == STRING


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@~nobody-of-that-name/x", "is in no home directory"),
        ("nosuch.json", "is 'nosuch.json', which is no file and no schema"),
        ("name: strin", "'strin' is no type"),
        ("name: string, }", "'}' stands where a type is expected"),
        ("{name: string", "the end stands where } is expected"),
        ("a: " + "[" * 80, "nested more than 64 deep"),
        ("a: %", "'%' is not understood"),
        (3, "must be text, json or a schema"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_reason(text: object, reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_format(text, "--schema")
    assert reason in str(raised.value)


def test_a_directory_is_no_schema(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="cannot be read"):
        read_format(f"@{tmp_path}", "--schema")
