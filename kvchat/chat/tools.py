"""Tools that a model may call: their definitions, a model's calls, and the results of calls."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvchat.chat.json_schemas import property_schemas, unquoted_value
from kvchat.core.errors import UsageError

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
        value = _parsed(given) if isinstance(given, str) else given
        if isinstance(value, Mapping) and not is_too_deep(value):
            return dict(value)
        text = given if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = given if isinstance(given, str) else "(nested too deeply)"
    return {} if text.strip() in ("", "null") else {_UNREADABLE: text}


def _parsed(text: str) -> object:
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
