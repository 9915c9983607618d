"""Compacting: chooses the messages that a summary takes the place of, and words the request for it.

The summary is asked for below the last of these messages, so that all but the request is cached.
Where the context has no room for that, fewer messages are summarised; where one message fills it,
an excerpt is. The new branch begins with the summary and continues with copies of the newest
messages. If the model writes no summary, a note takes its place: the oldest messages are left out.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import split_attached
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.thinking import Think
from kvchat.chat.tools import ToolResult
from kvchat.core.errors import UsageError
from kvchat.core.types import FinishReason

# The newest messages are kept word by word, unless they take more than this share of the context.
_MAX_KEPT_MESSAGES = 2
_MAX_KEPT_SHARE = 0.25
# In a full context more may be kept: as much as leaves room to go on.
_MOST_KEPT_SHARE = 0.6
# The oldest messages are left out, where there is no summary, until this share remains.
_LEFT_SHARE = 0.5

_REQUEST = (
    "Summarise our conversation so far, so that it can be continued from the summary alone. "
    "Keep names, numbers, facts, decisions and open questions, and leave out pleasantries. "
    "Write only the summary, in at most {} words."
)
_MOST_WORDS, _LEAST_WORDS = 200, 30
_WORDS_PER_TOKEN = 0.5
_EXCERPT_OPENING = "Here is an excerpt of our conversation so far.\n\n"
_CUT = "\n[...]\n"
# The share of an excerpt that is its beginning, which may be an earlier summary.
_HEAD_SHARE = 0.25
# The tokens that a template puts around a message, and those of an excerpt's opening.
_AROUND_MESSAGE = 48
_LEAST_EXCERPT = 64
_SENTENCE_END = re.compile(r"[.!?…。！？](?=\s|$)|[。！？]|\n")
# A summary of fewer tokens is refused: one for so many that it replaces, up to so many in all.
_MAX_SHRINKING = 64
_ENOUGH_TOKENS = 40
# Of a shorter summary at least this share of the telling words is in the messages.
_MIN_KNOWN_SHARE = 1 / 3
_LONG_WORD = 5
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+")
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
LEFT_OUT = "The older messages of our conversation were left out here, to make room."
LEFT_OUT_REPLY = "I see. I will continue from what is left."


class Said(Protocol):
    """A message of a conversation: a turn, or what a client sent."""

    @property
    def role(self) -> Role: ...

    @property
    def text(self) -> str: ...

    @property
    def results(self) -> tuple[ToolResult, ...]: ...


class NoSummary(UsageError):
    """The model wrote no summary that could take the place of messages."""


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What will be compacted: `older` is the beginning of the path to the tip, `kept` its rest.

    `is_excerpt` if `older` leaves no room for a request below it: its text is sent in part.
    `files` are the attached files of `older` that stay, as the beginning of a message.
    """

    older: tuple[Turn, ...]
    kept: tuple[Turn, ...]
    is_excerpt: bool = False
    files: str = ""

    @property
    def num_tokens(self) -> int:
        """The tokens of the turns that the summary takes the place of."""
        return _num_tokens(self.older)

    @property
    def num_kept_tokens(self) -> int:
        """The tokens of the turns that stay as they are."""
        return _num_tokens(self.kept)

    def opening(self, summary: str | None) -> tuple[str, str]:
        """Return the message that stands for the older turns, and the answer to it.

        Without a summary a note says that they were left out, after an earlier summary of some.
        """
        told = summary if summary is not None else self._left_out
        said, reply = (LEFT_OUT, LEFT_OUT_REPLY) if told is None else (f"{OPENING}{told}", REPLY)
        return f"{self.files}{said}", reply

    @property
    def _left_out(self) -> str | None:
        """What stands for the older turns without a summary of all: an earlier one, or None."""
        _, said = split_attached(self.older[0].text)
        if self.older[0].summary_of is None or not said.startswith(OPENING):
            return None
        earlier = said.removeprefix(OPENING).removesuffix(LEFT_OUT).rstrip()
        return f"{earlier}\n\n{LEFT_OUT}"

    @property
    def messages(self) -> list[Turn]:
        """The user's messages that will be summarised."""
        return [turn for turn in self.older if turn.is_message]


