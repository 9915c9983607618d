"""Reads the bodies of ollama's interface: gives them the form of OpenAI's chat completions."""

import json
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from kvchat.chat.fields import Fields
from kvchat.chat.incoming import required_name
from kvchat.chat.tools import read_arguments
from kvchat.server.bodies import Body, read_request
from kvchat.server.foreign_fields import own_fields
from kvchat.server.service import Service

_LATEST = ":latest"
# What of `options` changes an answer here. The others say how a model is loaded, which the user of
# this server has decided.
_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "mirostat"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
)
_PASSED = ("tools", "think")
# The ids of an earlier context, a template in the place of the model's, and logprobs.
_UNKNOWN = ("context", "template", "logprobs", "top_logprobs")


def served_name(name: str) -> str:
    """Return a model's name as this interface writes it: with a tag."""
    return name if ":" in name else f"{name}{_LATEST}"


async def read_fields(request: Request, service: Service) -> Body:
    """Return the fields of a request; raises ApiError for a model that is not served.

    It is named by `model`, or `name` as older clients call it, with the tag that stands for none.
    """
    fields = await read_request(request)
    name = fields.text("model") or fields.text("name") or ""
    service.require_model(Fields({"model": name.removesuffix(_LATEST)} if name else {}))
    return fields


def chat_body(fields: Body) -> Body:
    """Return the body of /api/chat as one of a chat completion; raises FieldFault."""
    return _completion(fields, messages=_messages(fields.objects_if_any("messages")))


def question_body(fields: Body) -> Body:
    """Return the body of /api/generate as one of a chat completion with one question."""
    fields.refuse("images")
    system = fields.text("system")
    messages = [{"role": "system", "content": system}] if system else []
    prompt = {"role": "user", "content": fields.text("prompt") or ""}
    return _completion(fields, messages=[*messages, prompt])


def text_body(fields: Body) -> Body:
    """Return the body of /api/generate as one of a plain completion: the prompt is all it reads."""
    fields.refuse("images", "system", "tools")
    prompt, suffix = fields.text("prompt") or "", fields.text("suffix")
    return _completion(fields, "completions", prompt=prompt, suffix=suffix)


def _completion(fields: Body, interface: str = "chat", **content: Any) -> Body:
    fields.refuse(*_UNKNOWN)
    options = fields.nested("options")
    values = {name: options.raw(name) for name in _OPTIONS if name in options}
    limit = options.whole("num_predict", -2)
    if limit is not None and limit > 0:  # -1 and -2 are no limit
        values["max_tokens"] = limit
    values |= {name: fields.raw(name) for name in _PASSED if name in fields}
    values |= {"response_format": _format(fields), **content}
    return own_fields(Body(values, fields.num_bytes), interface)


def _format(fields: Fields) -> dict[str, Any] | None:
    wanted = fields.raw("format")
    if not wanted:
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, dict):
        raise fields.fault("format", "must be json or a schema")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}


def _messages(given: Iterable[Fields]) -> list[dict[str, Any]]:
    """Return messages whose calls and results have ids: here a result names the tool at most."""
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for number, message in enumerate(given):
        message.refuse("images")
        own: dict[str, Any] = {
            "role": message.text("role"),
            "content": message.text("content") or "",
        }
        calls = [call.nested("function") for call in message.objects_if_any("tool_calls")]
        if calls:
            names = [required_name(call) for call in calls]
            waiting = [(f"call_{number}_{place}", name) for place, name in enumerate(names)]
            own["tool_calls"] = [
                _call(call_id, name, call)
                for (call_id, name), call in zip(waiting, calls, strict=True)
            ]
        if own["role"] == "tool":
            own["tool_call_id"] = _taken(waiting, message.text("tool_name") or message.text("name"))
        messages.append(own)
    return messages


def _call(call_id: str, name: str, call: Fields) -> dict[str, Any]:
    arguments = json.dumps(read_arguments(call.raw("arguments")))
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _taken(waiting: list[tuple[str, str]], name: str | None) -> str:
    """Take the call that a result belongs to from those that wait; "" where none does."""
    place = next((i for i, (_, each) in enumerate(waiting) if name in (None, each)), None)
    return waiting.pop(place)[0] if place is not None else ""
