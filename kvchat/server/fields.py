"""Fields: reads the fields of a request's JSON; each fault names its field.

Fields that would change the answer and that kvchat does not have are refused, not ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvchat.chat.answer_settings import SAMPLING_KINDS, AskOptions
from kvchat.core.errors import UsageError
from kvchat.server.api_errors import ApiError

_MOST = 2**63 - 1
_MOST_STOPS = 64
_NO_LIMIT = _RANDOM = -1
# How clients say that a filter is off, or that one token is left, and what says so here.
_UNLIMITED: Mapping[tuple[str, float], float] = {("top_k", -1): 0, ("top_p", 0): 1e-9}
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
        """Return the error for a bad field."""
        full = self.name_of(name)
        return ApiError(400, f"{full} {sentence}.", full, "invalid_value")

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

    def whole(self, name: str, least: int, most: int = _MOST) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(name, "must be a whole number")
        if not least <= value <= most:
            raise self.fault(
                name, f"must be {least} to {most}" if most < _MOST else f"must be {least} or more"
            )
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, "must be a number")
        if not abs(value) <= _MOST:  # NaN is not
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
    """Return `base` with the sampling fields and the seed of a request.

    Without a limit of tokens an answer ends that only repeats itself: nothing else would end it.
    """
    values: dict[str, Any] = {}
    for name, kind in SAMPLING_KINDS.items():
        value = fields.number(name)
        if value is None:
            continue
        value = _UNLIMITED.get((name, value), value)
        if kind(value) != value:
            raise fields.fault(name, "must be a whole number")
        values[name] = kind(value)
    try:
        sampling = replace(base.sampling, **values)
    except UsageError as error:
        raise ApiError(400, str(error), _blamed(values, error), "invalid_value") from error
    seed = fields.whole("seed", -_MOST)
    is_bounded = any(fields.raw(name) not in (None, _NO_LIMIT) for name in _TOKEN_LIMITS)
    own_seed = base.seed if seed is None else seed
    return replace(
        base,
        sampling=sampling,
        seed=None if seed == _RANDOM else own_seed,
        repetition_limit=0 if is_bounded else base.repetition_limit,
    )


def _blamed(values: Mapping[str, Any], error: UsageError) -> str | None:
    return next((name for name in values if name.replace("_", "-") in str(error)), None)


def stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Return the stop strings of a field, which is a text or a list of texts."""
    value = fields.raw(name)
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and len(texts) <= _MOST_STOPS
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise fields.fault(name, f"must be a text or a list of at most {_MOST_STOPS} texts")
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
