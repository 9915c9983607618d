"""Fields: reads the fields of a request's JSON; each fault names its field.

Fields that would change the answer and that kvchat does not have are refused, not ignored.
"""

from collections.abc import Mapping
from typing import Any

from kvchat.core.errors import UsageError
from kvchat.core.parameters import MOST, Parameter
from kvchat.core.text import shown

_SHOWN_CHARS = 80


class FieldFault(UsageError):
    """A field of a request that cannot be used.

    param   its full name
    code    a word that programs may test, None for none
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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

    def fault(self, name: str, sentence: str) -> FieldFault:
        """Return the error for a bad field; it quotes a value that is neither list nor object."""
        full, value = self.name_of(name), self._values.get(name)
        if isinstance(value, str | int | float) and sentence.startswith("must "):
            sentence = f"is {shown(value)}, but {sentence}"
        return FieldFault(f"{full} {sentence}.", full, "invalid_value")

    def value_of(self, parameter: Parameter) -> Any:
        """Return the field of a parameter, None where it is missing; raises FieldFault."""
        value, full = self._values.get(parameter.name), self.name_of(parameter.name)
        try:
            return None if value is None else parameter.checked(value, full)
        except UsageError as error:
            raise FieldFault(str(error), full, "invalid_value") from error

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
        if abs(value) > MOST:
            raise self.fault(name, "must be nearer to 0")
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
                raise FieldFault(sentence, full, "unsupported_parameter")


def shortened(text: str) -> str:
    """Return the beginning of a text for an error."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
