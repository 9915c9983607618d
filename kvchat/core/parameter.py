"""Parameter: the name, kind, range, help and checks of one thing that a user may choose.

Every place that takes a value of it (a flag, the environment, config.toml, /set, a field of JSON)
checks it here, so a bad value is refused in the same words everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import partial
from typing import Any

from kvchat.core.errors import UsageError
from kvchat.core.sizes import parse_size, shown

# The largest signed 64-bit number.
MOST = 2**63 - 1
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Words that take a value back: the second ones leave it to the default.
_OFF_WORDS, _DEFAULT_WORDS = ("none", "off"), ("default", "random")


class Kind(Enum):
    """The kind of a parameter's values, and what a sentence calls one."""

    TEXT = "a text"
    NAME = "a name"  # never empty, as the next two
    PATH = "a path"
    NAME_OR_PATH = "a name or a path"
    SIZE = "a size"
    WHOLE = "a whole number"
    NUMBER = "a number"
    SWITCH = "true or false"
    TEXTS = "a text or a list of texts"


class Group(StrEnum):
    """The headings of help, in its order."""

    CONVERSATION = "Conversation"
    SERVER = "Server"
    BENCH = "Measurement"
    MODEL = "Model"
    ANSWER = "Answer"
    TOOLS = "Tools"
    CACHE = "Cache and saving"
    SCRIPTS = "Scripts"
    TERMINAL = "Terminal"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. Its name is that of config.toml and of JSON fields.

    unit        stands for a value in help
    default     the value where none is given; None if something else decides
    otherwise   says what that is, or what the default means
    choices     the texts that it may be
    least, most   the range of a number
    rule, words   what else must hold of a value, and how errors say it; words alone say the range
    off         the value that switches it off; None for none
    short       a flag of one letter
    switches_off   whether a switch has a flag for no, too
    """

    name: str
    help: str
    kind: Kind = Kind.TEXT
    unit: str = "TEXT"
    group: Group = Group.MODEL
    default: Any = None
    otherwise: str = ""
    choices: tuple[str, ...] = ()
    least: float = -MOST
    most: float = MOST
    rule: Callable[[Any], bool] | None = None
    words: str = ""
    off: Any = None
    short: str = ""
    switches_off: bool = True

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"KVCHAT_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.dashed}"

    @property
    def dashed(self) -> str:
        """Its name as `/set` and flags have it."""
        return self.name.rstrip("_").replace("_", "-")

    @property
    def allowed(self) -> str:
        """The values that it may have, as the end of a sentence."""
        if self.words:
            return self.words
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.most < MOST:
            return f"{self.least:g} to {self.most:g}"
        return f"{self.least:g} or more" if self.least > -MOST else self.kind.value

    @property
    def full_help(self) -> str:
        """Its help with choices, range and default."""
        limits = ", ".join(self.choices) or (
            "" if self.allowed == self.kind.value else self.allowed
        )
        has_default = isinstance(self.default, str | int | float) and self.default != ""
        has_default = has_default and self.kind is not Kind.SWITCH
        default = self.otherwise or (str(self.default) if has_default else "")
        notes = [limits, f"default: {default}" if default else ""]
        told = "; ".join(note for note in notes if note)
        return f"{self.help} [{told}]" if told else self.help

    def refusal(self, value: object, place: str, allowed: str = "") -> UsageError:
        """Return the error for a bad value."""
        return UsageError(f"{place} is {shown(value)}, but must be {allowed or self.allowed}.")

    def checked(self, value: object, place: str) -> Any:
        """Return a value as its kind has it; raises UsageError for one that cannot be used.

        place   names the parameter in errors: `--top-p`, `KVCHAT_TOP_P`, `top_p of line 3`
        """
        if self.kind is Kind.TEXTS:
            return self._checked_texts(value, place)
        if self.kind in (Kind.WHOLE, Kind.NUMBER):
            value = self._checked_number(value, place)
        elif not isinstance(value, bool if self.kind is Kind.SWITCH else str):
            raise self.refusal(value, place, self.kind.value)
        if isinstance(value, str):
            value = self._checked_text(value, place)
        if self.rule is not None and not self.rule(value):
            raise self.refusal(value, place)
        return value

    def parsed(self, text: str, place: str) -> Any:
        """Return the value that a flag, a variable or a command writes as text."""
        if self.kind is Kind.TEXTS:
            return self.checked((text,), place)
        if self.kind is Kind.SWITCH:
            word = text.strip().lower()
            return self.checked(word in _ON if word in (*_ON, *_OFF) else text, place)
        if self.kind not in (Kind.WHOLE, Kind.NUMBER):
            return self.checked(text, place)
        try:
            value = int(text) if self.kind is Kind.WHOLE else float(text)
        except ValueError as error:
            raise self.refusal(text, place, self.kind.value) from error
        return self.checked(value, place)

    def taken_back(self, text: str) -> tuple[Any] | None:
        """Return the value for a word such as none, off or default, in a tuple; None for others."""
        word = text.strip().lower()
        if word in self.choices or self.kind not in (Kind.WHOLE, Kind.NUMBER, Kind.TEXTS):
            return None
        if word in _OFF_WORDS and self.off is not None:
            return (self.off,)
        is_own = self.off is None and word in _OFF_WORDS
        return (self.default,) if is_own or word in _DEFAULT_WORDS else None

    def _checked_number(self, value: object, place: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MOST:  # type: ignore[arg-type]  # NaN is not
            raise self.refusal(value, place, self.kind.value)
        assert isinstance(value, int | float)
        if self.kind is Kind.WHOLE and value != int(value):
            raise self.refusal(value, place, self.kind.value)
        number = int(value) if self.kind is Kind.WHOLE else float(value)
        if not self.least <= number <= self.most:
            raise self.refusal(value, place)
        return number

    def _checked_text(self, value: str, place: str) -> str:
        if "\0" in value:
            raise UsageError(f"{place} has a NUL character, which no setting can hold.")
        if self.kind in (Kind.NAME, Kind.PATH, Kind.NAME_OR_PATH) and not value.strip():
            # As a path an empty text would be the working directory.
            raise UsageError(f"{place} is empty.", "Leave it out for the default.")
        if self.kind is Kind.SIZE:
            parse_size(value, place)
        word = value.strip().lower()
        if self.choices and word not in self.choices:
            raise self.refusal(value, place)
        return word if self.choices else value

    def _checked_texts(self, value: object, place: str) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        is_list = isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts)
        if not is_list:
            raise self.refusal(value, place, self.kind.value)
        assert isinstance(texts, list | tuple)
        if "" in texts:
            effect = ", which would stop every answer" if self.name == "stop" else ""
            raise UsageError(f"{place} is an empty text{effect}.")
        return tuple(texts)


new_text = Parameter
new_name = partial(Parameter, kind=Kind.NAME, unit="NAME")
new_path = partial(Parameter, kind=Kind.PATH, unit="DIR")
new_name_or_path = partial(Parameter, kind=Kind.NAME_OR_PATH, unit="NAME")
new_size = partial(Parameter, kind=Kind.SIZE, unit="SIZE")
new_whole = partial(Parameter, kind=Kind.WHOLE, unit="N")
new_number = partial(Parameter, kind=Kind.NUMBER, unit="X")
new_switch = partial(Parameter, kind=Kind.SWITCH, unit="")
new_texts = partial(Parameter, kind=Kind.TEXTS, unit="NAME", default=())


def new_choice(name: str, help: str, choices: tuple[str, ...], unit: str = "NAME") -> Parameter:
    """Return a parameter that is one of some texts; the first is its default."""
    return Parameter(name, help, unit=unit, default=choices[0], choices=choices)


def grouped(group: Group, *parameters: Parameter) -> tuple[Parameter, ...]:
    """Return parameters that help has under one heading."""
    return tuple(replace(parameter, group=group) for parameter in parameters)
