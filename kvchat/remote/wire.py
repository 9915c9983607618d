"""What each kind of server is sent for one answer, and how the pieces that it streams are read.

`request` and `read` are pure functions of JSON: the connection is `client.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvchat.core.errors import GenerationError
from kvchat.core.text import one_line
from kvchat.core.types import CachedTokens, FinishReason, MissReason, SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.message_ids import Mark, Messages

_MOST_ERROR_CHARS = 300
_MOST_TOKENS = 1 << 40  # of one request; a server that tells more is wrong
_GIVEN_UP = frozenset({"abort", "error"})  # vLLM's and SGLang's reasons beside OpenAI's
_EFFORTS = {Mark.THINK_LOW: "low", Mark.THINK_MEDIUM: "medium", Mark.THINK_HIGH: "high"}
# Kinds that pass variables on to the model's chat template.
_TEMPLATE_KINDS = frozenset(
    {Kind.LLAMA_CPP, Kind.VLLM, Kind.SGLANG, Kind.TENSORRT_LLM, Kind.TRANSFORMERS}
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one request as the server counts them; `cached` is None if it does not say.

    `miss_reason` is what a kvchat server tells; of others, as of an older one, no more is known
    than that they had no more cached. vLLM on a CPU, for one, keeps whole blocks of 128 tokens.
    """

    prompt: int = 0
    cached: CachedTokens | None = None
    generated: int = 0
    miss_reason: MissReason | None = MissReason.NOT_KEPT


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call; the parts of one `index` are joined."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of an answer. Whatever the server did not send has its default.

    token_ids   the tokens that were generated, from a server that takes ids
    text        a part of the answer, from a server that takes messages
    thinking    a part of the thinking before it
    progress    tokens of the prompt that were cached, those read so far (cached ones included), and
                their number
    num_so_far  tokens generated so far, those included that `token_ids` lack: llama.cpp's server
                leaves out tokens that end within a character. Then `text` has the whole character
    slot        the slot of llama.cpp's server that has the conversation
    """

    token_ids: tuple[int, ...] = ()
    num_so_far: int = 0
    slot: int | None = None
    text: str = ""
    thinking: str = ""
    calls: tuple[CallPiece, ...] = ()
    progress: tuple[int, int, int] | None = None
    counts: Counts | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A request: a path below the server's address, and a body of JSON; without a body a GET."""

    path: str
    body: dict[str, Any] | None = None


# Requests


def request(
    server: Server, spec: RequestSpec, sample: int, takes_ids: bool, slot: int | None = None
) -> Sent:
    """Return the request for one sample of an answer; `slot` is one of llama.cpp's server."""
    if not takes_ids:
        return Sent("/v1/chat/completions", _messages(server, spec, sample))
    limit = spec.max_tokens
    if limit is None and server.knows_context:
        limit = max(1, server.max_context - len(spec.prompt_ids))
    if server.kind is Kind.LLAMA_CPP:
        return Sent("/completion", _llama(spec, sample, limit, slot))
    if server.kind is Kind.SGLANG:
        return Sent("/generate", _sglang(spec, sample, limit) | _session(server, spec))
    body = {
        **_model(server),
        "prompt": list(spec.prompt_ids),
        "return_token_ids": True,
        **({"return_progress": True} if server.kind is Kind.KVCHAT else {}),
        "stop_token_ids": sorted(spec.stop_token_ids),
        **_streamed(),
        **_sampling(server.kind, spec.sampling, sample),
        **_session(server, spec),
        **_format(spec),
    }
    return Sent("/v1/completions", body | ({"max_tokens": limit} if limit is not None else {}))


def _model(server: Server) -> dict[str, Any]:
    return {"model": server.model} if server.model else {}


