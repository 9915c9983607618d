"""OpenAI's Responses interface: /v1/responses, and /v1/responses/compact.

A compacted conversation is one item: the model's summary, in base64 and not encrypted. The item
stands for the messages that it was made of wherever a client sends it as input.
"""

import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.compaction import OPENING, REPLY, max_summary_tokens, request_text
from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.shown_logprobs import ShownToken
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.types import FinishReason
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError, openai_form
from kvchat.server.bodies import Body, read_body
from kvchat.server.conversations import RequestChat
from kvchat.server.fields import Fields, sampling_options
from kvchat.server.generation_fields import (
    answer_format,
    require_tellable,
    response_logprobs,
    with_penalties,
)
from kvchat.server.logprob_forms import listed
from kvchat.server.openai_api import given_call, message_text
from kvchat.server.service import Service, facts, until_gone
from kvchat.server.stored_responses import HeldResponse, StoredResponses, given_items, is_stored
from kvchat.server.streaming import sse, stream_response
from kvchat.server.thinking_fields import asked_effort
from kvchat.server.tool_fields import openai_choice, read_tools, with_calls

# Keeps the items that a response answers, and the response; returns once they are on the disk.
Keep = Callable[[list[dict[str, Any]], dict[str, Any]], Awaitable[None]]

_UNSUPPORTED = ("conversation", "background", "prompt", "moderation")
_TRUNCATIONS = ("auto", "disabled")
# What a request says of itself; the response says it again.
_DESCRIPTIONS = ("user", "safety_identifier", "prompt_cache_key")
_MOST_METADATA = 16
_MOST_NAME, _MOST_TEXT = 64, 512  # characters
_COMPACTED = b"kvchat summary\n"  # begins what a compaction item holds


