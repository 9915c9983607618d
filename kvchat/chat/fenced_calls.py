"""A call that a model writes as a JSON object in its prose, mostly in a fence, and without marks.

Qwen2.5-Coder does so. It counts if it names a tool that is offered, and the answer holds nothing
beside it but prose: no other fence, no call in the model's own form.
"""

import re
from collections.abc import Callable
from typing import Any

from kvchat.chat.call_readers import call_of, decoded, ends_within_string
from kvchat.chat.tools import ToolCall, ToolSet

# A fence and an object up to the name's opening quotation mark, as parts that follow each other.
_FENCE = ("`", "`", "`", r"[\w-]*", r"[ \t]*", r"\n", r"\s*")
_OBJECT = (r"\{", r"\s*", '"', "n", "a", "m", "e", '"', r"\s*", ":", r"\s*", '"')
_NAME = r"[^\"\\\n]*"
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
_FENCE_ENDS = re.compile(r"\s*```[ \t]*(?=\n|\Z)")
_FENCE_ENDING = re.compile(r"\s*`{0,3}[ \t]*\Z")
_MOST_BEGUN = 400


def _so_far(parts: tuple[str, ...]) -> str:
    """Return the expression of what could become a text that consists of parts."""
    return "".join(f"(?:{part}" for part in parts) + ")?" * len(parts)


_BEGIN = re.compile(f'(?:{"".join(_FENCE)})?{"".join(_OBJECT)}({_NAME})"')
_SO_FAR = re.compile(rf"(?:{_so_far((*_FENCE, *_OBJECT, _NAME))}|{_so_far((*_OBJECT, _NAME))})\Z")


def begins_fenced_call(text: str, is_first: bool, tools: ToolSet) -> int | None:
    """Return where the call of an offered tool begins in a text; None if none does.

    is_first   whether the text is the beginning of the answer, and so of a line
    """
    for place in _line_starts(text, is_first):
        opening = _BEGIN.match(text, place)
        if opening is not None and "```" not in text[:place]:
            return place if opening[1] in tools.names else None
    return None


def could_begin_fenced_call(text: str, is_first: bool, tools: ToolSet) -> int:
    """Return from where on a text could become such a call; its length for nowhere."""
    for place in _line_starts(text, is_first):
        is_near = len(text) - place <= _MOST_BEGUN and "```" not in text[:place]
        if is_near and _SO_FAR.match(text, place):
            return place
    return len(text)


def _line_starts(text: str, is_first: bool) -> list[int]:
    """Return where a fence or an object stands at the beginning of a line."""
    pattern = r"(?:\A|\n)[ \t]*(?=[`{])" if is_first else r"\n[ \t]*(?=[`{])"
    return [match.end() for match in re.finditer(pattern, text)]


class FencedCall:
    """The region of such a call: from its beginning to the end of the answer."""

    def __init__(self, tools: ToolSet, ends_it: Callable[[str], bool]) -> None:
        """Take what says whether a text behind the call has a call in the model's own form."""
        self._tools = tools
        self._ends_it = ends_it
        self._call: ToolCall | None = None
        self._end = 0

    def step(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        if self._call is None:
            start = held.index("{")
            try:
                value, end = decoded(held, start)
            except (ValueError, RecursionError) as error:
                return None if _may_go_on(error, held) and not is_last else (1, ())
            self._call = self._offered(value)
            if self._call is None:
                return 1, ()
            self._end = end
        return self._beside(held, is_last)

    def _offered(self, value: Any) -> ToolCall | None:
        call = call_of(value)
        is_plain = isinstance(value, dict) and set(value) <= _KEYS and len(value) > 1
        return call if call is not None and is_plain and call.name in self._tools.names else None

    def _beside(self, held: str, is_last: bool) -> tuple[int, tuple[ToolCall, ...]] | None:
        """Judge by what stands behind the object, which is prose to the end of the answer."""
        assert self._call is not None
        end = self._end
        if held.startswith("`"):
            fence = _FENCE_ENDS.match(held, end)
            if fence is None:
                is_waiting = _FENCE_ENDING.match(held, end) is not None and not is_last
                return None if is_waiting else (1, ())
            end = fence.end()
        rest = held[end:]
        if "```" in rest or self._ends_it(rest) or re.search(r"^[ \t]*\{", rest, re.M):
            return 1, ()
        return (end, (self._call,)) if is_last else None


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether a text that is no JSON could become an object with more text."""
    place = getattr(error, "pos", 0)
    return ends_within_string(error) or place >= len(text.rstrip()) - len("false")
