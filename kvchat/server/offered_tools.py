"""OfferedTools: the tools of a request, as the model and as the client know them.

The model calls functions by name. Clients also have functions in namespaces, custom tools, whose
input is one text, and searches for tools that are not in the prompt yet. Tools that a server would
run are left out; there are none of these here.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from kvchat.chat.fields import Fields, shortened
from kvchat.chat.incoming import INPUT, model_name
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import KvchatError
from kvchat.server.api_errors import ApiError, as_api_error

_MOST_TOOLS = 1024
_CUSTOM_SCHEMA = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
SEARCH = "tool_search"


class ToolKind(Enum):
    """How a client writes the calls of a tool."""

    FUNCTION = "function"
    CUSTOM = "custom"
    SEARCH = SEARCH


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    kind: ToolKind = ToolKind.FUNCTION


def custom_input(call: ToolCall) -> str:
    """Return the text that the model gave a custom tool."""
    text = call.arguments.get(INPUT)
    return text if isinstance(text, str) else call.arguments_text


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of one request; None without any.

    clients    what the client knows under a name of the model, where that is no plain function
    left_out   the types of the request's tools and blocks that the model does not get
    """

    tools: ToolSet | None = None
    clients: Mapping[str, ClientTool] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def client_tool(self, name: str) -> ClientTool:
        """Return the tool that the model calls so. It may leave out the namespace."""
        if name in self.clients:
            return self.clients[name]
        alike = [tool for tool in self.clients.values() if tool.namespace and tool.name == name]
        is_known = self.tools is not None and name in self.tools.names
        return alike[0] if len(alike) == 1 and not is_known else ClientTool(name)


class ToolReader:
    """Collects the tools of one request, then gives them as `offered`.

    schema   the field of a function's parameters
    """

    def __init__(self, schema: str = "parameters") -> None:
        self._schema = schema
        self._functions: list[dict[str, Any]] = []
        self._clients: dict[str, ClientTool] = {}
        self._deferred: set[str] = set()
        self._referred: set[str] = set()
        self._left_out: dict[str, None] = {}
        self._needs_all = False

    def __bool__(self) -> bool:
        return bool(self._functions)

    def add_function(self, definition: Fields, namespace: str | None = None) -> str:
        """Add a function; return the model's name of it."""
        schema = self._schema
        parameters = definition.nested(schema).values if schema in definition else None
        return self._add(definition, parameters, namespace, ToolKind.FUNCTION)

    def add_known(self, definition: Fields, description: str, parameters: dict[str, Any]) -> str:
        """Add a tool whose description and parameters the client's interface defines."""
        own = Fields({**definition.values, "description": description}, definition.name_of(""))
        return self._add(own, parameters, None, ToolKind.FUNCTION)

    def add_custom(self, definition: Fields, namespace: str | None = None) -> str:
        """Add a tool whose input is one text; a grammar of it becomes part of the description."""
        form = definition.nested("format")
        texts = [definition.text("description")]
        if form.text("type") == "grammar":
            form = form.nested("grammar") if "grammar" in form else form
            texts.append(f"The input follows this grammar ({form.text('syntax')}):")
            texts.append(form.text("definition"))
        described = {**definition.values, "description": "\n".join(filter(None, texts))}
        own = Fields(described, definition.name_of(""))
        return self._add(own, _CUSTOM_SCHEMA, namespace, ToolKind.CUSTOM)

    def add_search(self, definition: Fields) -> None:
        """Add the client's search for tools; one that a server would run is left out."""
        if definition.text("execution") != "client":
            self.leave_out_tool(SEARCH)
            return
        own = Fields({"name": SEARCH, **definition.values}, definition.name_of(""))
        parameters = own.nested("parameters").values if "parameters" in own else None
        self._add(own, parameters, None, ToolKind.SEARCH)

    def _add(
        self,
        definition: Fields,
        parameters: dict[str, Any] | None,
        namespace: str | None,
        kind: ToolKind,
    ) -> str:
        own = definition.text("name")
        if not own:
            raise definition.fault("name", "is missing")
        name = model_name(own, namespace)
        described = {"name": name, "description": definition.text("description")}
        self._functions.append({**described, "parameters": parameters})
        if namespace or kind is not ToolKind.FUNCTION:
            self._clients[name] = ClientTool(own, namespace, kind)
        if definition.flag("defer_loading"):
            self._deferred.add(name)
        return name

    def leave_out(self, kind: str) -> None:
        """Note a type of block that the model does not get."""
        self._left_out[kind] = None

    def leave_out_tool(self, kind: str) -> None:
        """Note a type of tool that the model does not get."""
        self.leave_out(kind)
        # Without the search nothing finds the tools that wait for it.
        self._needs_all = self._needs_all or kind.startswith(SEARCH)

    def add_later(self, add: Callable[[], list[str]]) -> str:
        """Add tools in the middle of a conversation; return what stands there: their definitions.

        `add` adds them and returns their names.
        """
        known = len(self._functions)
        names = add()
        earlier = {each["name"] for each in self._functions[:known]}
        new = [each for each in self._functions[known:] if each["name"] not in earlier]
        self._functions[known:] = new
        self._deferred |= {each["name"] for each in new}
        return "\n".join(map(self.refer, names))

    def refer(self, name: str) -> str:
        """Return what stands where a tool's result refers to a tool: its definition, if the
        beginning of the prompt does not have it.
        """
        named = json.dumps(shortened(name), ensure_ascii=False)
        found = next((each for each in self._functions if each["name"] == name), None)
        if found is None:
            return f"[The tool {named} is not offered]"
        self._referred.add(name)
        if name not in self._hidden:
            return f"[The tool {named} can be called]"
        return ToolSet([found]).text

    @property
    def _hidden(self) -> set[str]:
        """The tools that the beginning of the prompt does not have."""
        is_all = len(self._deferred) == len(self._functions)
        return set() if self._needs_all or is_all else self._deferred

    def offered(self, only: frozenset[str] | None = None) -> OfferedTools:
        """Return the tools, or those `only`; raises ApiError where they cannot be offered."""
        if len(self._functions) > _MOST_TOOLS:
            sentence = f"There are more than {_MOST_TOOLS} tools."
            raise ApiError(400, sentence, "tools", "invalid_value")
        hidden = self._hidden
        unknown = hidden - self._referred
        wanted = [
            each
            for each in self._functions
            if each["name"] not in unknown and (only is None or each["name"] in only)
        ]
        try:
            tools = ToolSet(wanted, hidden) if wanted else None
        except KvchatError as error:
            raise replace(as_api_error(error), param="tools") from error
        return OfferedTools(tools, self._clients, tuple(map(_header_word, self._left_out)))


def _header_word(kind: str) -> str:
    """Return a type as a word that may stand in a header and in the log."""
    return re.sub(r"[^\w.-]", "?", shortened(kind), flags=re.ASCII)