class ResponsesApi:
    """The handler of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.stored = StoredResponses(service)

    async def respond(self, request: Request) -> Response:
        fields = await read_body(await request.body())
        answer, response = await self._begun(fields, None)
        if fields.flag("stream"):
            return _stream(answer, response)
        [ended] = await until_gone(request, whole_answers(answer, 1))
        complete = response.complete(ended, answer)
        await response.keep()
        return JSONResponse(complete)

    async def stream(self, fields: Body, held: HeldResponse) -> Response:
        """Begin the response to one message of a connection, which holds its last response."""
        return _stream(*await self._begun(fields, held))

    async def _begun(self, fields: Body, held: HeldResponse | None) -> "tuple[Answer, _Response]":
        """Read a request and submit it; raises ApiError if it cannot be answered."""
        self._service.require_model(fields)
        fields.refuse(*_UNSUPPORTED)
        _check_others(fields)
        self._service.require_room(fields, "input")
        earlier = await self.stored.earlier_items(fields, held)
        chat = await fields.read(lambda body: _chat(body, earlier), len(earlier))
        options = self._options(fields, chat)
        require_tellable(self._service, chat, options)
        wanted = answer_format(fields.nested("text"), "format", ("schema",))
        choice = openai_choice(fields)
        options = await with_calls(self._service, choice, chat.tools, options, wanted)
        keep = self._keep(fields, earlier, held)
        response = _Response(self._service.name, options, fields, keep)
        return await self._service.answering.chat(chat, options), response

    def _keep(self, fields: Body, earlier: list[Fields], held: HeldResponse | None) -> Keep:
        """Return what keeps a complete response wherever the client lets it be kept."""

        async def keep(given: list[dict[str, Any]], response: dict[str, Any]) -> None:
            if is_stored(fields):
                await self.stored.keep(given, response)
            if held is not None:
                before = [item.values for item in earlier]
                held.hold([*before, *given], response, fields.num_bytes)

        return keep

    async def compact(self, request: Request) -> Response:
        """Answer with one item that takes the place of a conversation."""
        fields = await read_body(await request.body())
        self._service.require_model(fields)
        self._service.require_room(fields, "input")
        earlier = await self.stored.earlier_items(fields)
        # The tools stand before the conversation: without them nothing of it would be cached.
        given, tools = await fields.read(
            lambda body: (_request_chat(body, earlier), _tools(body)), len(earlier)
        )
        given.ask(request_text(""))
        ready = self._service.host.ready
        limit = ready.context_limit if ready is not None else self._service.host.model.max_context
        options = replace(self._service.options, max_tokens=max_summary_tokens(limit))
        answer = await self._service.answering.chat(given.chat(tools), options)
        [ended] = await until_gone(request, whole_answers(answer, 1))
        if ended.reason is not FinishReason.STOP or not ended.text.strip():
            sentence = "The model wrote no complete summary; nothing is compacted."
            raise ApiError(400, sentence, "input", "not_compacted")
        compaction = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [_compacted(ended.text.strip())],
            "usage": _usage(ended, answer),
        }
        return JSONResponse(compaction)

    def _options(self, fields: Fields, chat: ResentChat) -> AskOptions:
        options = sampling_options(fields, self._service.options)
        options = with_penalties(fields, options, self._service.host.model.vocab_size)
        limit = fields.whole("max_output_tokens", 1)
        switch = self._service.host.model.format.switch
        reasoning = fields.nested("reasoning")
        return replace(
            options,
            max_tokens=limit if limit is not None else options.max_tokens,
            num_samples=1,
            is_one_shot=len(chat.messages) == 1,
            max_calls=openai_choice(fields).max_calls,
            think=asked_effort(reasoning, "effort", switch, options.think),
            num_top_logprobs=response_logprobs(fields),
        )


def _check_others(fields: Fields) -> None:
    """Raise ApiError for a bad field that does not change what is answered here.

    A conversation that is too long is refused with `auto` too: no item of it is dropped. Calls of
    tools that the server runs are none, however few `max_tool_calls` allows.
    """
    if fields.text("truncation", "disabled") not in _TRUNCATIONS:
        raise fields.fault("truncation", f"must be {' or '.join(_TRUNCATIONS)}")
    fields.whole("max_tool_calls", 1)
    for name in _DESCRIPTIONS:
        _check_short(fields, name)
    metadata = fields.nested("metadata")
    if len(metadata.values) > _MOST_METADATA:
        raise fields.fault("metadata", f"must have at most {_MOST_METADATA} fields")
    for name in metadata.values:
        if len(name) > _MOST_NAME:
            raise fields.fault("metadata", f"must have names of at most {_MOST_NAME} characters")
        _check_short(metadata, name)


def _check_short(fields: Fields, name: str) -> None:
    """Raise ApiError for a long text: the response repeats it, and is kept."""
    if len(fields.text(name) or "") > _MOST_TEXT:
        raise fields.fault(name, f"must be a text of at most {_MOST_TEXT} characters")


def _chat(fields: Fields, earlier: Sequence[Fields]) -> ResentChat:
    """Return the conversation of a request, whose first items are those of earlier responses."""
    return _request_chat(fields, earlier).chat(_tools(fields))


def _tools(fields: Fields) -> ToolSet | None:
    return read_tools(map(_tool, fields.objects_if_any("tools")))


def _request_chat(fields: Fields, earlier: Sequence[Fields]) -> RequestChat:
    chat = RequestChat()
    chat.instruct(fields.text("instructions") or "")
    given = fields.raw("input")
    for item in earlier:
        _add_item(chat, item)
    if isinstance(given, str):
        chat.next_item()
        chat.ask(given)
    else:
        for item in fields.objects("input"):
            _add_item(chat, item)
    return chat


def _add_item(chat: RequestChat, item: Fields) -> None:
    chat.next_item()
    kind = item.text("type", "message")
    if kind == "message":
        _add_message(chat, item)
    elif kind == "function_call":
        chat.answer("", [(item.text("call_id") or "", given_call(item))])
    elif kind == "function_call_output":
        chat.add_result(item, "call_id", message_text(item, "output"))
    elif kind == "compaction":
        chat.ask(OPENING + _summary(item))
        chat.answer(REPLY)
    elif kind != "reasoning":  # its ids are known with the answer's
        allowed = "must be message, reasoning, compaction or a function's call or output"
        raise item.fault("type", allowed)


def _compacted(summary: str) -> dict[str, Any]:
    """Return the item that stands for a conversation."""
    held = base64.b64encode(_COMPACTED + summary.encode()).decode()
    return {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": held}


def _summary(item: Fields) -> str:
    """Return the summary in a compaction item; raises ApiError for one of another server."""
    try:
        held = base64.b64decode(item.text("encrypted_content") or "", validate=True)
        if held.startswith(_COMPACTED):
            return held.removeprefix(_COMPACTED).decode()
    except ValueError:  # no base64, or no UTF-8
        pass
    raise item.fault("encrypted_content", "is not what kvchat's /v1/responses/compact gave")


def _add_message(chat: RequestChat, item: Fields) -> None:
    role, text = item.text("role"), message_text(item)
    if role in ("system", "developer"):
        chat.instruct(text)
    elif role == "user":
        chat.ask(text)
    elif role == "assistant":
        chat.answer(text)
    else:
        raise item.fault("role", "must be system, developer, user or assistant")


def _tool(tool: Fields) -> Fields:
    if tool.text("type", "function") != "function":
        raise tool.fault("type", "must be function; kvchat runs no tools of its own")
    return tool


class _Response:
    """The response object, before and after the answer.

    Keep a complete one before the client is told of its end: it may continue it after a crash.
    """

    def __init__(self, model: str, options: AskOptions, fields: Fields, keep: Keep) -> None:
        self._keep = keep
        self._given = given_items(fields)
        self._complete: dict[str, Any] | None = None
        self._fields: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.text("instructions"),
            "max_output_tokens": options.max_tokens,
            "max_tool_calls": fields.raw("max_tool_calls"),
            "model": model,
            "output": [],
            "parallel_tool_calls": options.max_calls is None,
            "presence_penalty": options.sampling.presence_penalty,
            "frequency_penalty": options.sampling.frequency_penalty,
            "previous_response_id": fields.text("previous_response_id"),
            "reasoning": {"effort": fields.nested("reasoning").text("effort"), "summary": None},
            "store": is_stored(fields),
            "temperature": options.sampling.temperature,
            "text": {"format": fields.nested("text").raw("format") or {"type": "text"}},
            "tool_choice": fields.raw("tool_choice") or "auto",
            "tools": fields.raw("tools") or [],
            "top_logprobs": options.num_top_logprobs or 0,
            "top_p": options.sampling.top_p,
            "truncation": "disabled",
            "service_tier": "default",
            "usage": None,
            "metadata": fields.nested("metadata").values,
            **{name: fields.text(name) for name in _DESCRIPTIONS},
        }

    def begun(self) -> dict[str, Any]:
        return self._fields

    def complete(
        self, ended: AnswerEnded, answer: Answer, items: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the object with its outcome; `items` are the outputs that were streamed."""
        is_whole = ended.is_whole
        cause = {"reason": "max_output_tokens"}
        response = {
            **self._fields,
            "status": "completed" if is_whole else "incomplete",
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else cause,
            "output": _items(ended) if items is None else items,
            "usage": _usage(ended, answer),
        }
        self._complete = response
        return response

    async def keep(self) -> None:
        """Keep the response if it is complete."""
        if self._complete is not None:
            await self._keep(self._given, self._complete)

    def failed(self, error: ApiError) -> dict[str, Any]:
        fault = {"code": error.code or "server_error", "message": error.message}
        return {**self._fields, "status": "failed", "error": fault}


