"""OpenAI's Responses interface: /v1/responses, and /v1/responses/compact."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_format import answer_format
from kvchat.chat.answer_memory import Fed
from kvchat.chat.answer_settings import AskOptions, ContextPolicy
from kvchat.chat.compaction import (
    NoSummary,
    checked_summary,
    excerpt_request,
    max_summary_tokens,
    request_text,
    require_substance,
    summary_options,
    without_summary,
)
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText, ShownToken
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.chat.prefixes import CONTEXTS_COUNTED
from kvchat.chat.resent_chat import Message, ResentChat, resent_chat
from kvchat.chat.text_codec import Segment
from kvchat.chat.tools import ToolSet
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError, openai_form
from kvchat.server.bodies import Body, read_request
from kvchat.server.foreign_fields import LeftOutNotes, own_fields
from kvchat.server.generation_fields import (
    asked_effort,
    foreign_format,
    require_tellable,
    response_logprobs,
    sampling_options,
    token_limit,
    with_endings,
    with_penalties,
)
from kvchat.server.guard import client_of
from kvchat.server.logprob_forms import listed
from kvchat.server.offered_tools import OfferedTools
from kvchat.server.response_items import call_item, compacted, read_chat, read_items, streamed_call
from kvchat.server.service import Service, facts, until_gone
from kvchat.server.stored_responses import (
    HeldResponse,
    StoredResponses,
    given_items,
    is_stored,
    item_token,
)
from kvchat.server.streaming import EventStream, sse
from kvchat.server.tool_fields import openai_choice, with_calls

# A summary for /v1/responses/compact is asked for below the conversation, which is cached then.
# Where the context has no room for that, an excerpt is summarised. Without a summary the oldest
# messages are left out.

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What stands for a conversation, and how the model answered; None where it was not asked."""

    text: str
    asked: tuple[AnswerEnded, Answer] | None


class Compacting:
    """Compacts one conversation, which a request gave with these tools."""

    def __init__(
        self, service: Service, given: IncomingChat, tools: ToolSet | None, client: str
    ) -> None:
        self._service = service
        self._answering = service.answering
        self._limit = service.host.context_limit
        options = summary_options(service.options, service.host.model, self._limit)
        self._options = replace(options, client=client, max_calls=0)
        self._request = request_text("", self._limit)
        given.ask(self._request)
        self._messages = given.messages[:-1]
        self._chat = given.chat(tools)

    async def run(self) -> Compacted:
        """Return what stands for the conversation; raises ApiError if it cannot be answered."""
        asked = None
        try:
            chat = self._chat if await self._has_room() else await self._excerpt()
            answer = await self._answering.chat(chat, self._options)
            [ended] = await whole_answers(answer, 1)
            asked = ended, answer
            return Compacted(await self._answering.on_encoder(lambda: self._summary(ended)), asked)
        except (NoSummary, ApiError) as error:
            if isinstance(error, ApiError) and error.code != _TOO_LONG:
                raise
            text = await self._answering.on_encoder(self._left_out)
            return Compacted(text, asked)

    async def _has_room(self) -> bool:
        """Whether the context holds the conversation with the request and a summary."""
        try:
            num_tokens = await self._answering.count(self._chat, self._options.think)
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            return False
        return num_tokens + max_summary_tokens(self._limit) <= self._limit

    async def _excerpt(self) -> ResentChat:
        """Return a conversation of one message: an excerpt of the other one, and the request."""
        text = await self._answering.on_encoder(
            lambda: excerpt_request(self._messages, self._request, self._limit, self._num_tokens)
        )
        return resent_chat(None, [Message(Role.USER, text)])

    def _summary(self, ended: AnswerEnded) -> str:
        summary = checked_summary(ended.text, ended.reason)
        num_tokens = self._num_tokens(summary)
        require_substance(summary, num_tokens, ended.usage.prompt_tokens, self._messages)
        return summary

    def _left_out(self) -> str:
        return without_summary(self._messages, self._limit, self._num_tokens)

    def _num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text; called on the encoder's thread."""
        return len(self._service.host.model.tokenizer.encode([Segment(text, is_inert=True)]))


# Keeps the items that a response answers, and the response; returns once they are on the disk.
Keep = Callable[[list[dict[str, Any]], dict[str, Any], Fed], Awaitable[None]]

