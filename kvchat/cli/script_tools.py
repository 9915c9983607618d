"""ScriptTools: runs the calls of a script's answers, or refuses them.

A script has no user to ask: a tool runs if it is allowed by name.
"""

import threading
from collections.abc import Callable, Sequence

from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.cli.answer_time import AnswerTime
from kvchat.core.text import one_line
from kvchat.tools.toolbox import Toolbox, call_in_words, refused


class ScriptTools:
    """Runs one call after another; `tell` gets a line about each."""

    def __init__(self, toolbox: Toolbox, tell: Callable[[str], None]) -> None:
        self._toolbox = toolbox
        self._tell = tell
        self._running: threading.Event | None = None  # stops the call that runs
        self._is_stopped = False

    def stop(self) -> None:
        """End the call that runs, and begin no other. Any thread may call it."""
        self._is_stopped = True
        if self._running is not None:
            self._running.set()

    def results(self, calls: Sequence[ToolCall], answer_time: AnswerTime) -> tuple[ToolResult, ...]:
        """Return the results of the calls of one answer, which ends when its time is over."""
        return tuple(self._result(call, answer_time) for call in calls)

    def _result(self, call: ToolCall, answer_time: AnswerTime) -> ToolResult:
        toolbox = self._toolbox
        if toolbox.has(call.name) and not toolbox.permissions.of(call.name):
            name = one_line(call.name)
            self._tell(f"{name} is not allowed; --allow-tool {name} allows it.")
            return refused(call)
        self._running = stop = threading.Event()  # before the look: `stop` may be called meanwhile
        if answer_time.is_over or self._is_stopped:
            return ToolResult(call.name, "Error: it was not called, for the answer had to end.")
        self._tell(call_in_words(call))
        with answer_time.stopping(stop.set):
            return toolbox.run(call, stop)
