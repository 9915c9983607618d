"""Reads the tools of a message: functions, and the dated tools that Anthropic's clients run.

Such a tool has a type with a date and no schema, for Anthropic's models know it. Here it is a
function like any other: the client runs it.
"""

import re
from typing import Any

from kvchat.chat.fields import Fields
from kvchat.server.offered_tools import ToolReader

_DATED = re.compile(r"(.+)_\d{8}$")


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_LINE = {"type": "integer", "description": "The line behind which the text is inserted, 0 first."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "The first and the last line to view; -1 is the end of the file.",
}
_EDITS = {
    "path": _text("The absolute path of the file or directory."),
    "file_text": _text("For create: the content of the new file."),
    "old_str": _text("For str_replace: the text to replace, which the file has once."),
    "new_str": _text("For str_replace: the new text."),
    "insert_line": _LINE,
    "insert_text": _text("For insert: the text to insert."),
    "view_range": _RANGE,
}
# What each tool is, by its type without the date: a description and the schema of its arguments.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open.",
        _schema((), command=_text("The command."), restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _schema(
            ("command", "path"),
            command=_commands("view", "create", "str_replace", "insert"),
            **_EDITS,
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories, which later conversations can read.",
        _schema(
            ("command",),
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            old_path=_text("For rename: the path now."),
            new_path=_text("For rename: the new path."),
        ),
    ),
}


def read_tools(fields: Fields, name: str = "tools") -> ToolReader:
    """Return the reader of a request's tools; those that the server would run are left out."""
    reader = ToolReader("input_schema")
    for tool in fields.objects_if_any(name):
        add_tool(reader, tool)
    return reader


def add_tool(reader: ToolReader, tool: Fields) -> list[str]:
    """Add a tool; return the model's name of it, none if it is left out."""
    kind = tool.text("type") or "custom"
    dated = _DATED.fullmatch(kind)
    known = _KNOWN.get(dated[1] if dated else kind)
    if kind == "custom":
        return [reader.add_function(tool)]
    if known is not None:
        return [reader.add_known(tool, *known)]
    reader.leave_out_tool(kind)
    return []