def _session(server: Server, spec: RequestSpec) -> dict[str, Any]:
    """Return what lets a router send a conversation to the worker that has its KV.

    The conversation's own name stays here. An incognito conversation has none.
    """
    if server.kind not in (Kind.VLLM, Kind.SGLANG) or not spec.session_id:
        return {}
    return {"session_id": hashlib.sha256(f"kvchat {spec.session_id}".encode()).hexdigest()[:32]}


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _messages(server: Server, spec: RequestSpec, sample: int) -> dict[str, Any]:
    context = Messages(spec.prompt_ids)
    body = {
        **_model(server),
        "messages": context.messages,
        **_streamed(),
        **_sampling(server.kind, spec.sampling, sample),
        **_thinking(server.kind, context.think),
        **_session(server, spec),
        **_format(spec),
    }
    if context.tools:
        body["tools"] = context.tools
    if spec.max_tokens is not None:
        body["max_tokens"] = spec.max_tokens
    if server.kind in (Kind.LLAMA_CPP, Kind.KVCHAT):
        body["return_progress"] = True
    if server.kind is Kind.VLLM and context.is_continued:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _format(spec: RequestSpec) -> dict[str, Any]:
    """Return the field that limits an answer to a schema, as OpenAI has it."""
    if spec.answer_schema is None:
        return {}
    schema = {"name": "answer", "schema": dict(spec.answer_schema)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinking(kind: Kind, think: Mark | None) -> dict[str, Any]:
    """Return the fields that say how much to think; no two kinds of servers agree."""
    if think is None:
        return {}
    effort = _EFFORTS.get(think)
    if kind in _TEMPLATE_KINDS:
        variables: dict[str, Any] = {"enable_thinking": think is not Mark.THINK_OFF}
        if effort is not None:
            variables["reasoning_effort"] = effort
        return {"chat_template_kwargs": variables}
    return {"reasoning_effort": effort or ("none" if think is Mark.THINK_OFF else "medium")}


def _sampling(kind: Kind, sampling: SamplingParams, sample: int) -> dict[str, Any]:
    """Return the sampling fields that a kind has; OpenAI's own service refuses others."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": _seed(sampling, sample),
    }
    if kind is Kind.TGI and sampling.top_p >= 1.0:  # it refuses one that leaves out nothing
        del fields["top_p"]
    if kind in (Kind.OTHER, Kind.OLLAMA, Kind.TRANSFORMERS, Kind.TGI):
        return fields
    fields |= {"min_p": sampling.min_p, "top_k": sampling.top_k}
    if kind in (Kind.VLLM, Kind.SGLANG):
        fields["top_k"] = sampling.top_k or -1
    name = "repeat_penalty" if kind is Kind.LLAMA_CPP else "repetition_penalty"
    return {**fields, name: sampling.repetition_penalty}


def _seed(sampling: SamplingParams, sample: int) -> int:
    """Return a seed of 31 bits, the most that all servers take; samples have different ones."""
    return (sampling.seed + sample) % (1 << 31)


def _llama(spec: RequestSpec, sample: int, limit: int | None, slot: int | None) -> dict[str, Any]:
    return {
        **({"id_slot": slot} if slot is not None else {}),
        "prompt": list(spec.prompt_ids),
        "n_predict": limit if limit is not None else -1,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        **({"json_schema": dict(spec.answer_schema)} if spec.answer_schema is not None else {}),
        **_sampling(Kind.LLAMA_CPP, spec.sampling, sample),
    }


def _sglang(spec: RequestSpec, sample: int, limit: int | None) -> dict[str, Any]:
    fields = _sampling(Kind.SGLANG, spec.sampling, sample)
    fields["sampling_seed"] = fields.pop("seed")
    fields["stop_token_ids"] = sorted(spec.stop_token_ids)
    if limit is not None:
        fields["max_new_tokens"] = limit
    if spec.answer_schema is not None:
        fields["json_schema"] = json.dumps(spec.answer_schema)
    return {"input_ids": list(spec.prompt_ids), "sampling_params": fields, "stream": True}


# What the server streams


class Reader:
    """Reads what one request's server streams. Raises GenerationError for an error object."""

    def __init__(self, kind: Kind, takes_ids: bool) -> None:
        self._kind = kind
        self._takes_ids = takes_ids
        self._num_read = 0
        self._has_text = False

    def read(self, document: Mapping[str, Any]) -> Piece:
        """Return what one JSON object of the stream says."""
        if "error" in document:
            raise GenerationError(error_sentence(document))
        try:
            if self._takes_ids and self._kind is Kind.LLAMA_CPP:
                return _llama_piece(document)
            if self._takes_ids and self._kind is Kind.SGLANG:
                return self._sglang_piece(document)
            piece = _openai_piece(document, self._takes_ids)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise GenerationError(
                f"The server's answer has an unknown form ({type(error).__name__})."
            ) from error
        if self._takes_ids:
            self._require_ids(document, piece)
        return piece

    def _require_ids(self, document: Mapping[str, Any], piece: Piece) -> None:
        """Raise GenerationError at the end of an answer that came as text alone."""
        self._num_read += len(piece.token_ids)
        self._has_text |= any(choice.get("text") for choice in document.get("choices") or ())
        if piece.finish is not None and self._has_text and not self._num_read:
            raise GenerationError("The server sends no token ids, although it was asked for them.")

    def _sglang_piece(self, document: Mapping[str, Any]) -> Piece:
        about = document["meta_info"]
        ids = _ids(document.get("output_ids"))
        # The ids of all tokens so far, or of the new ones alone: it depends on the server's flags.
        if len(ids) == about.get("completion_tokens"):
            ids = ids[self._num_read :]
        self._num_read += len(ids)
        prompt, generated = about.get("prompt_tokens"), about.get("completion_tokens")
        counts = Counts(_number(prompt), _sglang_cached(about), _number(generated))
        finish = about.get("finish_reason")
        if isinstance(finish, Mapping):
            return Piece(ids, counts=counts, finish=_finish(finish.get("type"), finish))
        return Piece(ids, counts=counts, finish=_finish(finish))


def tells_its_end(document: Mapping[str, Any]) -> bool:
    """Whether a kvchat serve says that it had to end before the answer did."""
    error = document.get("error")
    return isinstance(error, Mapping) and error.get("code") == "stopped"


def error_sentence(document: Mapping[str, Any]) -> str:
    """Return a sentence on a server's error object, in OpenAI's form, FastAPI's or another."""
    words: Any = document
    for name in ("error", "detail", "message"):
        words = words.get(name, words) if isinstance(words, Mapping) else words
    text = words if isinstance(words, str) else json.dumps(words)
    return f"The server says: {one_line(text, _MOST_ERROR_CHARS).rstrip('.')}."


def _finish(word: object, about: Mapping[str, Any] = MappingProxyType({})) -> FinishReason | None:
    """Return why an answer ended; raises GenerationError if the server gave it up."""
    if word is None:
        return None
    if isinstance(word, str) and word in _GIVEN_UP:
        said = error_sentence(about) if about.get("message") else "The server gave up the answer."
        raise GenerationError(said, "/continue goes on from there.")
    return FinishReason.LENGTH if word in ("length", "limit") else FinishReason.STOP


def _ids(value: object) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list) else ()
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("not token ids")
    return ids


