"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_format import AnswerFormat, answer_format
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText
from kvchat.chat.fields import Fields
from kvchat.chat.prefixes import CONTEXTS_COUNTED
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolCall
from kvchat.core.types import Usage
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.anthropic_messages import read_chat
from kvchat.server.api_errors import ApiError, anthropic_form
from kvchat.server.bodies import Body, read_request
from kvchat.server.foreign_fields import LeftOutNotes, own_fields
from kvchat.server.generation_fields import (
    asked_thinking,
    foreign_format,
    sampling_options,
    stops,
    token_limit,
    with_endings,
)
from kvchat.server.guard import client_of
from kvchat.server.offered_tools import OfferedTools
from kvchat.server.service import Service, facts, until_gone
from kvchat.server.streaming import EventStream, sse
from kvchat.server.tool_fields import anthropic_choice, with_calls

_SHORT_TTL_S = 300.0
_UNSUPPORTED = ("mcp_servers", "container")


class AnthropicApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._left_out = LeftOutNotes()

    async def messages(self, request: Request) -> Response:
        fields = await self._fields(request)
        chat, offered = await self._read(fields)
        options = replace(self._options(fields, chat), client=client_of(request))
        choice = anthropic_choice(fields)
        options = await with_calls(self._service, choice, chat.tools, options, _format(fields))
        answer = await self._service.answering.chat(chat, options)
        if fields.flag("stream"):
            streamed = EventStream(answer, _MessageEvents(answer, self._service.name))
            return self._left_out.tell(streamed, offered.left_out)
        [ended] = await until_gone(request, whole_answers(answer, 1))
        whole = JSONResponse({**_message(self._service.name), **_outcome(ended, answer)})
        return self._left_out.tell(whole, offered.left_out)

    async def count_tokens(self, request: Request) -> Response:
        fields = await self._fields(request, CONTEXTS_COUNTED)
        think = self._think(fields)
        chat, offered = await self._read(fields)
        num_tokens = await self._service.answering.count(chat, think)
        counted = JSONResponse({"input_tokens": num_tokens})
        return self._left_out.tell(counted, offered.left_out)

    async def _fields(self, request: Request, num_contexts: int = 1) -> Body:
        """Return a request's fields; raises ApiError for what cannot be answered."""
        fields = own_fields(await read_request(request), "messages")
        self._service.require_model(fields)
        fields.refuse(*_UNSUPPORTED)
        _require_no_thread(fields)
        self._service.require_room(fields, "messages", num_contexts)
        return fields

    async def _read(self, fields: Body) -> tuple[ResentChat, OfferedTools]:
        stabilises = self._service.answering.stabilises
        return await fields.read(lambda body: read_chat(body, stabilises))

    def _think(self, fields: Fields) -> Think:
        switch, base = self._service.host.model.format.switch, self._service.options.think
        return asked_thinking(fields, switch, base)

    def _options(self, fields: Fields, chat: ResentChat) -> AskOptions:
        if "max_tokens" not in fields:
            raise fields.fault("max_tokens", "is missing")
        options = sampling_options(fields, self._service.options)
        options = with_endings(fields, options, self._service.host.model.vocab_size)
        return replace(
            options,
            max_tokens=token_limit(fields, "max_tokens"),
            stops=stops(fields, "stop_sequences") or options.stops,
            num_samples=1,
            is_one_shot=len(chat.messages) == 1,
            max_calls=anthropic_choice(fields).max_calls,
            think=self._think(fields),
        )


# Requests


def _require_no_thread(fields: Fields) -> None:
    """Raise ApiError for a message that continues another by its id.

    At this error the SDK sends the whole conversation, which is cached.
    """
    if fields.nested("thread").text("type") == "continue":
        sentence = "kvchat keeps no threads of messages: send the whole conversation."
        raise ApiError(404, sentence, "thread", "thread_not_found")


def _format(fields: Fields) -> AnswerFormat | None:
    places = ((fields.nested("output_config"), "format"), (fields, "output_format"))
    found = (answer_format(place, name, ("schema",)) for place, name in places)
    return next((wanted for wanted in found if wanted is not None), foreign_format(fields))


# Responses


