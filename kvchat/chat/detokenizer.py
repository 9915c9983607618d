"""Token ids -> text increments, and stop strings in them.

Uses the tokenizers library's streaming decoder. The library raises bare Exception for most, and
lets a panic of its Rust code through as a BaseException that has no importable class: a regular
expression that backtracks too far ends so. Here that becomes one typed error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvchat.core.errors import KvchatError, ModelError


def is_library_fault(error: BaseException) -> bool:
    """Tell a library's failure, a panic included, from what only passes through: signals, exits."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def faults_as_model_errors(sentence: str, hint: str = "") -> Iterator[None]:
    """Raise ModelError with the sentence and the library's own words for whatever it fails with."""
    try:
        yield
    except KvchatError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        words = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(f"{sentence}: {words or type(error).__name__}.", hint) from error


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenStream:
    """Turns token ids into text as they come, never splitting a character.

    Special tokens have no text, marks of thinking excepted. `flush` gives what an incomplete
    character leaves at the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        context = list(context_ids)
        if self._decode(context).endswith(_REPLACEMENT):
            context = []  # the library takes a context that ends within a character for new text
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Take the next id; return the text it completes, often empty."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except BaseException as error:
            if not is_library_fault(error):
                raise
            # The library raises a bare Exception where what it gave out reads differently now: a
            # byte that was a character by itself turns out to be part of a malformed one.
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
        """Return the ids' text, a replacement where the tokenizer fails: no answer is lost so."""
        try:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        except BaseException as error:
            if not is_library_fault(error):
                raise
            return _REPLACEMENT


class StopFilter:
    """Lets text through up to the stop string that is complete first, holding back what might be
    part of one. How the text is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Take more text; return what is certain not to belong to a stop string."""
        if self.has_stopped or not text:
            return ""
        self._held += text
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            self.has_stopped = True
            released, self._held = self._held[: min(found)[1]], ""
            return released
        keep = self._longest_beginning()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """Return what was held back, once nothing more comes."""
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


class StopStringWatcher:
    """Tells the engine when a completion's text contains a stop string."""

    def __init__(self, stream: TokenStream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._filter = StopFilter(stops)

    def feed(self, token_id: int) -> bool:
        """Take the next token id; true once a stop string is complete."""
        self._filter.feed(self._stream.feed(token_id))
        return self._filter.has_stopped
