"""Reads how a request wants its answer: sampling, format, thinking, penalties, ends, logprobs."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvchat.chat.answer_format import ANY_OBJECT, AnswerFormat
from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.chat.fields import Fields
from kvchat.chat.grammar import Grammar
from kvchat.chat.resent_chat import ResentChat
from kvchat.chat.thinking import Think, ThinkSwitch
from kvchat.core.errors import UsageError
from kvchat.core.parameters import OF_ANSWERS, PENALTIES, Kind
from kvchat.server.api_errors import ApiError
from kvchat.server.service import Service

_MOST_STOPS = 64
_NO_LIMIT = -1
# How clients say that a filter is off, that one token is left or that the seed is random, and what
# says so here.
_OTHER_WORDS: Mapping[tuple[str, float], float | None] = {
    ("top_k", -1): 0,
    ("top_p", 0): 1e-9,
    ("seed", -1): None,
}
# Each interface has names of its own for the others.
_OTHER_NAMES = ("max_tokens", "stop", "think", "format")
_COMMON = tuple(p for p in OF_ANSWERS if p.name not in _OTHER_NAMES)
_MOST_SAMPLES = 128
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def sampling_options(fields: Fields, base: AskOptions) -> AskOptions:
    """Return `base` with the fields of a request that all interfaces have in common.

    Without a limit of tokens an answer ends that only repeats itself: nothing else would end it.
    """
    is_bounded = any(fields.raw(name) not in (None, _NO_LIMIT) for name in _TOKEN_LIMITS)
    values: dict[str, Any] = {"repetition_limit": 0} if is_bounded else {}
    for parameter in _COMMON:
        value = fields.raw(parameter.name)
        if isinstance(value, int | float) and (parameter.name, value) in _OTHER_WORDS:
            values[parameter.name] = _OTHER_WORDS[parameter.name, value]
        elif value is not None:
            values[parameter.name] = fields.value_of(parameter)
    return with_values(base, values)


def stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the stop strings of a field, which is a text or a list of texts."""
    value = fields.raw(name)
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fields.fault(name, f"must be {Kind.TEXTS.value}")
    if len(texts) > _MOST_STOPS:
        raise fields.fault(name, f"must be at most {_MOST_STOPS} texts")
    return tuple(text for text in texts if text)


def token_limit(fields: Fields, *names: str, least: int = 1) -> int | None:
    """Return the first limit of tokens that is given; None for none, which -1 asks for too."""
    given = next((name for name in names if name in fields), names[0])
    if fields.raw(given) == _NO_LIMIT:
        return None
    return fields.whole(given, least)


def num_samples(fields: Fields) -> int:
    """Return `n`, the number of answers wanted."""
    return fields.whole("n", 1, _MOST_SAMPLES) or 1


_MOST_CHOICES = 4096


def foreign_format(fields: Fields) -> AnswerFormat | None:
    """Return the format that the fields of vLLM, SGLang and llama.cpp ask for; None for any."""
    wanted = fields.nested("structured_outputs")
    wanted.refuse("grammar", "structural_tag", "whitespace_pattern")
    if wanted.flag("json_object"):
        return AnswerFormat(ANY_OBJECT, wanted.name_of("json_object"))
    for holder, name in ((fields, "guided_json"), (fields, "json_schema"), (wanted, "json")):
        if name in holder:
            return AnswerFormat(_schema(holder, name), holder.name_of(name))
    for holder, name in ((fields, "guided_choice"), (wanted, "choice")):
        if name in holder:
            return AnswerFormat({}, holder.name_of(name), _choice(holder, name))
    for holder, name in ((fields, "guided_regex"), (fields, "regex"), (wanted, "regex")):
        if pattern := holder.text(name):
            pattern = pattern.replace("/", r"\/").replace("\n", r"\n")
            return AnswerFormat({}, holder.name_of(name), f"start: /{pattern}/")
    return None


def _schema(holder: Fields, name: str) -> dict[str, Any]:
    """Return a schema, which vLLM takes as text too."""
    if not isinstance(text := holder.raw(name), str):
        return holder.nested(name).values
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    return Fields({name: schema if schema is not None else text}).nested(name).values


def _choice(holder: Fields, name: str) -> str:
    """Return the grammar of one of some texts."""
    texts = holder.raw(name)
    is_list = isinstance(texts, list) and 0 < len(texts) <= _MOST_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise holder.fault(name, f"must be a list of at most {_MOST_CHOICES} texts")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