def _openai_piece(document: Mapping[str, Any], takes_ids: bool) -> Piece:
    counts = _openai_counts(document)
    progress = _progress(document)
    choices = document.get("choices") or ()
    if not choices:
        return Piece(counts=counts, progress=progress)
    choice = choices[0]
    finish = _finish(choice.get("finish_reason"))
    if takes_ids:
        return Piece(token_ids=_ids(choice.get("token_ids")), counts=counts, finish=finish)
    delta = choice.get("delta") or choice.get("message") or {}  # a message if it is not streamed
    thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = tuple(_call(number, call) for number, call in enumerate(delta.get("tool_calls") or ()))
    return Piece(
        text=_text(delta.get("content") or delta.get("refusal")),
        thinking=_text(thinking),
        calls=calls,
        progress=progress,
        counts=counts,
        finish=finish,
    )


def _call(number: int, call: Mapping[str, Any]) -> CallPiece:
    function = call.get("function") or {}
    arguments = function.get("arguments") or ""
    text = _text(arguments) if isinstance(arguments, str) else json.dumps(arguments)
    index = call.get("index")
    return CallPiece(int(index) if index is not None else number, _text(function.get("name")), text)


def _text(value: object) -> str:
    """Return text that can be encoded again: JSON may name halves of characters."""
    text = str(value or "")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(value: Any) -> int:
    """Return a number of tokens; 0 if it is not told."""
    return min(max(0, int(value or 0)), _MOST_TOKENS)


def _openai_counts(document: Mapping[str, Any]) -> Counts | None:
    usage, timings = document.get("usage"), document.get("timings")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if cached is None and isinstance(timings, Mapping):
        cached = timings.get("cache_n")
    return Counts(
        _number(usage.get("prompt_tokens")),
        _tiers(usage) or _cached(cached),
        _number(usage.get("completion_tokens")),
        _miss_reason(usage.get("kvchat") or {}),
    )


def _miss_reason(told: Mapping[str, Any]) -> MissReason | None:
    """Return why a kvchat server had no more cached; NOT_KEPT for what it does not tell."""
    name = told.get("miss_reason", MissReason.NOT_KEPT.name)
    if name is None:
        return None
    return MissReason.__members__.get(str(name).upper(), MissReason.NOT_KEPT)


def _tiers(usage: Mapping[str, Any]) -> CachedTokens | None:
    """Return the cached tokens by tier, as a kvchat server tells them."""
    told = (usage.get("kvchat") or {}).get("cached_tokens")
    if told is None:
        return None
    return CachedTokens.of({name: _number(n) for name, n in told.items() if name != "total"})


def _sglang_cached(about: Mapping[str, Any]) -> CachedTokens | None:
    """Return the cached tokens of SGLang, by tier where it tells them."""
    told = about.get("cached_tokens_details")
    if not told:
        return _cached(about.get("cached_tokens"))
    device, host, disk = (_number(told.get(place)) for place in ("device", "host", "storage"))
    return CachedTokens(device, host, disk)


def _cached(count: object) -> CachedTokens | None:
    """Return cached tokens of a server that does not tell where they were."""
    return CachedTokens(device=_number(count)) if type(count) is int else None


def _progress(document: Mapping[str, Any]) -> tuple[int, int, int] | None:
    told = document.get("prompt_progress")
    if not told:
        return None
    total = max(1, _number(told["total"]))
    return min(_number(told["cache"]), total), min(_number(told["processed"]), total), total


def _llama_piece(document: Mapping[str, Any]) -> Piece:
    if (progress := _progress(document)) is not None:
        return Piece(progress=progress)  # its token is none
    ids = _ids(document.get("tokens"))
    if not document.get("stop"):
        text, so_far = _text(document.get("content")), _number(document.get("tokens_predicted"))
        return Piece(token_ids=ids, text=text, num_so_far=so_far)
    timings = document.get("timings") or {}
    cached, read = timings.get("cache_n"), _number(timings.get("prompt_n"))
    prompt = _number(document.get("tokens_evaluated"))
    if cached is None and prompt:
        cached = max(0, prompt - read)
    generated = _number(timings.get("predicted_n", document.get("tokens_predicted")))
    finish = _finish(document.get("stop_type", "eos"))
    counts, slot = Counts(prompt, _cached(cached), generated), document.get("id_slot")
    return Piece(ids, slot=slot, counts=counts, finish=finish)
