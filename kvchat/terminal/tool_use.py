"""ToolUse: asks the user about the calls of an answer, runs them, and shows what came back."""

import asyncio
import math
import threading
import time
from collections.abc import Callable

from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.core.text import one_line
from kvchat.terminal.status import format_seconds, plural
from kvchat.terminal.theme import Role
from kvchat.terminal.view import Choice, View, tell
from kvchat.terminal.wrap import wrapped_rows
from kvchat.tools.toolbox import Toolbox, call_in_full, call_in_words, refused

_YES, _ALWAYS, _NO, _NEVER = range(4)
_MOST_ASKED_ROWS = 4  # a longer call is shown above its question, whose choices stay in sight
_ROWS_BESIDE = 6  # of a screen: the four choices, the toolbar, and a row of what was before
_MOST_SHOWN_CHARS = 8000


def _choices(is_by_call: bool) -> tuple[Choice, ...]:
    what = "this call" if is_by_call else "this tool"
    return (
        Choice("yes", "once"),
        Choice("always", f"{what}, until kvchat ends"),
        Choice("no", "the model is told so"),
        Choice("never", "this tool, until kvchat ends"),
    )


class ToolUse:
    """Runs the calls of one answer at a time. `toolbox` is None where no tools are offered."""

    def __init__(self, toolbox: Toolbox | None, view: View, refresh: Callable[[], None]) -> None:
        self.toolbox = toolbox
        self._view = view
        self._refresh = refresh
        self._stop = threading.Event()
        self.running = ""

    def stop(self) -> None:
        """End the running call soon, and ask about no further one."""
        self._stop.set()

    @property
    def was_stopped(self) -> bool:
        """Whether the user stopped the last calls: the answer to them is not wanted either."""
        return self._stop.is_set()

    async def results(self, calls: tuple[ToolCall, ...]) -> tuple[ToolResult, ...]:
        """Return the result of each call, in their order, also of one that is not allowed."""
        assert self.toolbox is not None, "calls are read only where tools are offered"
        self._stop.clear()
        results = []
        for call in calls:
            if self._stop.is_set() or not await self._may_run(self.toolbox, call):
                tell(self._view, f"not run: {call_in_words(call)}", gap=False)
                results.append(refused(call))
            else:
                results.append(await self._run(self.toolbox, call))
        return tuple(results)

    async def _may_run(self, toolbox: Toolbox, call: ToolCall) -> bool:
        """Return whether the user allows a call; a tool that is not there needs no question."""
        allowed = toolbox.permissions.of_call(call)
        if allowed is not None or not toolbox.has(call.name):
            return allowed is not False
        choices = _choices(toolbox.is_allowed_by_call(call.name))
        title, is_whole = self._question(call)
        # An Enter that was meant for the message being typed must not say yes, nor one that was
        # pressed without having seen all.
        current = _NO if self._view.prompt_text or not is_whole else _YES
        answer = await self._view.choose(title, choices, current)
        if answer == _ALWAYS:
            toolbox.allow(call)
        elif answer == _NEVER:
            toolbox.permissions.never.add(call.name)
        elif answer is None:
            self._stop.set()
        return answer in (_YES, _ALWAYS)

    def _question(self, call: ToolCall) -> tuple[str, bool]:
        """Return what to ask, and whether all of the call is in sight; show a long one before."""
        words = call_in_full(call)
        question = f"Run {words}?"
        width, room = self._view.render_context.width, self._view.num_rows - _ROWS_BESIDE
        num_rows = len(wrapped_rows(question, width))
        # A title shows one space for several.
        if num_rows <= max(1, min(_MOST_ASKED_ROWS, room)) and "  " not in words:
            return question, True
        left_out = max(len(words) - _MOST_SHOWN_CHARS, 0)
        if left_out:
            half = _MOST_SHOWN_CHARS // 2
            words = f"{words[:half]}\n({left_out:,} characters are not shown here)\n{words[-half:]}"
        tell(self._view, words, Role.TITLE)
        which = f"but for {left_out:,} characters of it" if left_out else "shown above"
        is_in_sight = not left_out and len(wrapped_rows(words, width)) < room
        question = f"Run this call of {call.name}, {which}?"
        shorter = f"Run {call.name}, {which}?"
        is_narrow = len(question) > width and self._view.num_rows < math.inf
        return shorter if is_narrow else question, is_in_sight

    async def _run(self, toolbox: Toolbox, call: ToolCall) -> ToolResult:
        self.running = call.name
        self._refresh()
        began_s = time.monotonic()
        try:
            result = await asyncio.to_thread(toolbox.run, call, self._stop)
        finally:
            self.running = ""
            self._refresh()
        tell(self._view, call_in_words(call), Role.TITLE, gap=False)
        tell(self._view, result_in_words(result, time.monotonic() - began_s), gap=False)
        return result


def result_in_words(result: ToolResult, seconds: float | None = None) -> str:
    """Return a result as one line: its first line, and how many follow."""
    lines = result.text.splitlines()
    rest = f" and {plural(len(lines) - 1, 'more line')}" if len(lines) > 1 else ""
    took = f" ({format_seconds(seconds)})" if seconds is not None and seconds >= 1.0 else ""
    return f"{one_line(lines[0] if lines else '', 60)}{rest}{took}"