def _message(model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _outcome(ended: AnswerEnded, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if ended.thinking:
        content.append({"type": "thinking", "thinking": ended.thinking, "signature": ""})
    if ended.text or not ended.calls:
        content.append({"type": "text", "text": ended.text})
    content += [{**_tool_use(call), "input": call.arguments} for call in ended.calls]
    return {"content": content, **_ending(ended), "usage": _usage(ended, answer)}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return the block of a call without its input."""
    token = secrets.token_hex(12)
    return {"type": "tool_use", "id": f"toolu_{token}", "name": call.name, "input": {}}


def _ending(ended: AnswerEnded) -> dict[str, Any]:
    """Return why an answer ended, and at which stop text."""
    reason = _stop_reason(ended)
    return {
        "stop_reason": reason,
        "stop_sequence": ended.stop_text if reason == "stop_sequence" else None,
    }


def _stop_reason(ended: AnswerEnded) -> str:
    if not ended.is_whole:
        return "max_tokens"
    if ended.calls:
        return "tool_use"
    return "end_turn" if ended.stop_text is None else "stop_sequence"


def _usage(ended: AnswerEnded, answer: Answer) -> dict[str, Any]:
    return {
        **_input_usage(ended.usage, answer.asked.kept),
        "output_tokens": ended.usage.completion_tokens,
        "kvchat": facts(ended, answer.asked),
    }


def _input_usage(usage: Usage, kept: Sequence[tuple[int, float]] = ()) -> dict[str, Any]:
    """Return the counts of the prompt.

    What was computed counts as created up to the last mark, and as input after it. `kept` are the
    tokens up to each mark and its seconds.
    """
    created = _num_created(usage, [num_tokens for num_tokens, _ in kept])
    long = _num_created(usage, [num_tokens for num_tokens, ttl_s in kept if ttl_s > _SHORT_TTL_S])
    return {
        "input_tokens": usage.prefilled_tokens - created,
        "cache_read_input_tokens": usage.cached.total,
        "cache_creation_input_tokens": created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - long,
            "ephemeral_1h_input_tokens": long,
        },
    }


def _num_created(usage: Usage, lengths: list[int]) -> int:
    """Return how many tokens of the longest of these beginnings were computed."""
    return min(usage.prefilled_tokens, max(0, max(lengths, default=0) - usage.cached.total))


class _MessageEvents:
    """Writes an answer as Anthropic's events: blocks of thinking and text, one after another."""

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer = answer
        self._message = _message(model)
        self._index = -1
        self._is_open = False
        self._is_thinking = False

    def begin(self) -> str:
        # The counts are not known before the prompt is read; message_delta has them.
        usage = {**_input_usage(Usage()), "output_tokens": 0}
        return _event("message_start", message={**self._message, "usage": usage})

    def text(self, event: AnswerText) -> str:
        opening = ""
        if not self._is_open or event.is_thinking != self._is_thinking:
            opening = self._close() + self._open_text(event.is_thinking)
        kind, name = ("thinking_delta", "thinking") if event.is_thinking else ("text_delta", "text")
        delta = {"type": kind, name: event.text}
        return opening + _event("content_block_delta", index=self._index, delta=delta)

    def call(self, event: AnswerCall) -> str:
        opening = self._close() + self._open(_tool_use(event.call))
        delta = {"type": "input_json_delta", "partial_json": event.call.arguments_text}
        said = _event("content_block_delta", index=self._index, delta=delta)
        return opening + said + self._close()

    def ended(self, event: AnswerEnded) -> str:
        opening = self._open_text(is_thinking=False) if self._index < 0 else ""
        usage = _usage(event, self._answer)
        return opening + self._close() + _event("message_delta", delta=_ending(event), usage=usage)

    def ping(self) -> str:
        return _event("ping")

    def finish(self) -> str:
        return _event("message_stop")

    def fail(self, error: ApiError) -> str:
        return sse(anthropic_form(error), "error")

    def _open_text(self, is_thinking: bool) -> str:
        self._is_thinking = is_thinking
        if is_thinking:
            return self._open({"type": "thinking", "thinking": "", "signature": ""})
        return self._open({"type": "text", "text": ""})

    def _open(self, block: dict[str, Any]) -> str:
        self._index += 1
        self._is_open = True
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> str:
        was_open, self._is_open = self._is_open, False
        return _event("content_block_stop", index=self._index) if was_open else ""


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)
