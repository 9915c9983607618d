"""Decodes token ids to text increments, and finds stop strings in them.

Uses the tokenizers library's streaming decoder. The library raises bare Exception for most errors.
A panic of its Rust code, such as for a regular expression that backtracks too far, is a
BaseException without an importable class. This module raises ModelError for both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvchat.core.errors import KvchatError, ModelError


def is_library_fault(error: BaseException) -> bool:
    """Return whether an error is the library's, including a panic, and not a signal or exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def faults_as_model_errors(sentence: str, hint: str = "") -> Iterator[None]:
    """Raise ModelError, with the sentence and the library's message, for any library error."""
    try:
        yield
    except KvchatError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        words = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(f"{sentence}: {words or type(error).__name__}.", hint) from error


class TextStream(Protocol):
    """Decodes ids to text one by one, and never splits a character."""

    def feed(self, token_id: int) -> str:
        """Take the next id; return the text that it completes, often empty."""

    def flush(self) -> str:
        """Return the text of an incomplete character at the end."""


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenStream:
    """Decodes token ids to text one by one, and never splits a character.

    Special tokens have no text, except thinking marks. `flush` returns the replacement text of an
    incomplete character at the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        context = list(context_ids)
        if self._decode(context).endswith(_REPLACEMENT):
            context = []  # the library would return a context that ends in a character as new text
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Take the next id; return the text that it completes, often empty."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except BaseException as error:
            if not is_library_fault(error):
                raise
            # The library raises a bare Exception if the text it returned before has changed: a byte
            # that was a character alone is now part of a malformed one.
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=False)
            return self.flush()
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """Return the replacement text of an incomplete character at the end, if there is one."""
        text = self._decode(self._pending)
        self._pending.clear()
        return text

    def _decode(self, token_ids: list[int]) -> str:
        """Return the ids' text, a replacement character if the tokenizer fails.

        A failure must not end the answer.
        """
        try:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        except BaseException as error:
            if not is_library_fault(error):
                raise
            return _REPLACEMENT


class StopFilter:
    """Passes text up to the first complete stop string; holds back what may be part of one.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the stop string that was complete first

    @property
    def has_stopped(self) -> bool:
        return self.stop is not None

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """Take more text; return the text that cannot belong to a stop string."""
        if self.has_stopped or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            _, start, self.stop = min(found)
            released, self._held = self._held[:start], ""
            return released
        keep = self._longest_beginning()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        released, self._held = self._held, ""
        return released

    def _longest_beginning(self) -> int:
        """Return how many characters at the end of the held text could begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
