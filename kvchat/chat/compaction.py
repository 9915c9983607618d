"""Compacting: chooses the messages that a summary takes the place of, and words the request for it.

The summary is asked for below the last of these messages, so that all but the request is cached.
The new branch begins with the summary and continues with copies of the newest messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason

# The newest messages are kept word by word, unless they take more than this share of the context.
_MAX_KEPT_MESSAGES = 2
_MAX_KEPT_SHARE = 0.25

_REQUEST = (
    "Summarise our conversation so far, so that it can be continued from the summary alone. "
    "Keep names, numbers, facts, decisions and open questions, and leave out pleasantries. "
    "Write only the summary, in at most 200 words."
)
# A summary of fewer tokens is refused: one for so many that it replaces, up to so many in all.
_MAX_SHRINKING = 64
_ENOUGH_TOKENS = 40
OPENING = "This is a summary of our conversation so far:\n\n"
_WAYS_OUT = "/compact WORDS says what matters most, /rewind goes back, /new begins afresh."
REPLY = "Thank you. I will continue from this summary."


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What will be compacted: `older` is the beginning of the path to the tip, `kept` its rest."""

    older: tuple[Turn, ...]
    kept: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """The tokens of the turns that the summary takes the place of."""
        return sum(len(turn.token_ids) for turn in self.older)

    @property
    def messages(self) -> list[Turn]:
        """The user's messages that will be summarised."""
        return [turn for turn in self.older if turn.is_message]


def plan_compaction(conversation: Conversation, context_limit: int) -> CompactionPlan:
    """Return what to compact of the path to the tip; raises UsageError if that is nothing."""
    path = conversation.path()
    begins = [index for index, turn in enumerate(path) if turn.is_message]
    if not begins:
        raise UsageError("There is nothing to compact yet.")
    if path[-1].role is Role.USER:
        raise UsageError("The last message has no answer.", "/retry answers it, /undo removes it.")
    room = context_limit * _MAX_KEPT_SHARE
    candidates = begins[max(1, len(begins) - _MAX_KEPT_MESSAGES) :]
    fitting = (index for index in candidates if _num_tokens(path[index:]) <= room)
    cut = next(fitting, len(path))
    return CompactionPlan(tuple(path[:cut]), tuple(path[cut:]))


def _num_tokens(turns: Sequence[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def request_text(focus: str) -> str:
    """Return the message that asks for a summary; `focus` says what matters most, "" nothing."""
    return f"{_REQUEST} Above all keep this: {focus}" if focus else _REQUEST


def checked_summary(text: str, reason: FinishReason) -> str:
    """Return the summary in a model's answer to `request_text`; `text` is without thinking.

    Raises UsageError for an empty text, for one that was cut off (its end may hold the newest
    facts), and for one that repeats the request or begins with it. The words of a refusal are not
    looked for, because they depend on the language; `require_length` refuses what is too short.
    """
    summary = text.strip()
    if reason is not FinishReason.STOP:
        raise UsageError("The summary was cut off, so nothing is compacted.", _WAYS_OUT)
    if not summary:
        raise UsageError("The model wrote no summary, so nothing is compacted.", _WAYS_OUT)
    said = " ".join(summary.split())
    if said in _REQUEST or said.startswith(_REQUEST):
        raise UsageError(
            "The model repeated the request instead of a summary, so nothing is compacted.",
            _WAYS_OUT,
        )
    return summary


def require_length(num_tokens: int, num_replaced: int) -> None:
    """Raise UsageError for a summary far too short for what it replaces, such as "I cannot"."""
    if num_tokens < min(num_replaced // _MAX_SHRINKING, _ENOUGH_TOKENS):
        raise UsageError(
            f"The summary has {num_tokens:,} tokens for {num_replaced:,}, which is far too short, "
            "so nothing is compacted.",
            _WAYS_OUT,
        )


def max_summary_tokens(context_limit: int) -> int:
    """Return the most tokens of a summary."""
    return max(64, min(1024, context_limit // 8))
