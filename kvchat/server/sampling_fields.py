"""Reads the fields of a request that say how the next token is drawn, and where an answer ends."""

from collections.abc import Mapping
from typing import Any

from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.chat.fields import Fields
from kvchat.core.parameter import Kind
from kvchat.core.parameters import OF_ANSWERS

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
_COMMON = tuple(p for p in OF_ANSWERS if p.name not in ("max_tokens", "stop", "think"))
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