async def with_format(
    service: Service, wanted: AnswerFormat | None, options: AskOptions
) -> AskOptions:
    """Return `options` with the grammar of a format.

    Raises ApiError for a schema that cannot be followed.
    """
    if wanted is None:
        return options
    grammar = await _compiled(service, wanted)
    return replace(options, grammar=grammar)


async def _compiled(service: Service, wanted: AnswerFormat) -> Grammar:
    model, param = service.host.model, wanted.param
    try:
        grammar = wanted.grammar
        return await service.answering.on_compiler(
            lambda: model.tokenizer.grammars.compile(grammar, model.stop_token_ids)
        )
    except UsageError as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from error
    except RecursionError:
        raise ApiError(400, f"{param} is nested too deeply.", param, "invalid_value") from None


# A template without a switch for thinking, or without the effort that a request asks for, is asked
# for what comes nearest; where there is nothing near, the field changes nothing: clients send it to
# every model. Each interface has a field of its own; those of other servers say the same.

Wanted = tuple[Think, ...]  # what to ask for, the best first

_EFFORTS: dict[str, Wanted] = {
    "none": (Think.OFF, Think.LOW),
    "minimal": (Think.LOW, Think.OFF),
    "low": (Think.LOW, Think.ON),
    "medium": (Think.MEDIUM, Think.ON),
    "high": (Think.HIGH, Think.ON),
    "xhigh": (Think.HIGH, Think.ON),
    "max": (Think.HIGH, Think.ON),
    # The words of `--think`.
    "auto": (),
    "on": (Think.ON, Think.MEDIUM),
    "off": (Think.OFF, Think.LOW),
}
_KINDS: dict[str, Wanted] = {
    "enabled": (Think.ON, Think.MEDIUM),
    "disabled": (Think.OFF, Think.LOW),
    "adaptive": (),
}
_KWARGS = "chat_template_kwargs"
_SWITCHES = ("enable_thinking", "thinking", "think")
_BUDGETS = ("thinking_budget", "reasoning_budget")


def asked_effort(fields: Fields, switch: ThinkSwitch, base: Think) -> Think:
    """Return what a body of OpenAI's interfaces asks for; `base` where it does not say."""
    wanted = _effort(fields, "reasoning_effort")
    if wanted is None:
        reasoning = fields.nested("reasoning")
        wanted = _effort(reasoning, "effort")
        wanted = _switched(reasoning, "enabled") if wanted is None else wanted
    return _nearest(_elsewhere(fields) if wanted is None else wanted, switch, base)


def asked_thinking(fields: Fields, switch: ThinkSwitch, base: Think) -> Think:
    """Return what a message asks for; the budget of its `thinking` changes nothing.

    The effort counts where the model may decide whether it thinks.
    """
    wanted = _elsewhere(fields)
    if not wanted:
        effort = _effort(fields.nested("output_config"), "effort")
        wanted = effort if wanted is not None and effort is not None else wanted
    return _nearest(wanted, switch, base)


def _elsewhere(fields: Fields) -> Wanted | None:
    """Return what the fields of other servers ask for, None where there are none.

    Raises ApiError for an argument of the template that is no switch of thinking.
    """
    template = fields.nested(_KWARGS)
    known = (*_SWITCHES, *_BUDGETS, "reasoning_effort")
    template.refuse(*(name for name in template.values if name not in known))
    for holder in (fields, template):
        for name in _SWITCHES:
            if (wanted := _switched(holder, name)) is not None:
                return wanted
        for name in _BUDGETS:
            if (budget := holder.whole(name, -1)) is not None:
                return _KINDS["disabled" if budget == 0 else "enabled"]
    return _effort(template, "reasoning_effort")


def _switched(holder: Fields, name: str) -> Wanted | None:
    """Return what a switch says: true or false, an effort, or an object with the kind."""
    value = holder.raw(name)
    if isinstance(value, str):
        return _effort(holder, name)
    if isinstance(value, dict):
        kind, switch = holder.nested(name).text("type"), holder.nested(name)
        if kind not in _KINDS:
            raise switch.fault("type", f"must be one of {', '.join(_KINDS)}")
        switch.whole("budget_tokens", 0)
        return _KINDS[kind]
    return None if value is None else _KINDS["enabled" if holder.flag(name) else "disabled"]


def _effort(holder: Fields, name: str) -> Wanted | None:
    effort = holder.text(name)
    if effort is not None and effort not in _EFFORTS:
        raise holder.fault(name, f"must be one of {', '.join(_EFFORTS)}")
    return None if effort is None else _EFFORTS[effort]


def _nearest(wanted: Wanted | None, switch: ThinkSwitch, base: Think) -> Think:
    if wanted is None:
        return base
    return next((think for think in wanted if think in switch.known), Think.AUTO)


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
