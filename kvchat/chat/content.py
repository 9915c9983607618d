"""Reads the content of messages: a text, or a list of parts, in all interfaces.

What a user sends and the model cannot read is refused. What a tool returned stays in a conversation
for ever, so a note takes its place there.
"""

import json
from collections.abc import Callable

from kvchat.chat.fields import Fields, shortened

_TEXTS = ("text", "input_text", "output_text")
# Answers have these too; their ids are known with the answer's, or another server ran them.
THOUGHTS = ("thinking", "redacted_thinking")
_NAMES = {
    "image": "An image",
    "image_url": "An image",
    "input_image": "An image",
    "document": "A document",
    "file": "A file",
    "input_file": "A file",
    "audio": "A recording",
    "input_audio": "A recording",
}

Refer = Callable[[str], str]


def message_text(message: Fields, name: str = "content", besides: tuple[str, ...] = ()) -> str:
    """Return the text of a message's field; raises ApiError for what the model cannot read.

    Parts of the types `besides` are left out.
    """
    texts = []
    for part in _parts(message, name):
        if part.text("type") in besides:
            continue
        text = _text_of(part)
        if text is None:
            raise part.fault("type", "must be text; the model reads nothing else")
        texts.append(text)
    return "".join(texts)


def returned_text(result: Fields, name: str, refer: Refer | None = None) -> str:
    """Return the text of what a tool returned, with a note for each part that is no text.

    `refer` returns what stands for a reference to a tool, by the tool's name.
    """
    texts, is_plain = [], True
    for part in _parts(result, name):
        kind, text = part.text("type"), _text_of(part)
        is_plain = is_plain and kind in _TEXTS
        if text is None:
            is_tool = refer is not None and kind == "tool_reference"
            text = refer(part.text("tool_name") or "") if refer and is_tool else _note(part)
        texts.append(text)
    return ("" if is_plain else "\n").join(texts)


def failed_text(text: str) -> str:
    """Return what the model reads of a call that failed: templates have no place to say so."""
    return f"The tool failed.\n{text}".strip()


def _parts(holder: Fields, name: str) -> list[Fields]:
    """Return the parts of a content; a text is one part."""
    content = holder.raw(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content})]
    return holder.objects_if_any(name)


def _text_of(part: Fields) -> str | None:
    """Return what the model reads of a part, None if it cannot read it."""
    kind = part.text("type")
    if kind in _TEXTS:
        return part.text("text") or ""
    if kind == "refusal":
        return part.text("refusal") or ""
    if kind == "search_result":
        head = [part.text("title"), part.text("source"), message_text(part)]
        return "\n".join(line for line in head if line)
    if kind == "document":
        return _document(part)
    return None


def _document(part: Fields) -> str | None:
    """Return the text of a document, None for a file."""
    source = part.nested("source")
    kind = source.text("type")
    if kind == "text":
        text = source.text("data")
    elif kind == "content":
        text = returned_text(source, "content")
    else:
        return None
    head = [part.text("title"), part.text("context"), text]
    return "\n".join(line for line in head if line)


def _note(part: Fields) -> str:
    """Return what stands in the place of a part that the model cannot read."""
    kind = part.text("type") or ""
    name = _NAMES.get(kind, f"A part of the type {json.dumps(shortened(kind))}")
    about = [part.raw("title"), part.raw("filename"), *_media_types(part)]
    facts = ", ".join(shortened(fact) for fact in about if isinstance(fact, str) and fact)
    return f"[{name}{f' ({facts})' if facts else ''}, which this model cannot read]"


def _media_types(part: Fields) -> list[object]:
    source = part.raw("source")
    return [source.get("media_type")] if isinstance(source, dict) else []