def plan_compaction(
    conversation: Conversation,
    context_limit: int,
    num_asking: int = 0,
    most_kept: int | None = None,
    keeps_last: bool = False,
) -> CompactionPlan:
    """Return what to compact of the path to the tip; raises UsageError if that is nothing.

    `num_asking` are the tokens of the request and of the summary, which stand below `older`. What
    is kept has at most `most_kept` tokens, unless it `keeps_last`: the last message, with its
    answer so far.
    """
    path = conversation.path()
    begins = _begins(path)
    if not begins:
        raise UsageError("There is nothing to compact yet.")
    if path[-1].role is Role.USER:
        raise UsageError(
            "The last message has no answer.", "/continue answers it, /undo removes it."
        )
    ends = [0, *accumulate(len(turn.token_ids) for turn in path)]
    num_tokens = ends[-1]
    candidates = begins[max(1, len(begins) - _MAX_KEPT_MESSAGES) :]
    room = context_limit * _MAX_KEPT_SHARE
    room = room if most_kept is None else min(room, most_kept)
    fitting = (index for index in candidates if num_tokens - ends[index] <= room)
    cut = next(fitting, begins[-1] if keeps_last else len(path))
    most = context_limit - num_asking
    is_excerpt = ends[cut] > most
    if is_excerpt:
        least = num_tokens - context_limit * _MOST_KEPT_SHARE
        lower = [index for index in begins[1:] if least <= ends[index] <= most]
        cut, is_excerpt = (lower[-1], False) if lower else (cut, True)
    return CompactionPlan(tuple(path[:cut]), tuple(path[cut:]), is_excerpt)


def is_cut(turn: Turn) -> bool:
    """Whether a turn says that the messages before it were left out of the context."""
    return turn.text.endswith(LEFT_OUT)


def whole_path(conversation: Conversation) -> list[Turn]:
    """Return the path to the tip with the turns in it that were left out of the context.

    A summary stays in place of what it summarises: people read this path, not a model.
    """
    path = conversation.path()
    while path and is_cut(path[0]) and (last := path[0].summary_of) is not None:
        if not conversation.has(last):
            return path
        path = [*conversation.path(last), *path[2:]]
    return path


def plan_leaving_out(conversation: Conversation, context_limit: int) -> CompactionPlan | None:
    """Return which of the oldest messages to leave out without a summary, perhaps all of them.

    None if the context has room enough for the conversation to go on as it is.
    """
    room = int(context_limit * _LEFT_SHARE)
    if _num_tokens(conversation.path()) <= room:
        return None
    return plan_dropping(conversation, room)


def plan_dropping(
    conversation: Conversation, room: int, keeps_last: bool = False
) -> CompactionPlan:
    """Return which of the oldest messages to leave out, so that the others have `room` tokens.

    A message goes with its answer, and with the calls of tools in it and their results; the first
    one goes always. The last one stays if the plan `keeps_last`, though it has more tokens.
    """
    path = conversation.path()
    begins = _begins(path)
    fitting = (index for index in begins[1:] if _num_tokens(path[index:]) <= room)
    cut = next(fitting, begins[-1] if keeps_last and begins else len(path))
    return CompactionPlan(tuple(path[:cut]), tuple(path[cut:]))


def num_left_out(
    lengths: Sequence[int], begins: Sequence[int], num_opening: int, context_limit: int
) -> int:
    """Return how many of the oldest messages a client's conversation goes on without.

    Walks along it from the beginning, and whenever a message leaves no room for an answer, frees
    half of the context. So a longer conversation leaves out the same ones until it is full again,
    and what stays is known.

    lengths       the tokens of each message, without the opening of the first; the last is asked
    begins        the messages that may stand first
    num_opening   the tokens of the system prompt and of tools
    """
    most = context_limit - num_opening - max_summary_tokens(context_limit)
    half = (context_limit - num_opening) // 2
    ends = list(accumulate(lengths, initial=0))
    first = 0
    for last in range(len(lengths)):
        if ends[last + 1] - ends[first] <= most:
            continue
        later = [begin for begin in begins if first < begin <= last]
        fitting = (begin for begin in later if ends[last + 1] - ends[begin] <= half)
        first = next(fitting, later[-1] if later else first)
    return first


def _begins(path: Sequence[Turn]) -> list[int]:
    """Return where a path may be cut: before a message that has no results of earlier calls."""
    return [index for index, turn in enumerate(path) if turn.is_message and not turn.results]


def _num_tokens(turns: Sequence[Turn]) -> int:
    return sum(len(turn.token_ids) for turn in turns)


def request_text(focus: str, context_limit: int) -> str:
    """Return the message that asks for a summary; `focus` says what matters most, "" nothing."""
    num_words = int(max_summary_tokens(context_limit) * _WORDS_PER_TOKEN)
    request = _REQUEST.format(max(_LEAST_WORDS, min(_MOST_WORDS, num_words)))
    return f"{request} Above all keep this: {focus}" if focus else request