_UNSUPPORTED = ("conversation", "background", "prompt", "moderation")
_TRUNCATIONS = ("auto", "disabled")
# What a request says of itself; the response says it again.
_DESCRIPTIONS = ("user", "safety_identifier", "prompt_cache_key")
_MOST_METADATA = 16
_MOST_NAME, _MOST_TEXT = 64, 512  # characters


class ResponsesApi:
    """The handler of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.stored = StoredResponses(service)
        self._left_out = LeftOutNotes()

    async def respond(self, request: Request) -> Response:
        fields = await read_request(request)
        answer, response = await self._begun(fields, None, client_of(request))
        if fields.flag("stream"):
            return self._left_out.tell(_stream(answer, response), response.offered.left_out)
        [ended] = await until_gone(request, whole_answers(answer, 1))
        complete = response.complete(ended, answer)
        await response.keep()
        return self._left_out.tell(JSONResponse(complete), response.offered.left_out)

    async def stream(self, fields: Body, held: HeldResponse, client: str) -> Response:
        """Begin the response to one message of a connection, which holds its last response."""
        return _stream(*await self._begun(fields, held, client))

    async def _begun(
        self, fields: Body, held: HeldResponse | None, client: str
    ) -> "tuple[Answer, _Response]":
        """Read a request and submit it; raises ApiError if it cannot be answered."""
        fields = own_fields(fields, "responses")
        self._service.require_model(fields)
        fields.refuse(*_UNSUPPORTED)
        _check_others(fields)
        self._service.require_room(fields, "input")
        earlier = await self.stored.earlier_items(fields, held)
        fields = await self.stored.with_items(fields, earlier)
        chat, offered = await fields.read(lambda body: read_chat(body, earlier), len(earlier))
        options = replace(self._options(fields, chat), client=client)
        require_tellable(self._service, chat, options)
        wanted = answer_format(fields.nested("text"), "format", ("schema",))
        wanted = wanted or foreign_format(fields)
        choice = openai_choice(fields)
        options = await with_calls(self._service, choice, chat.tools, options, wanted)
        keep = self._keep(fields, earlier, held)
        response = _Response(self._service.name, options, fields, keep, offered)
        return await self._service.answering.chat(chat, options), response

    def _keep(self, fields: Body, earlier: list[Fields], held: HeldResponse | None) -> Keep:
        """Return what keeps a complete response wherever the client lets it be kept."""

        async def keep(given: list[dict[str, Any]], response: dict[str, Any], fed: Fed) -> None:
            if is_stored(fields):
                await self.stored.keep(given, response, fed)
            if held is not None:
                before = [item.values for item in earlier]
                held.hold([*before, *given], response, fields.num_bytes)

        return keep

    async def compact(self, request: Request) -> Response:
        """Answer with one item that takes the place of a conversation."""
        fields = await read_request(request)
        self._service.require_model(fields)
        self._service.require_room(fields, "input", CONTEXTS_COUNTED)
        earlier = await self.stored.earlier_items(fields)
        fields = await self.stored.with_items(fields, earlier)
        # The tools stand before the conversation: without them nothing of it would be cached.
        given, offered = await fields.read(lambda body: read_items(body, earlier), len(earlier))
        compacting = Compacting(self._service, given, offered.tools, client_of(request))
        compact = await until_gone(request, compacting.run())
        compaction = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [compacted(compact.text)],
            "usage": _usage(*compact.asked) if compact.asked is not None else None,
        }
        return JSONResponse(compaction)

    def _options(self, fields: Fields, chat: ResentChat) -> AskOptions:
        options = sampling_options(fields, self._service.options)
        options = with_penalties(fields, options, self._service.host.model.vocab_size)
        options = with_endings(fields, options, self._service.host.model.vocab_size)
        limit = token_limit(fields, "max_output_tokens")
        switch = self._service.host.model.format.switch
        if fields.text("truncation") == "auto" and "context_policy" not in fields:
            options = replace(options, context_policy=ContextPolicy.DROP)
        return replace(
            options,
            max_tokens=limit if limit is not None else options.max_tokens,
            num_samples=1,
            is_one_shot=len(chat.messages) == 1,
            max_calls=openai_choice(fields).max_calls,
            think=asked_effort(fields, switch, options.think),
            num_top_logprobs=response_logprobs(fields),
        )


def _check_others(fields: Fields) -> None:
    """Raise ApiError for a bad field that does not change what is answered here.

    Calls of tools that the server runs are none, however few `max_tool_calls` allows.
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


