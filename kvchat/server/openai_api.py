"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions."""

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_format import answer_format
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import (
    AnswerCall,
    AnswerEnded,
    AnswerText,
    ContextScored,
    ReadingPrompt,
    ShownToken,
)
from kvchat.chat.fields import Fields
from kvchat.chat.text_codec import TextCodec
from kvchat.chat.tools import ToolCall
from kvchat.core.types import TokenLogprobs
from kvchat.server.answering import Answer, whole_answers
from kvchat.server.api_errors import ApiError, openai_form
from kvchat.server.bodies import read_request
from kvchat.server.chat_requests import SCHEMA_PATH, answer_options, begin_chat
from kvchat.server.foreign_fields import LeftOutNotes, own_fields
from kvchat.server.generation_fields import (
    foreign_format,
    prompt_logprobs,
    text_logprobs,
    with_format,
)
from kvchat.server.guard import client_of
from kvchat.server.logprob_forms import echoed, legacy, listed, of_prompt
from kvchat.server.offered_tools import OfferedTools, ToolKind, custom_input
from kvchat.server.service import Service, facts, finish_word, moment, until_gone
from kvchat.server.streaming import EventStream, Progress, StreamWriter, TextFrame, sse

Prompt = str | tuple[int, ...]

_MOST_PROMPTS = 128
# Of all prompts together: 128 answers to each of 128 prompts kept all others waiting.
_MOST_ANSWERS = 1024
_DONE = "data: [DONE]\n\n"
_PING = ": still at work\n\n"  # a comment: no client takes it for a part of the answer


class OpenAiApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began_s = int(time.time())
        # An id is no secret. Asking the system for each would let the engine's thread take the
        # interpreter, and all other answers would wait for it.
        self._ids = random.Random()
        self._left_out = LeftOutNotes()

    async def models(self, request: Request) -> Response:
        """List the model by its names, in OpenAI's form and Anthropic's: no field is in both."""
        names = self._service.listed_names
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        listed = [self._model(name) for name in names]
        return JSONResponse({"object": "list", "data": listed, **pages})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._service.require_model(Fields({"model": name}))
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": self._began_s, "owned_by": "kvchat"}
        model |= {"type": "model", "display_name": name, "created_at": moment(self._began_s)}
        model |= {"root": self._service.files, "tokenizer": self._service.tokenizer_digest}
        ready = self._service.host.ready
        return {**model, "context_length": ready.context_limit} if ready is not None else model

    async def chat(self, request: Request) -> Response:
        fields = own_fields(await read_request(request), "chat")
        self._service.require_model(fields)
        begun = await begin_chat(self._service, fields, client_of(request))
        answer, options, offered = begun.answer, begun.options, begun.offered
        head = self._head("chatcmpl", "chat.completion")
        if fields.flag("stream"):
            includes_usage = _includes_usage(fields)
            chunks = _ChatChunks(answer, head, includes_usage, options.num_samples, offered)
            streamed = EventStream(answer, chunks, _progress_of(chunks, fields))
            return self._left_out.tell(streamed, offered.left_out)
        answers = await until_gone(request, whole_answers(answer, options.num_samples))
        choices = [_chat_choice(ended, begun.tells_logprobs, offered) for ended in answers]
        usage = usage_of(answers, answer)
        whole = {**head.as_dict(), "choices": choices, "usage": usage}
        if not options.scores_prompt:
            return self._left_out.tell(JSONResponse(whole), offered.left_out)
        codec = self._service.host.model.tokenizer
        response = await asyncio.to_thread(
            lambda: JSONResponse({**whole, "prompt_logprobs": of_prompt(answers[0], codec)})
        )
        return self._left_out.tell(response, offered.left_out)

    async def completions(self, request: Request) -> Response:
        fields = own_fields(await read_request(request), "completions")
        self._service.require_model(fields)
        codec = self._service.host.model.tokenizer
        prompts = with_suffix(fields, await fields.read(_prompts), codec)
        options = answer_options(self._service, fields, ("max_tokens",))
        if len(prompts) * options.num_samples > _MOST_ANSWERS:
            raise fields.fault("n", f"times the prompts must be at most {_MOST_ANSWERS:,} answers")
        tells_ids, echoes = fields.flag("return_token_ids"), fields.flag("echo")
        num_top = text_logprobs(fields)
        num_of_prompt = prompt_logprobs(fields, num_top)
        options = replace(
            options,
            client=client_of(request),
            num_top_logprobs=num_top if num_top is not None else num_of_prompt,
            scores_prompt=num_of_prompt is not None or (echoes and num_top is not None),
            tells_ids=tells_ids,
            is_one_shot=not tells_ids,  # a program that keeps the ids continues them
        )
        wanted = answer_format(fields, "response_format", SCHEMA_PATH) or foreign_format(fields)
        options = await with_format(self._service, wanted, options)
        head = self._head("cmpl", "text_completion")
        form = _TextForm(codec, echoes, num_top is not None, num_of_prompt is not None)
        if fields.flag("stream"):
            if len(prompts) > 1:
                raise fields.fault("prompt", "must be one prompt in a stream")
            answer = await self._service.answering.complete(prompts[0], options)
            includes_usage, num_samples = _includes_usage(fields), options.num_samples
            texts = _TextChunks(answer, head, includes_usage, num_samples, prompts[0], form)
            scored = texts.scored if options.scores_prompt else None
            return EventStream(answer, texts, _progress_of(texts, fields), scored)
        answered = await until_gone(request, self._complete_all(prompts, options))

        def response() -> Response:
            choices = [
                {"index": place * options.num_samples + ended.sample, **form.choice(prompt, ended)}
                for place, (prompt, answers) in enumerate(zip(prompts, answered, strict=True))
                for ended in answers
            ]
            usage = _usage_of_all(answered)
            return JSONResponse({**head.as_dict(), "choices": choices, "usage": usage})

        # 20 logprobs for each of 4,000 tokens take half a second, in which other streams go on.
        return await asyncio.to_thread(response) if options.scores_prompt else response()

    async def _complete_all(
        self, prompts: Sequence[Prompt], options: AskOptions
    ) -> list[list[AnswerEnded]]:
        """Return the answers to all prompts; if one fails, the others are cancelled."""
        asking = [asyncio.ensure_future(self._complete(prompt, options)) for prompt in prompts]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _complete(self, prompt: Prompt, options: AskOptions) -> list[AnswerEnded]:
        answer = await self._service.answering.complete(prompt, options)
        return await whole_answers(answer, options.num_samples)

    def _head(self, prefix: str, kind: str) -> "_Head":
        return _Head(prefix, kind, self._service.name, f"{self._ids.getrandbits(96):024x}")