def num_asking_tokens(num_request: int, context_limit: int) -> int:
    """Return what a request of so many tokens takes below a conversation, with the summary."""
    return num_request + _AROUND_MESSAGE + max_summary_tokens(context_limit)


def summary_options(options: AskOptions, model: ChatModel, context_limit: int) -> AskOptions:
    """Return how a model is asked for a summary."""
    return replace(
        options,
        sampling=replace(options.sampling, temperature=0.0),
        max_tokens=max_summary_tokens(context_limit),
        stops=(),
        think=Think.AUTO if model.think_problem(Think.OFF) else Think.OFF,
    )


def excerpt_request(
    turns: Sequence[Said], request: str, context_limit: int, num_tokens: Callable[[str], int]
) -> str:
    """Return one message with as much of the turns' text as leaves room for a summary, and a
    request for it.

    Raises NoSummary where there is no room for any of it.
    """
    room = context_limit - num_asking_tokens(num_tokens(request), context_limit)
    if room < _LEAST_EXCERPT:
        raise NoSummary("The context has no room for a summary.", _WAYS_OUT)
    return f"{excerpt(turns, room, num_tokens)}\n\n{request}"


def without_summary(
    turns: Sequence[Said], context_limit: int, num_tokens: Callable[[str], int]
) -> str:
    """Return what stands for messages where they are one text, and the model wrote no summary."""
    room = int(context_limit * _LEFT_SHARE / 2)
    return f"{LEFT_OUT}\n\n{excerpt(turns, room, num_tokens)}"


def excerpt(turns: Sequence[Said], room: int, num_tokens: Callable[[str], int]) -> str:
    """Return as much of the turns' text as `room` tokens hold; the middle is left out."""
    text = "\n\n".join(f"{turn.role.value.title()}: {_whole_text(turn)}" for turn in turns)
    num_chars = len(text)
    shown = text
    while num_chars and (num_now := num_tokens(shown)) > room:
        num_chars = min(num_chars - 1, int(num_chars * room / num_now * 0.95))
        shown = _shortened(text, num_chars)
    return f"{_EXCERPT_OPENING}{shown}"


def _whole_text(turn: Said) -> str:
    return "\n".join([*(result.text for result in turn.results), turn.text])


def _shortened(text: str, num_chars: int) -> str:
    """Return the beginning and the end of a text, in about so many characters."""
    if num_chars >= len(text):
        return text
    num_head = int(num_chars * _HEAD_SHARE)
    return f"{text[:num_head]}{_CUT}{text[len(text) - (num_chars - num_head) :]}"


def checked_summary(text: str, reason: FinishReason) -> str:
    """Return the summary in a model's answer to `request_text`; `text` is without thinking.

    Of one that was cut off at its limit, the whole sentences. Raises NoSummary for an empty text,
    and for one that repeats the request or begins with it. `require_substance` refuses what says
    too little.
    """
    summary = text.strip() if reason is FinishReason.STOP else _whole_sentences(text.strip())
    if not summary:
        raise NoSummary("The model wrote no summary, so nothing is compacted.", _WAYS_OUT)
    said = _NUMBER.sub("{}", " ".join(summary.split()))
    if said in _REQUEST or said.startswith(_REQUEST):
        raise NoSummary(
            "The model repeated the request instead of a summary, so nothing is compacted.",
            _WAYS_OUT,
        )
    return summary


def _whole_sentences(text: str) -> str:
    """Return a text that was cut off without its last sentence, unless that is all there is."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends else f"{text} ..." if text else ""


def require_substance(
    summary: str, num_tokens: int, num_replaced: int, turns: Sequence[Said]
) -> None:
    """Raise NoSummary for a summary that is far too short for what it replaces, and for a refusal.

    It takes the place of `turns`, which have `num_replaced` tokens.
    A summary of `_ENOUGH_TOKENS` is taken as it is. A shorter one is a refusal if it begins as one,
    or if hardly any of its telling words is in the messages: so it is found in other languages too.
    """
    if num_tokens >= _ENOUGH_TOKENS:
        return
    if num_tokens < min(num_replaced // _MAX_SHRINKING, _ENOUGH_TOKENS):
        raise NoSummary(
            f"The summary has {num_tokens:,} tokens for {num_replaced:,}, which is far too "
            "short, so nothing is compacted.",
            _WAYS_OUT,
        )
    telling = _telling_words(summary)
    said = _stems(_WORD.findall(" ".join(turn.text for turn in turns)))
    num_known = sum(word in said for word in telling)
    if _REFUSAL.match(summary) or num_known < _MIN_KNOWN_SHARE * len(telling):
        raise NoSummary(
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
