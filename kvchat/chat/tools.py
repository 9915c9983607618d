"""Tools that a model may call: their definitions, a model's calls, and the results of calls."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvchat.core.errors import UsageError
from kvchat.core.text import read_json_text

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


# The order in which models see the fields of a definition in their training.
_FIELDS = ("name", "description", "parameters")
# Deeper values are refused: what reads them calls itself, in templates of checkpoints too.
_MOST_DEPTH = 100
# The name under which arguments that are no JSON object stand.
_UNREADABLE = "unreadable_arguments"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def is_too_deep(value: object) -> bool:
    """Return whether lists and objects of JSON are nested deeper than calls and definitions may."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [item for holder in level for item in _items(holder)]
        if not level:
            return False
    return True


def _items(holder: object) -> Iterable[object]:
    if isinstance(holder, Mapping):
        return holder.values()
    return holder if isinstance(holder, list) else ()


def read_arguments(given: object) -> dict[str, Any]:
    """Return the arguments of an earlier call: JSON text, or the object that it says.

    A call that was cut off stays in a conversation for ever. Arguments that are no object are one
    text, so that the model sees what it wrote, and the conversation goes on.
    """
    try:
        value = _json_or_none(given) if isinstance(given, str) else given
        if isinstance(value, Mapping) and not is_too_deep(value):
            return dict(value)
        text = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = given if isinstance(given, str) else "(nested too deeply)"
    return {} if text.strip() in ("", "null") else {_UNREADABLE: text}


def _json_or_none(text: str) -> object:
    """Return what JSON says, None for text that is none. Line ends may stand in its texts."""
    try:
        return json.loads(text, strict=False, parse_constant=str)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call by a model. `arguments` are the values by name, of JSON's types."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    @property
    def key(self) -> str:
        """A text that equal calls share, in whatever order their arguments stand."""
        return json.dumps([self.name, self.arguments], sort_keys=True)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call returned. Results stand in the order of their calls."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The calls of one answer, and the results that came back; both may be empty."""

    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()


NO_TOOL_USE = ToolUse()


class ToolSet:
    """The tools of one conversation, in the order of the client.

    A template writes them into the beginning of the context, so every definition has one form,
    whatever the order of its fields: a definition that is added costs only what follows it.
    """

    def __init__(
        self, definitions: Iterable[Mapping[str, Any]], hidden: Collection[str] = ()
    ) -> None:
        """Take functions, each with `name` and perhaps `description` and `parameters`.

        Templates do not write those whose names are `hidden`: a later message defines them.

        Raises UsageError for two of one name, and for parameters that are nested too deeply.
        """
        functions = [_in_order(definition) for definition in definitions]
        for function in functions:
            if is_too_deep(function["parameters"]):
                raise UsageError(f"The parameters of {function['name']!r} are nested too deeply.")
        self._by_name = {function["name"]: function for function in functions}
        if len(self._by_name) < len(functions):
            raise UsageError("Two tools have the same name.")
        self._hidden = frozenset(hidden)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions but for hidden ones, in the form that this class takes."""
        return [each for name, each in self._by_name.items() if name not in self._hidden]

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The definitions as templates read them."""
        return [{"type": "function", "function": function} for function in self.functions]

    @property
    def text(self) -> str:
        """The definitions as JSON, to compare them; empty without any."""
        return json.dumps(self.definitions, ensure_ascii=False) if self._by_name else ""

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the schema of a tool's arguments; raises KeyError for an unknown tool."""
        return dict(self._by_name[name]["parameters"])

    def unquoted_value(self, tool: str, argument: str, text: str) -> Any:
        """Return the value of an argument that a model writes without quotation marks."""
        schema: Any = self._by_name.get(tool, {}).get("parameters")
        root = schema if isinstance(schema, Mapping) else {}
        return unquoted_value(text, property_schemas(root, argument), root)


def _in_order(definition: Mapping[str, Any]) -> dict[str, Any]:
    ordered = {name: definition[name] for name in _FIELDS if definition.get(name) is not None}
    ordered.setdefault("parameters", _NO_PARAMETERS)
    return ordered
