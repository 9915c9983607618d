"""How a template takes messages: as texts or as lists of parts, and which white space it strips."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Sets of roles whose content a template may want as a list of parts, the commonest first.
PART_ROLES: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"system", "user", "assistant", "tool"}),
    frozenset({"user"}),
    frozenset({"assistant"}),
)
# A list of parts that was written as a value instead of read part by part.
_WRITTEN_PARTS = ("'type': 'text'", '"type": "text"')
# White space that a template may name in `strip`. Without names `strip` and `trim` take all kinds.
_NAMED_SPACES = " \n\t\r\v\f"
_UNNAMED_SPACE = "\N{IDEOGRAPHIC SPACE}"


def with_parts(
    messages: Sequence[Mapping[str, Any]], roles: Collection[str]
) -> list[Mapping[str, Any]]:
    """Return messages in which the texts of these roles are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles
        else message
        for message in messages
    ]


def writes_parts(rendered: str) -> bool:
    """Return whether a template wrote a list of parts as it is, in place of the text in it."""
    return any(written in rendered for written in _WRITTEN_PARTS)


@dataclass(frozen=True, slots=True)
class Spaces:
    """The white space characters that a template strips at each end of a message."""

    leading: str = ""
    trailing: str = ""

    def strip(self, text: str) -> str:
        return text.lstrip(self.leading).rstrip(self.trailing)


NO_SPACES = Spaces()


def find_spaces(render: Callable[[str], str], text: str) -> Spaces:
    """Find the white space that a template strips from a message.

    `render` renders a message; `text` is one that stands nowhere else in the template's text.
    """
    leading = trailing = ""
    for space in (_UNNAMED_SPACE, *_NAMED_SPACES):
        run = 4 * space  # longer than any white space a template itself puts there
        rendered = render(f"{run}{text}{run}")
        leading += "" if f"{run}{text}" in rendered else space
        trailing += "" if f"{text}{run}" in rendered else space
        if leading == trailing == _UNNAMED_SPACE:
            break
    return Spaces(_all_kinds(leading), _all_kinds(trailing))


def _all_kinds(spaces: str) -> str:
    """Return all that Python's `str.strip` removes, and so Jinja's `trim`, for the unnamed space.

    No white space has a higher number.
    """
    if _UNNAMED_SPACE not in spaces:
        return spaces
    return "".join(filter(str.isspace, map(chr, range(ord(_UNNAMED_SPACE) + 1))))
