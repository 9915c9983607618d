"""Think: whether, and how much, a model thinks before it answers; and a template's words for it.

Templates have no common name for this. A ThinkSwitch holds what one template reads.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvchat.core.errors import UsageError

# The names of real templates: Qwen, GLM and SmolLM read the first, Granite and DeepSeek the second.
_TOGGLES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_NO_EFFORT = re.compile(r"""["']none["']""")


class Think(StrEnum):
    """How an answer is asked for. `AUTO` leaves it to the template; the last three are efforts."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def is_effort(self) -> bool:
        return self in _EFFORTS


_EFFORTS = (Think.LOW, Think.MEDIUM, Think.HIGH)


def parse_think(text: str) -> Think:
    """Return the value that `text` names; raises UsageError if it names none."""
    try:
        return Think(text.strip().lower())
    except ValueError as error:
        raise UsageError(
            f"think is {text[:20]!r}, but must be one of {', '.join(Think)}."
        ) from error


@dataclass(frozen=True, slots=True)
class ThinkSwitch:
    """The variables of one template that switch thinking.

    toggles      the names of its variables that are true or false
    has_effort   whether it reads `reasoning_effort`
    has_none     whether that effort may be `none`
    """

    toggles: tuple[str, ...] = ()
    has_effort: bool = False
    has_none: bool = False

    @classmethod
    def of(cls, source: str, names: Iterable[str]) -> "ThinkSwitch":
        """Return the switch of a template; `names` are the variables that it reads."""
        read = frozenset(names)
        has_effort = _EFFORT in read
        return cls(
            tuple(name for name in _TOGGLES if name in read),
            has_effort,
            has_effort and _NO_EFFORT.search(source) is not None,
        )

    @property
    def known(self) -> tuple[Think, ...]:
        """The values that change what the template writes, and `AUTO`."""
        is_off = self.toggles or self.has_none
        return (
            Think.AUTO,
            *((Think.ON,) if self.toggles else ()),
            *((Think.OFF,) if is_off else ()),
            *(_EFFORTS if self.has_effort else ()),
        )

    def variables(self, think: Think) -> dict[str, object]:
        """Return what to pass to the template; nothing for a value that is not `known`."""
        if think is Think.AUTO or think not in self.known:
            return {}
        values: dict[str, object] = dict.fromkeys(self.toggles, think is not Think.OFF)
        if think.is_effort:
            values[_EFFORT] = think.value
        elif think is Think.OFF and self.has_none:
            values[_EFFORT] = "none"
        return values

    def problem(self, think: Think, name: str) -> str | None:
        """Return one sentence if the template of model `name` ignores `think`, else None."""
        if think in self.known:
            return None
        if len(self.known) == 1:
            return (
                f"The chat template of {name} has no switch for thinking; {think} changes nothing."
            )
        others = ", ".join(self.known)
        return f"The chat template of {name} does not know thinking {think}; it knows {others}."
