"""Token ids -> text increments, and stop strings in them.

Knows the tokenizers library's streaming decoder. Does not know why a completion runs or ends.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvchat.chat.library_faults import is_library_fault

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
