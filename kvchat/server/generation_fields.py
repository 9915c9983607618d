"""Reads the fields of OpenAI's interfaces on tokens: penalties, biases, ends and logprobs."""

import sys
from dataclasses import replace

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.fields import Fields
from kvchat.chat.resent_chat import ResentChat
from kvchat.core.parameters import PENALTIES
from kvchat.server.api_errors import ApiError
from kvchat.server.service import Service

_MOST_BIAS = 100.0
_MOST_BIASED = 4096
_MOST_TOP_LOGPROBS = 20
_INCLUDED_LOGPROBS = "message.output_text.logprobs"


def with_penalties(fields: Fields, options: AskOptions, vocab_size: int | None) -> AskOptions:
    """Return `options` with the penalties and the logit bias of a request.

    vocab_size   every token id is below it; None if that is not known
    """
    values = {p.name: value for p in PENALTIES if (value := fields.value_of(p)) is not None}
    if "logit_bias" in fields:
        values["logit_bias"] = _logit_bias(_biases(fields), vocab_size)
    return replace(options, sampling=replace(options.sampling, **values)) if values else options


def _biases(fields: Fields) -> Fields:
    """Return the biases by token id; llama.cpp has a list of pairs too, in which false forbids."""
    given = fields.raw("logit_bias")
    if not isinstance(given, list):
        return fields.nested("logit_bias")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        raise fields.fault("logit_bias", "must be an object, or a list of pairs")
    biases = {str(token): -_MOST_BIAS if bias is False else bias for token, bias in given}
    return Fields(biases, fields.name_of("logit_bias"))


def _logit_bias(fields: Fields, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """Return token ids and what is added to their logits, in the order of the ids."""
    if len(fields.values) > _MOST_BIASED:
        raise fields.fault("", f"must name at most {_MOST_BIASED} tokens")
    bias: dict[int, float] = {}
    for name in fields.values:
        token_id = int(name) if name.isascii() and name.isdigit() and len(name) < 20 else None
        if token_id is None or (vocab_size is not None and token_id >= vocab_size):
            raise fields.fault(name, "must be the id of a token of the model")
        value = fields.number(name)
        if value is None or abs(value) > _MOST_BIAS:
            raise fields.fault(name, f"must be {-_MOST_BIAS:g} to {_MOST_BIAS:g}")
        bias[token_id] = float(value)
    return tuple(sorted((token_id, value) for token_id, value in bias.items() if value))


def with_endings(fields: Fields, options: AskOptions, vocab_size: int | None) -> AskOptions:
    """Return `options` with vLLM's fields on what ends an answer.

    vocab_size   every token id is below it; None if that is not known
    """
    ids = fields.raw("stop_token_ids") or ()
    is_list = isinstance(ids, list | tuple) and len(ids) <= _MOST_BIASED
    if not is_list or not all(type(i) is int and 0 <= i < (vocab_size or 1 << 31) for i in ids):
        raise fields.fault("stop_token_ids", "must be ids of tokens of the model")
    least = fields.whole("min_tokens", 0) or 0
    if fields.flag("ignore_eos"):
        least = sys.maxsize
    if least and vocab_size is None:
        raise fields.fault("min_tokens", "needs a model whose number of tokens is known")
    return replace(options, stop_token_ids=frozenset(ids), min_tokens=least)


# Logprobs


def chat_logprobs(fields: Fields) -> int | None:
    """Return how many logprobs a chat completion tells beside each token's; None for none."""
    num_top = fields.whole("top_logprobs", 0, _MOST_TOP_LOGPROBS)
    if not isinstance(fields.raw("logprobs"), bool | None):  # as plain completions have it
        return fields.whole("logprobs", 0, _MOST_TOP_LOGPROBS) if num_top is None else num_top
    if fields.flag("logprobs"):
        return num_top or 0
    if num_top:
        raise fields.fault("top_logprobs", "needs logprobs to be true")
    return None


def text_logprobs(fields: Fields) -> int | None:
    """Return the same for a plain completion, where `logprobs` is the number; false is none."""
    if fields.raw("logprobs") is False:
        return None
    return fields.whole("logprobs", 0, _MOST_TOP_LOGPROBS)


def prompt_logprobs(fields: Fields, num_top: int | None) -> int | None:
    """Return how many logprobs vLLM's field asks for beside each of a prompt's; None for none.

    num_top   how many are told beside the answer's, of which there can be no other number

    Raises ApiError for a stream, as vLLM does.
    """
    num_of_prompt = fields.whole("prompt_logprobs", 0, _MOST_TOP_LOGPROBS)
    if num_of_prompt is None:
        return None
    if fields.flag("stream"):
        raise fields.fault("prompt_logprobs", "is not told in a stream; leave out stream")
    if num_top is not None and num_top != num_of_prompt:
        raise fields.fault("prompt_logprobs", "must be the number of the answer's logprobs")
    return num_of_prompt


def response_logprobs(fields: Fields) -> int | None:
    """Return the same for a response, which includes them by name."""
    num_top = fields.whole("top_logprobs", 0, _MOST_TOP_LOGPROBS)
    included = fields.raw("include")
    if included is not None and not isinstance(included, list):
        raise fields.fault("include", "must be a list")
    if num_top or _INCLUDED_LOGPROBS in (included or ()):
        return num_top or 0
    return None


def require_tellable(service: Service, chat: ResentChat, options: AskOptions) -> None:
    """Raise ApiError for logprobs of an answer whose calls are channels: they are not text."""
    form = service.host.model.format.tools
    may_call = chat.tools is not None and options.max_calls != 0
    if options.num_top_logprobs is not None and may_call and form and form.calls.is_channel:
        sentence = "Logprobs and tools do not go together in this model; set tool_choice to none."
        raise ApiError(400, sentence, "tools", "unsupported_parameter")