def _items(ended: AnswerEnded) -> list[dict[str, Any]]:
    reasoning = [_item(True, ended.thinking, "completed")] if ended.thinking else []
    said = ended.text or not ended.calls
    message = [_item(False, ended.text, "completed", None, ended.logprobs)] if said else []
    return [*reasoning, *message, *(_call_item(call) for call in ended.calls)]


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{secrets.token_hex(12)}",
        "name": call.name,
        "arguments": call.arguments_text,
    }


def _item(
    is_thinking: bool,
    text: str,
    status: str,
    item_id: str | None = None,
    logprobs: Sequence[ShownToken] = (),
) -> dict[str, Any]:
    if is_thinking:
        content = [{"type": "reasoning_text", "text": text}]
        item_id = item_id or f"rs_{secrets.token_hex(12)}"
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content}
    return {
        "id": item_id or f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [_part(False, text, logprobs)] if status == "completed" else [],
    }


def _part(is_thinking: bool, text: str, logprobs: Sequence[ShownToken] = ()) -> dict[str, Any]:
    if is_thinking:
        return {"type": "reasoning_text", "text": text}
    told = listed(logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}


def _usage(ended: AnswerEnded, answer: Answer) -> dict[str, Any]:
    usage = ended.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached.total},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "kvchat": facts(ended, answer.difference),
    }


