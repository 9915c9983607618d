"""Reads the format that answers shall have: text, JSON, or what a JSON schema describes.

A schema is given as JSON, as a file that holds it, or in a short form like a type of TypeScript:
`name: string, age?: integer, tags: string[], kind: "a" | "b", home: {town: string}`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.paths import read_bounded, user_path
from kvchat.core.text import one_line, shown, text_of

TEXT, JSON = "text", "json"
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 64
_TYPES: Mapping[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "text": {"type": "string"},
    "str": {"type": "string"},
    "number": {"type": "number"},
    "float": {"type": "number"},
    "integer": {"type": "integer"},
    "int": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "bool": {"type": "boolean"},
    "null": {"type": "null"},
    "object": {"type": "object"},
    "any": {},
    "unknown": {},
    "true": {"const": True},
    "false": {"const": False},
}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>-?\d+(?:\.\d+)?)"""
    r"""|(?P<word>[A-Za-z_$][\w$-]*)|(?P<sign>\[\]|[{}\[\]()<>:;,|?])|(?P<end>\Z))"""
)
_HINT = "Give a file, a JSON schema, or a form like 'name: string, age?: integer, tags: string[]'."


def read_format(value: object, place: str) -> str:
    """Return a format as settings hold it: `text`, `json`, or a schema as JSON text.

    value   one of these words, a schema as an object or as text in any of its spellings
    place   names the setting in errors

    Raises UsageError for anything else, UnreadableFile for a file that cannot be read.
    """
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise UsageError(f"{place} is {shown(value)}, but must be text, json or a schema.")
    text = value.strip()
    if text.lower() in (TEXT, JSON):
        return text.lower()
    schema = _json_object(text)
    return json.dumps(schema if schema is not None else _schema_of(text, place), ensure_ascii=False)


def schema_of(chosen: str) -> dict[str, Any] | None:
    """Return the JSON schema of a format that `read_format` returned; None for any text."""
    if chosen == TEXT:
        return None
    schema: dict[str, Any] = {"type": "object"} if chosen == JSON else json.loads(chosen)
    return schema


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _schema_of(text: str, place: str) -> dict[str, Any]:
    is_path = text.startswith("@") or not re.search(r"[:,{}|<(?\[]", text)
    if is_path and text.lower() not in _TYPES:
        return _in_file(user_path(text.removeprefix("@")), place)
    try:
        return _ShortForm(text).schema()
    except _Unclear as error:
        raise UsageError(f"{place} is no schema: {error}.", _HINT) from None


def _in_file(path: Path, place: str) -> dict[str, Any]:
    try:
        data = read_bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        reason = f"{place} is {shown(str(path))}, which is no file and no schema."
        raise UsageError(reason, _HINT) from None
    except OSError as error:
        told = f"{one_line(str(path))} cannot be read: {error.strerror}."
        raise UnreadableFile(told) from error
    text = text_of(data)[0]
    if (schema := _json_object(text)) is not None:
        return schema
    try:
        return _ShortForm(text).schema()
    except _Unclear as error:
        raise UsageError(f"{one_line(str(path))} holds no schema: {error}.", _HINT) from None


class _Unclear(Exception):
    """The short form breaks off or goes on in an unknown way; the text is the reason."""


class _ShortForm:
    """Reads a schema in the short form, by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0
        self._kind, self._token = "", ""
        self._advance()

    def schema(self) -> dict[str, Any]:
        """Return the schema of the whole text: fields without braces, or one type."""
        is_fields = self._kind in ("word", "text") and self._is_field()
        schema = self._fields("") if is_fields else self._union()
        if self._kind != "end":
            raise self._unclear()
        return schema

    def _is_field(self) -> bool:
        """Whether a name stands here with a colon or a question mark behind it."""
        after = _TOKEN.match(self._text, self._place)
        return after is not None and after["sign"] in (":", "?", ",")

    def _advance(self) -> str:
        """Return the present token, and go on to the next."""
        before = self._token
        match = _TOKEN.match(self._text, self._place)
        if match is None:
            rest = self._text[self._place :].strip()
            raise _Unclear(f"{shown(rest[:20])} is not understood")
        self._kind = match.lastgroup or "end"
        self._token, self._place = match[self._kind], match.end()
        return before

    def _takes(self, sign: str) -> bool:
        """Go on behind a sign if it stands here; return whether it did."""
        is_here = self._kind == "sign" and self._token == sign
        if is_here:
            self._advance()
        return is_here

    def _require(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._unclear(sign)

    def _unclear(self, sign: str = "") -> _Unclear:
        there = shown(self._token) if self._kind != "end" else "the end"
        return _Unclear(f"{there} stands where {sign or 'a type'} is expected")

    def _fields(self, closing: str) -> dict[str, Any]:
        """Read fields up to a closing sign, or up to the end."""
        properties: dict[str, Any] = {}
        required: list[str] = []
        while self._kind in ("word", "text"):
            is_quoted = self._kind == "text"
            name = self._advance()
            name = name[1:-1] if is_quoted else name
            is_optional = self._takes("?")
            # A name alone is a text.
            properties[name] = self._union() if self._takes(":") else {"type": "string"}
            required += [] if is_optional else [name]
            if not (self._takes(",") or self._takes(";")):
                break
        if closing:
            self._require(closing)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _union(self) -> dict[str, Any]:
        self._takes("|")
        members = [self._array()]
        while self._takes("|"):
            members.append(self._array())
        if len(members) == 1:
            return members[0]
        if all("const" in member for member in members):
            return {"enum": [member["const"] for member in members]}
        return {"anyOf": members}

    def _array(self) -> dict[str, Any]:
        member = self._single()
        while self._takes("[]"):
            member = {"type": "array", "items": member}
        return member

    def _single(self) -> dict[str, Any]:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise _Unclear(f"it is nested more than {_MOST_DEPTH} deep")
        schema = self._inner()
        self._depth -= 1
        return schema

    def _inner(self) -> dict[str, Any]:
        if self._takes("{"):
            return self._fields("}")
        for opening, closing in (("(", ")"), ("[", "]")):
            if self._takes(opening):
                inner = self._union()
                self._require(closing)
                return inner if opening == "(" else {"type": "array", "items": inner}
        if self._kind == "text":
            return {"const": self._advance()[1:-1]}
        if self._kind == "number":
            return {"const": json.loads(self._advance())}
        if self._kind != "word":
            raise self._unclear()
        word = self._advance()
        if word in ("Array", "array") and self._takes("<"):
            inner = self._union()
            self._require(">")
            return {"type": "array", "items": inner}
        if word.lower() not in _TYPES:
            raise _Unclear(f"{shown(word)} is no type; there are {', '.join(_TYPES)}")
        return dict(_TYPES[word.lower()])
