"""JSON schemas of clients: what of them limits a text, and which values an argument may have."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvchat.core.json_text import read_json_text

# The formats that the library of grammars enforces. All others are annotations, as the standard
# of JSON Schema has it: `path`, `binary` and `int32` say what a value is for.
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
_HOLDS_SCHEMA = frozenset(
    {
        *("items", "additionalItems", "contains", "additionalProperties", "propertyNames"),
        *("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_HOLDS_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_HOLDS_MAP = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
# Keywords that the library refuses, with values by which they limit nothing.
_LIMITS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}


def limits_of(schema: Any) -> Any:
    """Return a schema without what limits no value, such as formats that no standard defines."""
    if not isinstance(schema, Mapping):
        return schema
    return {
        keyword: _inner(keyword, value)
        for keyword, value in schema.items()
        if not _limits_nothing(keyword, value)
    }


def _limits_nothing(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return value not in _FORMATS if isinstance(value, str) else True
    return any(
        value == idle and type(value) is type(idle) for idle in _LIMITS_NOTHING.get(keyword, ())
    )


def _inner(keyword: str, value: Any) -> Any:
    if keyword in _HOLDS_LIST and isinstance(value, list):
        return [limits_of(item) for item in value]
    if keyword in _HOLDS_SCHEMA:
        return limits_of(value)
    if keyword in _HOLDS_MAP and isinstance(value, Mapping):
        return {name: limits_of(item) for name, item in value.items()}
    return value


# Values of arguments that are written without quotation marks

_MOST_STEPS = 64  # of references and cases: a schema may refer to itself
_KIND_OF: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def property_schemas(schema: Mapping[str, Any], name: str) -> list[Any]:
    """Return what a schema of an object says of a property, in each of its cases."""
    schemas = []
    for case in _cases(schema, schema):
        properties = case.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            schemas.append(properties[name])
        elif isinstance(case.get("additionalProperties"), Mapping):
            schemas.append(case["additionalProperties"])
    return schemas


def unquoted_value(text: str, schemas: list[Any], root: Mapping[str, Any]) -> Any:
    """Return the value of a text that stands without quotation marks, by the schemas of its place.

    Where a text is allowed, it is another value only if that would be written so: a version 1.10 is
    no number. `root` holds what the schemas refer to.
    """
    cases = [case for schema in schemas for case in _cases(schema, root)]
    choices = [value for case in cases for value in _listed(case)]
    if text in choices:
        return text
    value = _parsed(text)
    if isinstance(value, str):  # in quotation marks of its own, or no JSON at all
        return text
    kinds = {kind for case in cases for kind in _kinds(case)}
    kind = _KIND_OF[type(value)]
    if kinds == {"string"}:
        return text
    if kinds and "string" not in kinds:
        return value
    is_allowed = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    is_exact = isinstance(value, list | dict) or json.dumps(value) == text.strip()
    return value if is_allowed and is_exact else text


def _parsed(text: str) -> Any:
    """Return the value of a text that is JSON, else the text: NaN and Infinity are not."""
    try:
        return read_json_text(text, has_raw_controls=True)
    except (ValueError, RecursionError):
        return text


def _listed(case: Mapping[str, Any]) -> list[Any]:
    """Return the values to which a schema limits its place."""
    if "const" in case:
        return [case["const"]]
    return list(case["enum"]) if isinstance(case.get("enum"), list) else []


def _kinds(case: Mapping[str, Any]) -> list[str]:
    kind = case.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [one for one in kind if isinstance(one, str)]
    return [_KIND_OF.get(type(value), "string") for value in _listed(case)]


def _cases(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those that it refers to or consists of."""
    waiting = [schema]
    for _ in range(_MOST_STEPS):
        if not waiting:
            return
        case = waiting.pop()
        if not isinstance(case, Mapping):
            continue
        yield case
        if isinstance(case.get("$ref"), str):
            waiting.append(_referred(case["$ref"], root))
        for keyword in ("allOf", "anyOf", "oneOf"):
            inner = case.get(keyword)
            waiting += inner if isinstance(inner, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference within a document names; None for any other."""
    place: Any = root
    path = reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ["?"]
    for part in path:
        name = part.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