class _Response:
    """The response object, before and after the answer.

    Keep a complete one before the client is told of its end: it may continue it after a crash.
    `offered` are the tools that may be called.
    """

    def __init__(
        self, model: str, options: AskOptions, fields: Fields, keep: Keep, offered: OfferedTools
    ) -> None:
        self._keep = keep
        self._fed = Fed()
        self.offered = offered
        self._given = given_items(fields)
        self._complete: dict[str, Any] | None = None
        drops = options.context_policy is ContextPolicy.DROP
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
            "truncation": "auto" if drops else "disabled",
            "service_tier": "default",
            "usage": None,
            "metadata": fields.nested("metadata").values,
            **{name: fields.text(name) for name in _DESCRIPTIONS},
        }

    @property
    def id(self) -> str:
        return str(self._fields["id"])

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
            "output": _items(ended, self.offered, self.id) if items is None else items,
            "usage": _usage(ended, answer),
        }
        self._complete, self._fed = response, answer.asked.fed
        return response

    async def keep(self) -> None:
        """Keep the response if it is complete."""
        if self._complete is not None:
            await self._keep(self._given, self._complete, self._fed)

    def failed(self, error: ApiError) -> dict[str, Any]:
        fault = {"code": error.code or "server_error", "message": error.message}
        return {**self._fields, "status": "failed", "error": fault}


def _items(ended: AnswerEnded, offered: OfferedTools, response_id: str) -> list[dict[str, Any]]:
    token = partial(item_token, response_id)
    items = [_item(True, ended.thinking, "completed", token(0))] if ended.thinking else []
    if ended.text or not ended.calls:
        status = "completed" if ended.is_whole or ended.calls else "incomplete"
        message = _item(False, ended.text, status, token(len(items)), ended.logprobs)
        items.append(message)
    for call in ended.calls:
        items.append(call_item(call, offered, token(len(items))))
    return items


def _item(
    is_thinking: bool, text: str, status: str, token: str, logprobs: Sequence[ShownToken] = ()
) -> dict[str, Any]:
    if is_thinking:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{token}", "type": "reasoning", "summary": [], "content": content}
    return {
        "id": f"msg_{token}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [_part(False, text, logprobs)] if status != "in_progress" else [],
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
        "output_tokens_details": {"reasoning_tokens": ended.num_thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "kvchat": facts(ended, answer.asked),
    }


def _stream(answer: Answer, response: _Response) -> Response:
    return EventStream(answer, _ResponseEvents(answer, response), before_end=response.keep)


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
        self._complete: dict[str, Any] = {}  # once the answer has ended

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
        said, index = self._close(), len(self._items)
        item = call_item(event.call, self._response.offered, self._token)
        begun, parts = streamed_call(item)
        said += self._event("response.output_item.added", output_index=index, item=begun)
        place = {"item_id": item["id"], "output_index": index}
        said += "".join(self._event(kind, **place, **told) for kind, told in parts)
        self._items.append(item)
        return said + self._event("response.output_item.done", output_index=index, item=item)

    def ended(self, event: AnswerEnded) -> str:
        is_said = self._item_id or event.calls
        opening = "" if is_said else self._open(is_thinking=False)
        closing = opening + self._close(event.is_whole)
        self._complete = self._response.complete(event, self._answer, self._items)
        return closing

    def finish(self) -> str:
        return self._event(f"response.{self._complete['status']}", response=self._complete)

    def fail(self, error: ApiError) -> str:
        failed = self._event("response.failed", response=self._response.failed(error))
        return failed + sse(openai_form(error), "error")

    @property
    def _token(self) -> str:
        """What makes the id of the next item."""
        return item_token(self._response.id, len(self._items))

    @property
    def _kind(self) -> str:
        return "response.reasoning_text" if self._is_thinking else "response.output_text"

    def _open(self, is_thinking: bool) -> str:
        self._is_thinking, self._text, self._logprobs = is_thinking, "", []
        item = _item(is_thinking, "", "in_progress", self._token)
        self._item_id = item["id"]
        return self._event(
            "response.output_item.added", output_index=len(self._items), item=item
        ) + self._about_part("response.content_part.added", part=_part(is_thinking, ""))

    def _close(self, is_whole: bool = True) -> str:
        """Return the end of the item that is open, if one is; `is_whole` if nothing cut it."""
        if not self._item_id:
            return ""
        tokens = self._logprobs
        status = "completed" if is_whole else "incomplete"
        item = _item(self._is_thinking, self._text, status, self._token, tokens)
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
