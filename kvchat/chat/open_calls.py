"""OpenCalls: the calls of an answer, and the results of them that a client sends."""

from dataclasses import dataclass, field

from kvchat.chat.tools import ToolCall, ToolResult


@dataclass(slots=True)
class _OpenCall:
    call_id: str
    call: ToolCall
    texts: list[str] = field(default_factory=list)
    item: int = 0  # where the client sent the first result


class OpenCalls:
    """Finds the call of each result by its id; calls with equal ids get theirs by order."""

    def __init__(self) -> None:
        self._calls: list[_OpenCall] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def have_results(self) -> bool:
        return any(each.texts for each in self._calls)

    def add(self, call_id: str, call: ToolCall) -> None:
        self._calls.append(_OpenCall(call_id, call))

    def add_result(self, call_id: str, text: str, item: int = 0) -> bool:
        """Add a result; return whether there is a call with this id.

        More results than calls of an id are parts of the last one's.
        """
        known = [each for each in self._calls if each.call_id == call_id]
        if not known:
            return False
        place = next((each for each in known if not each.texts), known[-1])
        if not place.texts:
            place.item = item
        place.texts.append(text)
        return True

    def without_result(self) -> ToolCall | None:
        """Return the first call that has no result."""
        return next((each.call for each in self._calls if not each.texts), None)

    def take_results(self) -> list[tuple[int, ToolResult]]:
        """Return all results in the order of their calls, each with its item, and forget all."""
        results = [
            (each.item, ToolResult(each.call.name, "\n".join(each.texts)))
            for each in self._calls
            if each.texts
        ]
        self._calls.clear()
        return results
