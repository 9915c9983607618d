"""ScriptRoom: makes room in a full context between the exchanges of a script."""

import asyncio
from contextlib import suppress

from kvchat.chat.compacting import summarise
from kvchat.chat.compaction import CompactionPlan
from kvchat.chat.context_policy import ContextPolicy
from kvchat.chat.events import AnswerEnded, AnswerFailed
from kvchat.chat.tools import ToolResult
from kvchat.cli.answer_time import AnswerTime, limited
from kvchat.cli.script_output import ScriptSetup
from kvchat.cli.streams import Interruption
from kvchat.core.errors import TimedOut


class ScriptRoom:
    """Makes room for a script's answers, if the policy is to, and says so on stderr."""

    def __init__(self, setup: ScriptSetup, interruption: Interruption) -> None:
        self._setup = setup
        self._controller = setup.controller
        self._interruption = interruption

    def make(self, text: str | None, results: tuple[ToolResult, ...] = ()) -> bool:
        """Make room as `RoomMaker.make` does; false if that was ended before its time."""
        controller = self._controller
        if controller.options.context_policy is ContextPolicy.STOP or not controller.context_ids:
            return True
        from kvchat.terminal.room import RoomMaker  # and all that draws: not for one -p

        with suppress(TimedOut):  # the answer tells it
            controller.host.wait_until_loaded(self._setup.timeout_s)
        return asyncio.run(RoomMaker(controller, self._summary, self._say).make(text, results))

    def _say(self, text: str) -> None:
        self._setup.notices.tell(text[:1].lower() + text[1:])

    async def _summary(self, plan: CompactionPlan) -> AnswerEnded:
        """Let the model write a summary, which is not printed; raises what prevented it."""
        reply, answer_time = summarise(self._controller, plan), AnswerTime(self._setup.timeout_s)
        with limited(self._controller.host, reply, answer_time, self._interruption):
            [*_, last] = reply
        if isinstance(last, AnswerFailed):
            raise last.error
        assert isinstance(last, AnswerEnded)
        return last
