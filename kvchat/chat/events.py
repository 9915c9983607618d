"""Events of a reply, for the program part that displays it: new text, and how an answer ended."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.chat.text_codec import TextCodec
from kvchat.chat.tools import ToolCall
from kvchat.core.errors import KvchatError
from kvchat.core.types import CachedTokens, FinishReason, MissReason, Timing, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of a shown text: its bytes, its logprob, and those of the likeliest at its place.

    The bytes may be a part of a character. `top` is (bytes, logprob), likeliest first.
    """

    content: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


def shown_token(token: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> ShownToken:
    """Return a token with the bytes that its id and the others stand for."""
    top = tuple((bytes_of(token_id), logprob) for token_id, logprob in token.top)
    return ShownToken(bytes_of(token.token_id), token.logprob, top)


class LogprobTrack:
    """Knows which characters of an answer's whole text each of its tokens gave.

    Tokens that give a character together give it each. Tokens without text are left out.
    """

    def __init__(self, tokenizer: TextCodec) -> None:
        self._tokenizer = tokenizer
        self._incomplete: list[TokenLogprobs] = []
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._length = 0

    def add(self, token: TokenLogprobs, text: str) -> None:
        """Take the next token, and the text that it completes."""
        if not self._tokenizer.is_hidden(token.token_id):
            self._incomplete.append(token)
        self.complete(text)

    def complete(self, text: str) -> None:
        """Take the text of the tokens that had none yet; nothing for an empty text."""
        if not text:
            return
        end = self._length + len(text)
        self._waiting.extend((self._length, end, token) for token in self._incomplete)
        self._incomplete.clear()
        self._length = end

    def take(self, start: int, end: int) -> tuple[ShownToken, ...]:
        """Return the tokens of the characters from `start` to `end` that no call before returned.

        Earlier tokens are dropped. Each call begins where the one before ended, or later.
        """
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            _, token_end, token = self._waiting.popleft()
            if token_end > start:
                taken.append(shown_token(token, self._tokenizer.token_bytes))
        return tuple(taken)


@dataclass(frozen=True, slots=True)
class ReadingPrompt:
    """`done` of `total` context tokens have KV; `cached` of them were not computed.

    `left_s` is how long the others take, by the rate that prices are told from; None without one.
    """

    cached: CachedTokens
    done: int
    total: int
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class ContextScored:
    """The logprobs of all tokens of `context` but the first, before the answers' first text.

    Comes once, and only where they were asked for.
    """

    context: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More text of one sample's answer, or of the thinking before it.

    `logprobs` are its tokens where they were asked for. The first may have begun in the text
    before; a token is told once. So are `token_ids`, which come without text, before the text that
    they complete.
    """

    sample: int
    text: str
    is_thinking: bool = False
    logprobs: tuple[ShownToken, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One sample calls a tool."""

    sample: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """One sample's answer is complete and saved. `text` is the answer without thinking and calls.

    `logprobs` are the tokens of the text where they were asked for, else none. So are `token_ids`,
    the ids of the whole answer.
    Where those of the context were asked for, `scored_context` are its ids, and `scored` has the
    logprobs of all but the first, then of all that was generated, a stop token included.
    `num_dropped_calls` counts calls beyond the limit of the request.
    `ends_in_thinking` if it has not come to the end of its thinking: there is no answer, however it
    ended.
    `num_thinking_tokens` counts the tokens of the thinking and of its marks.
    `stop_text` is the stop text of the request that ended it, None if none did.
    `miss_reason` says why a slower tier did not have more of the context, None if it was not asked.
    """

    sample: int
    turn_id: int
    text: str
    thinking: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    miss_reason: MissReason | None = None
    calls: tuple[ToolCall, ...] = ()
    num_dropped_calls: int = 0
    logprobs: tuple[ShownToken, ...] = ()
    thinking_logprobs: tuple[ShownToken, ...] = ()
    token_ids: tuple[int, ...] = ()
    scored_context: tuple[int, ...] = ()
    scored: tuple[TokenLogprobs, ...] = ()
    stop_text: str | None = None
    ends_in_thinking: bool = False
    num_thinking_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the model came to the end of its answer."""
        return self.reason is FinishReason.STOP and not self.ends_in_thinking


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """The request failed; the text generated before is kept."""

    error: KvchatError


@dataclass(frozen=True, slots=True)
class SavingFailed:
    """Lines could not be written to the session file; the conversation continues in memory."""

    message: str


ChatEvent = (
    ReadingPrompt
    | ContextScored
    | AnswerText
    | AnswerCall
    | AnswerEnded
    | AnswerFailed
    | SavingFailed
)