def _stream(answer: Answer, response: _Response) -> Response:
    return stream_response(answer, _ResponseEvents(answer, response), before_end=response.keep)


class _ResponseEvents:
    """Writes an answer as the events of the Responses interface."""

    def __init__(self, answer: Answer, response: _Response) -> None:
        self._answer = answer
        self._response = response
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._item_id = ""
        self._is_thinking = False
        self._text = ""
        self._logprobs: list[ShownToken] = []

    def begin(self) -> str:
        return self._event("response.created", response=self._response.begun()) + self.ping()

    def ping(self) -> str:
        """Say again that the response is in progress: Codex counts events, and not comments."""
        return self._event("response.in_progress", response=self._response.begun())

    def text(self, event: AnswerText) -> str:
        opening = ""
        if not self._item_id or event.is_thinking != self._is_thinking:
            opening = self._close() + self._open(event.is_thinking)
        self._text += event.text
        self._logprobs += event.logprobs
        told = self._told(event.logprobs)
        return opening + self._about_part(f"{self._kind}.delta", delta=event.text, **told)

    def _told(self, logprobs: Sequence[ShownToken]) -> dict[str, Any]:
        """Return the fields of logprobs, which only events about an answer's text have."""
        return {} if self._is_thinking else {"logprobs": listed(logprobs)}

    def call(self, event: AnswerCall) -> str:
        said, item, index = self._close(), _call_item(event.call), len(self._items)
        begun = {**item, "status": "in_progress", "arguments": ""}
        said += self._event("response.output_item.added", output_index=index, item=begun)
        kind, arguments = "response.function_call_arguments", item["arguments"]
        place = {"item_id": item["id"], "output_index": index}
        said += self._event(f"{kind}.delta", **place, delta=arguments)
        said += self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
        self._items.append(item)
        return said + self._event("response.output_item.done", output_index=index, item=item)

    def ended(self, event: AnswerEnded) -> str:
        is_said = self._item_id or event.calls
        opening = "" if is_said else self._open(is_thinking=False)
        closing = opening + self._close()
        complete = self._response.complete(event, self._answer, self._items)
        return closing + self._event(f"response.{complete['status']}", response=complete)

    def finish(self) -> str:
        return ""

    def fail(self, error: ApiError) -> str:
        failed = self._event("response.failed", response=self._response.failed(error))
        return failed + sse(openai_form(error), "error")

    @property
    def _kind(self) -> str:
        return "response.reasoning_text" if self._is_thinking else "response.output_text"

    def _open(self, is_thinking: bool) -> str:
        self._is_thinking, self._text, self._logprobs = is_thinking, "", []
        item = _item(is_thinking, "", "in_progress")
        self._item_id = item["id"]
        return self._event(
            "response.output_item.added", output_index=len(self._items), item=item
        ) + self._about_part("response.content_part.added", part=_part(is_thinking, ""))

    def _close(self) -> str:
        if not self._item_id:
            return ""
        tokens = self._logprobs
        item = _item(self._is_thinking, self._text, "completed", self._item_id, tokens)
        part = _part(self._is_thinking, self._text, tokens)
        told = self._told(tokens)
        said = self._about_part(f"{self._kind}.done", text=self._text, **told)
        said += self._about_part("response.content_part.done", part=part)
        said += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item_id = ""
        return said

    def _about_part(self, kind: str, **fields: Any) -> str:
        place = {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)
