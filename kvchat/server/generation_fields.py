"""Reads the fields of OpenAI's interfaces that change how an answer's tokens are chosen."""

from dataclasses import replace
from typing import Any

from kvchat.chat.answer_settings import AskOptions
from kvchat.server.fields import Fields

_PENALTIES = ("presence_penalty", "frequency_penalty")
_MOST_PENALTY = 2.0
_MOST_BIAS = 100.0
_MOST_BIASED = 4096


def with_penalties(fields: Fields, options: AskOptions, vocab_size: int | None) -> AskOptions:
    """Return `options` with the penalties and the logit bias of a request.

    vocab_size   every token id is below it; None if that is not known
    """
    values: dict[str, Any] = {}
    for name in _PENALTIES:
        value = fields.number(name)
        if value is None:
            continue
        if abs(value) > _MOST_PENALTY:
            raise fields.fault(name, f"must be {-_MOST_PENALTY:g} to {_MOST_PENALTY:g}")
        values[name] = float(value)
    if "logit_bias" in fields:
        values["logit_bias"] = _logit_bias(fields.nested("logit_bias"), vocab_size)
    return replace(options, sampling=replace(options.sampling, **values)) if values else options


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
