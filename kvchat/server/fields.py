"""Fields: reads the fields of a request's JSON; each fault names its field.

Fields that would change the answer and that kvchat does not have are refused, not ignored.
"""

from collections.abc import Mapping
from typing import Any

from kvchat.chat.answer_settings import AskOptions, with_values
from kvchat.core.errors import UsageError
from kvchat.core.parameter import MOST, Kind, Parameter
from kvchat.core.parameters import OF_ANSWERS
from kvchat.core.sizes import shown
from kvchat.server.api_errors import ApiError

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
_SHOWN_CHARS = 80


class Fields:
    """The fields of one JSON object. `path` names it in errors, empty for the body itself."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def name_of(self, name: str) -> str:
        """Return a field's full name for an error."""
        return ".".join(part for part in (self._path, name) if part)

    def fault(self, name: str, sentence: str) -> ApiError:
        """Return the error for a bad field; it quotes a value that is neither list nor object."""
        full, value = self.name_of(name), self._values.get(name)
        if isinstance(value, str | int | float) and sentence.startswith("must "):
            sentence = f"is {shown(value)}, but {sentence}"
        return ApiError(400, f"{full} {sentence}.", full, "invalid_value")

    def value_of(self, parameter: Parameter) -> Any:
        """Return the field of a parameter, None where it is missing; raises ApiError."""
        value, full = self._values.get(parameter.name), self.name_of(parameter.name)
        try:
            return None if value is None else parameter.checked(value, full)
        except UsageError as error:
            raise ApiError(400, str(error), full, "invalid_value") from error

    def raw(self, name: str) -> Any:
        """Return a field as it is, None where it is missing."""
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, "must be a text")
        return value

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fault(name, "must be true or false")
        return value

    def whole(self, name: str, least: int, most: int = MOST) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(name, "must be a whole number")
        if not least <= value <= most:
            raise self.fault(
                name, f"must be {least} to {most}" if most < MOST else f"must be {least} or more"
            )
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, "must be a number")
        if not abs(value) <= MOST:  # NaN is not
            raise self.fault(name, "must be a number that can be computed with")
        return value

    @property
    def values(self) -> dict[str, Any]:
        """All fields as they are."""
        return dict(self._values)

    def objects_if_any(self, name: str) -> list["Fields"]:
        """Return a list of objects, an empty one where it is missing."""
        value = self._values.get(name)
        return [] if value is None or value == [] else self.objects(name)

    def objects(self, name: str) -> list["Fields"]:
        """Return a list of objects; raises where it is missing or empty."""
        value = self._values.get(name)
        if not isinstance(value, list) or not value:
            raise self.fault(name, "must be a list with at least one object")
        return [self._object(f"{name}[{index}]", item) for index, item in enumerate(value)]

    def nested(self, name: str) -> "Fields":
        """Return an object, an empty one where it is missing."""
        value = self._values.get(name)
        return self._object(name, {} if value is None else value)

    def _object(self, name: str, value: object) -> "Fields":
        if not isinstance(value, dict):
            raise self.fault(name, "must be an object")
        return Fields(value, self.name_of(name))

    def refuse(self, *names: str) -> None:
        """Raise for a field that asks for something kvchat does not do; 0, false and [] do not."""
        for name in names:
            if self._values.get(name):
                full = self.name_of(name)
                sentence = f"kvchat does not support {full}."
                raise ApiError(400, sentence, full, "unsupported_parameter")


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


def shortened(text: str) -> str:
    """Return the beginning of a text for an error."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