def usage_of(answers: list[AnswerEnded], answer: Answer | None) -> dict[str, Any]:
    """Return the usage object of a response with these samples of an answer."""
    usage = answers[0].usage
    prompt = usage.prompt_tokens
    generated = sum(ended.usage.completion_tokens for ended in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached.total},
        "completion_tokens_details": {
            "reasoning_tokens": sum(ended.num_thinking_tokens for ended in answers)
        },
        "kvchat": facts(answers[0], answer.asked if answer is not None else None),
    }


def _usage_of_all(answered: Sequence[list[AnswerEnded]]) -> dict[str, Any]:
    """Return the usage object of a response to several prompts; only one prompt has its facts."""
    each = [usage_of(answers, None) for answers in answered]
    if len(each) == 1:
        return each[0]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in each)
    return {
        **{name: sum(usage[name] for usage in each) for name in counts},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


# Requests


def _prompts(fields: Fields) -> list[Prompt]:
    """Return the prompts of a plain completion: a text, a list of ids, or a list of either."""
    given = fields.raw("prompt")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > _MOST_PROMPTS:
            raise fields.fault("prompt", f"must be at most {_MOST_PROMPTS} prompts")
        return [_prompt(fields, prompt) for prompt in given]
    return [_prompt(fields, given)]


def _prompt(fields: Fields, prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    ids: list[Any] = prompt if isinstance(prompt, list) else [None]
    if all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        return tuple(ids)
    raise fields.fault("prompt", "must be a text or a list of token ids, or a list of these")


def _text_of(prompt: Prompt, codec: TextCodec) -> str:
    """Return what a prompt says, control tokens included."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(codec.token_bytes, prompt)).decode(errors="replace")


def _progress_of(chunks: "_Chunks", fields: Fields) -> Progress | None:
    return chunks.progress if fields.flag("return_progress") else None


def _includes_usage(fields: Fields) -> bool:
    return fields.nested("stream_options").flag("include_usage")


# Responses


@dataclass(frozen=True, slots=True)
class _Head:
    """The fields that every object of one response has."""

    prefix: str
    kind: str
    model: str
    token: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def as_dict(self, kind: str | None = None) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.token}",
            "object": kind or self.kind,
            "created": self.created_s,
            "model": self.model,
        }


def _chat_choice(ended: AnswerEnded, has_logprobs: bool, offered: OfferedTools) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ended.text, "refusal": None}
    if ended.thinking:
        message["reasoning_content"] = ended.thinking
    if ended.calls:
        message["content"] = ended.text or None
        message["tool_calls"] = [_call(call, offered) for call in ended.calls]
    return {
        "index": ended.sample,
        "message": message,
        "logprobs": _chat_logprobs(ended.logprobs) if has_logprobs else None,
        "finish_reason": finish_word(ended),
    }


def _chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    return {"content": listed(tokens), "refusal": None}


def _call(call: ToolCall, offered: OfferedTools) -> dict[str, Any]:
    """Return a call in the form of its tool."""
    call_id, tool = f"call_{secrets.token_hex(12)}", offered.client_tool(call.name)
    if tool.kind is ToolKind.CUSTOM:
        custom = {"name": tool.name, "input": custom_input(call)}
        return {"id": call_id, "type": "custom", "custom": custom}
    function = {"name": tool.name, "arguments": call.arguments_text}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class _TextForm:
    """What the choices of a plain completion tell.

    echoes           whether they repeat the prompt
    has_logprobs     whether they have the logprobs of all tokens that they tell
    tells_of_prompt  whether they have vLLM's list for the prompt
    """

    codec: TextCodec
    echoes: bool
    has_logprobs: bool
    tells_of_prompt: bool

    def choice(self, prompt: Prompt, ended: AnswerEnded) -> dict[str, Any]:
        """Return one choice but for its index."""
        told = {"prompt_logprobs": of_prompt(ended, self.codec)} if self.tells_of_prompt else {}
        return {
            "text": self.echo(prompt) + ended.thinking + ended.text,
            **({"token_ids": list(ended.token_ids)} if ended.token_ids else {}),
            "logprobs": self._logprobs(prompt, ended) if self.has_logprobs else None,
            **told,
            "finish_reason": finish_word(ended),
        }

    def _logprobs(self, prompt: Prompt, ended: AnswerEnded) -> dict[str, Any]:
        if not self.echoes:
            return legacy((*ended.thinking_logprobs, *ended.logprobs), 0)
        return self.columns(prompt, ended.scored_context[0], ended.scored)

    def echo(self, prompt: Prompt) -> str:
        """Return what is repeated of the prompt."""
        return _text_of(prompt, self.codec) if self.echoes else ""

    def columns(
        self, prompt: Prompt, first: int, scored: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Return the logprobs of a prompt that is repeated; `scored` are those after its `first`
        token, and may go on behind the prompt.
        """
        is_written = isinstance(prompt, str) and prompt.startswith(_text_of((first,), self.codec))
        is_added = isinstance(prompt, str) and self.codec.is_hidden(first) and not is_written
        return echoed(first, scored, self.codec, is_added)


@dataclass(eq=False)
class _Chunks(StreamWriter):
    """Writes the chunks that chat and plain completions have in common."""

    kind: ClassVar[str | None] = None

    answer: Answer
    head: _Head
    includes_usage: bool
    num_samples: int
    answers: list[AnswerEnded] = field(default_factory=list, init=False)
    frames: dict[tuple[int, str], TextFrame] = field(default_factory=dict, init=False)

    def _framed(self, sample: int, name: str, text: str, write: Callable[[str], str]) -> str:
        """Return what `write` does of a text, the same for all texts of a sample under a name."""
        frame = self.frames.get((sample, name))
        if frame is None:
            frame = self.frames[sample, name] = TextFrame(write)
        return frame.around(text)

    def progress(self, event: ReadingPrompt) -> str:
        """Return a chunk on the prompt, in the form of llama.cpp's server."""
        told = {"total": event.total, "cache": event.cached.total, "processed": event.done}
        return self._chunk([], prompt_progress=told)

    def call(self, event: AnswerCall) -> str:
        raise AssertionError("only a chat has tools")

    def ping(self) -> str:
        return _PING

    def _chunk(self, choices: list[dict[str, Any]], **others: Any) -> str:
        extra = {"usage": None} if self.includes_usage else {}
        return sse({**self.head.as_dict(self.kind), "choices": choices, **extra, **others})

    def finish(self) -> str:
        usage = (
            self._chunk([], usage=usage_of(self.answers, self.answer))
            if self.includes_usage
            else ""
        )
        return usage + _DONE

    def fail(self, error: ApiError) -> str:
        return sse(openai_form(error)) + _DONE


@dataclass(eq=False)
class _ChatChunks(_Chunks):
    kind: ClassVar[str | None] = "chat.completion.chunk"

    offered: OfferedTools
    num_calls: Counter[int] = field(default_factory=Counter, init=False)

    def begin(self) -> str:
        role = {"role": "assistant", "content": ""}
        return "".join(self._delta(sample, role) for sample in range(self.num_samples))

    def text(self, event: AnswerText) -> str:
        name = "reasoning_content" if event.is_thinking else "content"
        told = () if event.is_thinking else event.logprobs
        if told:
            return self._delta(event.sample, {name: event.text}, logprobs=told)
        write = partial(self._plain, event.sample, name)
        return self._framed(event.sample, name, event.text, write)

    def _plain(self, sample: int, name: str, text: str) -> str:
        return self._delta(sample, {name: text})

    def call(self, event: AnswerCall) -> str:
        index = self.num_calls[event.sample]
        self.num_calls[event.sample] += 1
        call = {"index": index, **_call(event.call, self.offered)}
        return self._delta(event.sample, {"tool_calls": [call]})

    def ended(self, event: AnswerEnded) -> str:
        self.answers.append(event)
        return self._delta(event.sample, {}, finish_word(event))

    def _delta(
        self,
        sample: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: Sequence[ShownToken] = (),
    ) -> str:
        told = _chat_logprobs(logprobs) if logprobs else None
        choice = {"index": sample, "delta": delta, "logprobs": told, "finish_reason": finish}
        return self._chunk([choice])


@dataclass(eq=False)
class _TextChunks(_Chunks):
    prompt: Prompt
    form: _TextForm

    def __post_init__(self) -> None:
        self._echo = self.form.echo(self.prompt)
        self._lengths = Counter(dict.fromkeys(range(self.num_samples), len(self._echo)))

    def begin(self) -> str:
        return "" if self.form.has_logprobs else self._prompt_said(None)

    def scored(self, event: ContextScored) -> str:
        """Return the prompt that is repeated, with the logprobs of its tokens, as vLLM does."""
        columns = self.form.columns(self.prompt, event.context[0], event.logprobs)
        return self._prompt_said(columns)

    def _prompt_said(self, logprobs: dict[str, Any] | None) -> str:
        if not self._echo:
            return ""
        pieces = (self._piece(n, self._echo, None, logprobs) for n in range(self.num_samples))
        return "".join(pieces)

    def text(self, event: AnswerText) -> str:
        start = self._lengths[event.sample]
        self._lengths[event.sample] += len(event.text)
        if not event.logprobs and not event.token_ids:
            write = partial(self._piece, event.sample)
            return self._framed(event.sample, "text", event.text, write)
        told = legacy(event.logprobs, start) if event.logprobs else None
        return self._piece(event.sample, event.text, None, told, event.token_ids)

    def ended(self, event: AnswerEnded) -> str:
        self.answers.append(event)
        return self._piece(event.sample, "", finish_word(event))

    def _piece(
        self,
        sample: int,
        text: str,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
        token_ids: tuple[int, ...] = (),
    ) -> str:
        choice = {"index": sample, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if token_ids:
            choice["token_ids"] = list(token_ids)
        return self._chunk([choice])


# What stands before the prompt, before the suffix, and before the answer.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)


def with_suffix(
    fields: Fields, prompts: list[str | tuple[int, ...]], codec: TextCodec
) -> list[str | tuple[int, ...]]:
    """Return the prompts of a completion with its `suffix`.

    Raises ApiError for a model that has no tokens for it, and for prompts of ids.
    """
    suffix = fields.text("suffix")
    if not suffix:
        return prompts
    form = next((f for f in _FORMS if None not in map(codec.token_id, f)), None)
    if form is None:
        raise fields.fault("suffix", "needs a model with tokens for infilling")
    if fields.flag("echo") or not all(isinstance(prompt, str) for prompt in prompts):
        raise fields.fault("suffix", "goes with a prompt of text, and without echo")
    before, between, after = form
    return [f"{before}{prompt}{between}{suffix}{after}" for prompt in prompts]
