"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens."""

import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded, AnswerText
from kvchat.chat.resent import ResentChat
from kvchat.core.types import FinishReason, Usage
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError, anthropic_form
from kvchat.server.fields import Fields, read_body, sampling_options, stops
from kvchat.server.openai_api import checked_chat
from kvchat.server.service import Service, facts, until_gone
from kvchat.server.streaming import sse, stream_response

_UNSUPPORTED = ("tools", "mcp_servers", "container")


class AnthropicApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def messages(self, request: Request) -> Response:
        fields = read_body(await request.body())
        self._service.require_model(fields)
        fields.refuse(*_UNSUPPORTED)
        chat = _chat(fields)
        options = self._options(fields, chat)
        answer = await self._service.answering.chat(chat, options)
        if fields.flag("stream"):
            return stream_response(answer, _MessageEvents(answer, self._service.name))
        [ended] = await until_gone(request, whole_answers(answer, 1))
        return JSONResponse({**_message(self._service.name), **_outcome(ended, answer)})

    async def count_tokens(self, request: Request) -> Response:
        fields = read_body(await request.body())
        self._service.require_model(fields)
        fields.refuse(*_UNSUPPORTED)
        return JSONResponse({"input_tokens": await self._service.answering.count(_chat(fields))})

    def _options(self, fields: Fields, chat: ResentChat) -> AskOptions:
        limit = fields.whole("max_tokens", 1)
        if limit is None:
            raise fields.fault("max_tokens", "is missing")
        options = sampling_options(fields, self._service.options)
        return replace(
            options,
            max_tokens=limit,
            stops=stops(fields, "stop_sequences") or options.stops,
            num_samples=1,
            is_one_shot=len(chat.messages) == 1,
        )


# Requests


def _chat(fields: Fields) -> ResentChat:
    messages: list[tuple[Role, str]] = []
    for message in fields.objects("messages"):
        role = message.text("role")
        if role not in ("user", "assistant"):
            raise message.fault("role", "must be user or assistant")
        messages.append((Role(role), _text(message, "content")))
    return checked_chat(_text(fields, "system"), messages)


def _text(holder: Fields, name: str) -> str:
    """Return the text of a field that is a text or a list of blocks; thinking is left out."""
    value = holder.raw(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    texts = []
    for block in holder.objects(name):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text", "") or "")
        elif kind not in ("thinking", "redacted_thinking"):
            raise block.fault("type", "must be text; the model reads nothing else")
    return "".join(texts)


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
    content: list[dict[str, str]] = []
    if ended.thinking:
        content.append({"type": "thinking", "thinking": ended.thinking, "signature": ""})
    content.append({"type": "text", "text": ended.text})
    return {
        "content": content,
        "stop_reason": _stop_reason(ended.reason),
        "usage": _usage(ended, answer),
    }


def _stop_reason(reason: FinishReason) -> str:
    return "end_turn" if reason is FinishReason.STOP else "max_tokens"


def _usage(ended: AnswerEnded, answer: Answer) -> dict[str, Any]:
    return {
        **_input_usage(ended.usage),
        "output_tokens": ended.usage.completion_tokens,
        "kvchat": facts(ended, answer.difference),
    }


def _input_usage(usage: Usage) -> dict[str, int]:
    """Return the counts of the prompt; `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prefilled_tokens,
        "cache_read_input_tokens": usage.cached.total,
        "cache_creation_input_tokens": 0,
    }


class _MessageEvents:
    """Writes an answer as Anthropic's events: blocks of thinking and text, one after another."""

    def __init__(self, answer: Answer, model: str) -> None:
        self._answer = answer
        self._message = _message(model)
        self._index = -1
        self._is_thinking = False

    def begin(self) -> str:
        # The counts are not known before the prompt is read; message_delta has them.
        usage = {**_input_usage(Usage()), "output_tokens": 0}
        return _event("message_start", message={**self._message, "usage": usage})

    def text(self, event: AnswerText) -> str:
        opening = ""
        if self._index < 0 or event.is_thinking != self._is_thinking:
            opening = self._close() + self._open(event.is_thinking)
        kind, name = ("thinking_delta", "thinking") if event.is_thinking else ("text_delta", "text")
        delta = {"type": kind, name: event.text}
        return opening + _event("content_block_delta", index=self._index, delta=delta)

    def ended(self, event: AnswerEnded) -> str:
        opening = self._open(is_thinking=False) if self._index < 0 else ""
        delta = {"stop_reason": _stop_reason(event.reason), "stop_sequence": None}
        return (
            opening
            + self._close()
            + _event("message_delta", delta=delta, usage=_usage(event, self._answer))
        )

    def finish(self) -> str:
        return _event("message_stop")

    def fail(self, error: ApiError) -> str:
        return sse(anthropic_form(error), "error")

    def _open(self, is_thinking: bool) -> str:
        self._index += 1
        self._is_thinking = is_thinking
        block = {"type": "text", "text": ""}
        if is_thinking:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> str:
        return _event("content_block_stop", index=self._index) if self._index >= 0 else ""


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)
