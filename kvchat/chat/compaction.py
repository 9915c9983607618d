"""Compacting: chooses the messages that a summary takes the place of, and words the request for it.

The summary is asked for below the last of these messages, so that all but the request is cached.
The new branch begins with the summary and continues with copies of the newest messages.
"""

import re
from collections.abc import Iterable, Sequence
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
# Of a shorter summary at least this share of the telling words is in the messages.
_MIN_KNOWN_SHARE = 1 / 3
_LONG_WORD = 5
_WORD = re.compile(r"\w+")
_REFUSAL = re.compile(
    r"\W*(?:(?:i['’]m |i am )?(?:very )?sorry|i can(?:not|['’]?t)\b|i (?:do not|don['’]t) know|"
    r"i (?:am|['’]m) (?:not able|unable)|unfortunately|as an ai\b|es tut mir leid|ich kann|leider|"
    r"je ne peux|désolé|lo siento|no puedo|mi dispiace|non posso|desculpe|não posso)",
    re.IGNORECASE,
)
OPENING = "This is a summary of our conversation so far:\n\n"
_WAYS_OUT = (
    "/compact WORDS says what matters most, /model NAME asks another model, /rewind goes back, "
    "/new begins afresh."
)
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
        raise UsageError(
            "The last message has no answer.", "/continue answers it, /undo removes it."
        )
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
    facts), and for one that repeats the request or begins with it. `require_substance` refuses what
    says too little.
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


def require_substance(summary: str, num_tokens: int, plan: CompactionPlan) -> None:
    """Raise UsageError for a summary that is far too short for what it replaces, and for a refusal.

    A summary of `_ENOUGH_TOKENS` is taken as it is. A shorter one is a refusal if it begins as one,
    or if hardly any of its telling words is in the messages: so it is found in other languages too.
    """
    if num_tokens >= _ENOUGH_TOKENS:
        return
    if num_tokens < min(plan.num_tokens // _MAX_SHRINKING, _ENOUGH_TOKENS):
        raise UsageError(
            f"The summary has {num_tokens:,} tokens for {plan.num_tokens:,}, which is far too "
            "short, so nothing is compacted.",
            _WAYS_OUT,
        )
    telling = _telling_words(summary)
    said = _stems(_WORD.findall(" ".join(turn.text for turn in plan.older)))
    num_known = sum(word in said for word in telling)
    if _REFUSAL.match(summary) or num_known < _MIN_KNOWN_SHARE * len(telling):
        raise UsageError(
            "The model's answer says nothing of the conversation, so nothing is compacted.",
            _WAYS_OUT,
        )


def _telling_words(text: str) -> set[str]:
    """Return the beginnings of the words that say what a text is about.

    These are long words, those with a digit, and names: capitals after another word. A text in
    letters without capitals, such as Chinese, has none, because its words are not divided alike.
    """
    if any(letter.isalpha() and letter.lower() == letter.upper() for letter in text):
        return set()
    words = [
        match[0]
        for match in _WORD.finditer(text)
        if len(match[0]) >= _LONG_WORD
        or any(letter.isdigit() for letter in match[0])
        or (len(match[0]) > 1 and match[0][0].isupper() and text[: match.start()][-2:-1].isalpha())
    ]
    return _stems(words)


def _stems(words: Iterable[str]) -> set[str]:
    return {word.casefold()[:_LONG_WORD] for word in words}


def max_summary_tokens(context_limit: int) -> int:
    """Return the most tokens of a summary."""
    return max(64, min(1024, context_limit // 8))
