"""TurnLoop: a message is asked, the calls of its answer are run, and their results are asked.

A screen, a script and a batch wait for events and run calls in three ways. This module decides for
all of them what comes after an answer, and when a model that calls tools without end is stopped.
"""

from collections.abc import Callable, Collection

from kvchat.chat.conversation import ROOT
from kvchat.chat.events import AnswerEnded
from kvchat.chat.reply import Reply
from kvchat.chat.tools import ToolCall, ToolResult
from kvchat.core.errors import GenerationError
from kvchat.core.types import FinishReason

MOST_ROUNDS = 50
MOST_EQUAL_ROUNDS = 3  # small models repeat a call whose result they do not understand

Results = tuple[ToolResult, ...]
Notify = Callable[[], None]


class EndlessCalls(GenerationError):
    """A model calls tools without end."""


class TurnLoop:
    """The rounds of one turn: answer, calls, results, answer. Each message begins another.

    ask    asks the conversation with the results of its last answer's calls
    hold   keeps results that are not asked with for the next message; None drops them
    """

    def __init__(
        self,
        ask: Callable[[Results, Notify | None], Reply],
        hold: Callable[[Results], None] | None = None,
    ) -> None:
        self._ask = ask
        self._hold = hold
        self._calls: tuple[ToolCall, ...] = ()
        self._last: tuple[list[str], Results] | None = None
        self._num_equal = 0
        self._num_rounds = 0

    def calls(self, ended: Collection[AnswerEnded]) -> tuple[ToolCall, ...]:
        """Return the calls that the ended answers wait for; none if the turn is over.

        Only the calls of one whole answer that is part of the conversation are run.
        """
        self._calls = ()
        if len(ended) == 1:
            [answer] = ended
            if answer.reason is FinishReason.STOP and answer.turn_id != ROOT:
                self._calls = answer.calls
        return self._calls

    def answer(self, results: Results, notify: Notify | None = None) -> Reply:
        """Ask with the results of the last calls; `notify` is the reply's.

        Raises EndlessCalls after too many rounds, and holds the results.
        """
        this = ([call.key for call in self._calls], results)
        self._num_equal = self._num_equal + 1 if this == self._last else 1
        self._last = this
        self._num_rounds += 1
        problem = ""
        if self._num_equal >= MOST_EQUAL_ROUNDS:
            problem = "The model makes the same call again and again, to the same result."
        elif self._num_rounds >= MOST_ROUNDS:
            problem = f"The model has called tools {MOST_ROUNDS} times for one answer."
        if problem:
            self.hold(results)
            raise EndlessCalls(problem, "Ask in other words, or with another model.")
        return self._ask(results, notify)

    def hold(self, results: Results) -> None:
        """End the turn without an answer to the results: the next message has them."""
        if self._hold is not None:
            self._hold(results)
