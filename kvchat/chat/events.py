"""What a conversation tells whoever shows it: text as it comes, and how an answer ended.

Knows turns and text; no tensors, files or screens.
"""

from dataclasses import dataclass

from kvchat.core.errors import KvchatError
from kvchat.core.types import CachedTokens, FinishReason, MissReason, Timing, Usage


@dataclass(frozen=True, slots=True)
class ReadingPrompt:
    """`done` of `total` context tokens are read; `cached` of them did not need reading."""

    cached: CachedTokens
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More text of one sample's answer, or of the thinking before it."""

    sample: int
    text: str
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """One sample's answer is complete and saved. `text` is the answer without its thinking.

    `miss_reason` says why a slower tier did not have more of the context, None where it was not
    asked.
    """

    sample: int
    turn_id: int
    text: str
    thinking: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    miss_reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """There will be no (more of an) answer; what came before is kept."""

    error: KvchatError


@dataclass(frozen=True, slots=True)
class SavingFailed:
    """The session file is behind; the conversation goes on in memory."""

    message: str


ChatEvent = ReadingPrompt | AnswerText | AnswerEnded | AnswerFailed | SavingFailed
