"""Ollama's interface, for the clients that speak no other: /api/chat, /api/generate and the lists.

A model stays as the user of this server loaded it: what asks to load, unload, pull or copy another
changes nothing here.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_format import answer_format
from kvchat.chat.events import AnswerCall, AnswerEnded, AnswerText
from kvchat.chat.tools import ToolCall
from kvchat.core.types import FinishReason
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError, ollama_form
from kvchat.server.bodies import Body
from kvchat.server.chat_requests import SCHEMA_PATH, answer_options, begin_chat
from kvchat.server.generation_fields import with_format
from kvchat.server.guard import client_of
from kvchat.server.ollama_fields import (
    chat_body,
    question_body,
    read_fields,
    served_name,
    text_body,
)
from kvchat.server.openai_api import with_suffix
from kvchat.server.service import Service, facts, moment, until_gone
from kvchat.server.streaming import EventStream, StreamWriter

# Clients ask for a version before they use what a later one brought: tools, thinking, schemas.
_VERSION = "0.12.0"
_LINES = "application/x-ndjson"
_NS = 1_000_000_000
_STAYS = timedelta(days=365)


class OllamaApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began_s = time.time()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION})

    async def tags(self, request: Request) -> Response:
        """List the model by every name that is whole."""
        models = [self._listed(name) for name in self._service.listed_names]
        return JSONResponse({"models": models})

    async def running(self, request: Request) -> Response:
        if self._service.host.ready is None:
            return JSONResponse({"models": []})
        listed = self._listed(self._service.name)
        until = moment(time.time() + _STAYS.total_seconds())
        limit = self._service.host.context_limit
        loaded = {"expires_at": until, "size_vram": 0, "context_length": limit}
        return JSONResponse({"models": [{**listed, **loaded}]})

    async def show(self, request: Request) -> Response:
        await read_fields(request, self._service)
        listed, chat_format = self._listed(self._service.name), self._service.host.model.format
        capabilities = ["completion"]
        capabilities += ["tools"] if chat_format.tools is not None else []
        capabilities += ["thinking"] if chat_format.switch.toggles else []
        limit = self._service.host.context_limit
        known = {"general.architecture": "kvchat", "kvchat.context_length": limit}
        return JSONResponse(
            {
                "modelfile": f"FROM {self._service.name}\n",
                "parameters": "",
                "template": "",
                "details": listed["details"],
                "model_info": known,
                "capabilities": capabilities,
                "modified_at": listed["modified_at"],
            }
        )

    async def chat(self, request: Request) -> Response:
        fields = await read_fields(request, self._service)
        if not fields.raw("messages"):
            return self._loaded(_Form(self._name(fields), is_chat=True))
        begun = await begin_chat(self._service, chat_body(fields), client_of(request))
        return await self._answer(
            request, fields, begun.answer, _Form(self._name(fields), is_chat=True)
        )

    async def generate(self, request: Request) -> Response:
        fields = await read_fields(request, self._service)
        form = _Form(self._name(fields), is_chat=False)
        if not fields.raw("prompt") and not fields.raw("suffix"):
            return self._loaded(form)
        if fields.flag("raw") or fields.text("suffix"):
            return await self._answer(request, fields, await self._continue(fields, request), form)
        begun = await begin_chat(self._service, question_body(fields), client_of(request))
        return await self._answer(request, fields, begun.answer, form)

    async def _continue(self, fields: Body, request: Request) -> Answer:
        """Begin to continue a prompt without the model's template."""
        body, service = text_body(fields), self._service
        prompts = with_suffix(body, [body.text("prompt") or ""], service.host.model.tokenizer)
        options = answer_options(service, body, ("max_tokens",))
        wanted = answer_format(body, "response_format", SCHEMA_PATH)
        options = await with_format(service, wanted, options)
        return await service.answering.complete(prompts[0], options)

    async def _answer(
        self, request: Request, fields: Body, answer: Answer, form: "_Form"
    ) -> Response:
        if fields.raw("stream") is not False:
            return EventStream(answer, _Lines(answer, form), media_type=_LINES)
        [ended] = await until_gone(request, whole_answers(answer, 1))
        whole = form.part(ended.text, ended.thinking, ended.calls)
        return JSONResponse({**whole, **_ending(ended, answer)})

    def _loaded(self, form: "_Form") -> Response:
        """Answer a request without a message, which asks to load the model."""
        return JSONResponse({**form.part(), "done": True, "done_reason": "load"})

    def _name(self, fields: Body) -> str:
        return fields.text("model") or fields.text("name") or self._service.name

    def _listed(self, name: str) -> dict[str, Any]:
        ready, path = self._service.host.ready, Path(self._service.files)
        num_bytes, changed_s = _size(path)
        identity = ready.identity if ready is not None else name
        kind = "gguf" if path.suffix == ".gguf" else "safetensors"
        return {
            "name": served_name(name),
            "model": served_name(name),
            "modified_at": moment(changed_s or self._began_s),
            "size": num_bytes,
            "digest": hashlib.sha256(identity.encode()).hexdigest(),
            "details": {
                "parent_model": "",
                "format": kind,
                "family": "kvchat",
                "families": ["kvchat"],
                "parameter_size": "",
                "quantization_level": ready.stored_as if ready is not None else "",
            },
        }


def _size(path: Path) -> tuple[int, float]:
    """Return the bytes of a model's files, and when they were changed last; zeros without files."""
    try:
        stats = [each.stat() for each in _files(path)]
    except OSError:
        return 0, 0.0
    return sum(s.st_size for s in stats), max((s.st_mtime for s in stats), default=0.0)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from path.glob("*.safetensors")
    else:
        yield path


# Answers


@dataclass(frozen=True, slots=True)
class _Form:
    """How a path writes the parts of an answer: /api/chat as messages, /api/generate as text."""

    model: str
    is_chat: bool

    def part(
        self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()
    ) -> dict[str, Any]:
        """Return a part as an object, without whether it is the last."""
        head = {"model": self.model, "created_at": moment(time.time())}
        thought = {"thinking": thinking} if thinking else {}
        if not self.is_chat:
            return {**head, "response": text, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            message["tool_calls"] = [{"function": function} for function in functions]
        return {**head, "message": message}


def _ending(ended: AnswerEnded, answer: Answer) -> dict[str, Any]:
    """Return what the last object says of an answer; durations are in nanoseconds."""
    timing, usage = ended.timing, ended.usage
    is_cut = ended.reason is FinishReason.LENGTH or not ended.is_whole
    return {
        "done": True,
        "done_reason": "length" if is_cut else "stop",
        "total_duration": round(timing.total_s * _NS),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(timing.prefill_s * _NS),
        "eval_count": usage.completion_tokens,
        "eval_duration": round(timing.decode_s * _NS),
        "kvchat": facts(ended, answer.asked),
    }


class _Lines(StreamWriter):
    """Writes an answer as lines of JSON, all of which are parts of the answer to these clients."""

    def __init__(self, answer: Answer, form: _Form) -> None:
        self._answer = answer
        self._form = form

    def text(self, event: AnswerText) -> str:
        part = self._form.part("", event.text) if event.is_thinking else self._form.part(event.text)
        return _line({**part, "done": False})

    def call(self, event: AnswerCall) -> str:
        return _line({**self._form.part(calls=[event.call]), "done": False})

    def ended(self, event: AnswerEnded) -> str:
        return _line({**self._form.part(), **_ending(event, self._answer)})

    def fail(self, error: ApiError) -> str:
        return _line(ollama_form(error))


def _line(part: dict[str, Any]) -> str:
    return f"{json.dumps(part, separators=(',', ':'))}\n"
