"""ShownToken and LogprobTrack: finds the tokens that a shown piece of an answer was made of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvchat.chat.tokenizer import TextCodec
from kvchat.core.types import TokenLogprobs


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
