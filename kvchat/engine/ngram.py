"""NgramDrafter: drafts the tokens that followed the same last tokens earlier.

It looks the last tokens up in all contexts it has seen, including attached files and other branches
of the conversation. It needs no model and no memory on the device.

NgramIndex finds earlier occurrences by hash chains over n-grams, as LZ77 compressors do. Each place
stores the previous place with the same few tokens before it. A lookup walks these from the newest
to the oldest and extends each match backwards. The tests compare it with a full scan.

Source of the idea: prompt lookup decoding (Saxena, 2023) and LLMA (Yang et al., 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvchat.engine.drafters import Drafter, DraftOrder, Offer
from kvchat.engine.request import Request

# A frequent n-gram has many places: only the newest are compared.
_MAX_CANDIDATES = 48


@dataclass(slots=True, eq=False)
class Text:
    """One sequence of token ids that grows at its end.

    `earlier[i]` is the previous place of the n-gram that ends with `ids[i]`; None if there is none.
    """

    ids: list[int] = field(default_factory=list)
    earlier: "list[Place | None]" = field(default_factory=list)


Place = tuple[Text, int]


@dataclass(frozen=True, slots=True)
class Match:
    """The `length` tokens before `start` in `text` match; the tokens from `start` are the guess.

    `is_own` says that `text` is the text of the lookup itself.
    """

    text: Text
    start: int
    length: int
    is_own: bool

    def continuation(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed, at least one.

        If the match is in its own text and reaches its end, the guess repeats itself: that
        continues a repetition, such as a ruled line.
        """
        ids = self.text.ids[self.start : self.start + count]
        period = len(ids)
        while self.is_own and len(ids) < count:
            ids.append(ids[len(ids) - period])
        return ids


class NgramIndex:
    """Indexes every place that has at least `shortest` tokens before it.

    Matches are extended up to `longest` tokens. Not thread-safe.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self.num_tokens = 0
        self._shortest = shortest
        self._longest = longest
        self._newest: dict[tuple[int, ...], Place] = {}

    def extend(self, text: Text, ids: Sequence[int]) -> None:
        """Append token ids to a text, which may be a new one."""
        n = self._shortest
        for token in ids:
            text.ids.append(token)
            end = len(text.ids)
            key = tuple(text.ids[end - n :])
            # The chain of the place at the end is set before any token follows it.
            text.earlier.append(self._newest.get(key) if end >= n else None)
            if end >= n:
                self._newest[key] = (text, end)
        self.num_tokens += len(ids)

    def longest_match(self, text: Text) -> Match | None:
        """Find an earlier occurrence of the last tokens of `text`: the longest, then the newest.

        Occurrences have at least `shortest` tokens; only the newest candidates are compared.
        """
        if len(text.ids) < self._shortest:
            return None
        best: Match | None = None
        place = text.earlier[-1]
        for _ in range(_MAX_CANDIDATES):
            if place is None:
                break
            candidate, end = place
            place = candidate.earlier[end - 1]
            if end == len(candidate.ids):
                continue  # no token follows it yet
            length = self._common_len(candidate, end, text)
            if best is None or length > best.length:
                best = Match(candidate, end, length, candidate is text)
            if length == self._longest:
                break
        return best

    def _common_len(self, candidate: Text, end: int, text: Text) -> int:
        """Return how many tokens before `end` equal the last ones of `text`."""
        most = min(end, len(text.ids), self._longest)
        ids, others = text.ids, candidate.ids
        length = self._shortest
        while length < most and ids[-1 - length] == others[end - 1 - length]:
            length += 1
        return length


_SHORTEST, _LONGEST = 3, 24
# A longer match is more likely to continue, so acceptance is recorded for each of these lengths.
_GRADES = (12, 6, 4, _SHORTEST)
# Shared beginnings of contexts are entered once: they are recognised by pieces of this length.
_PIECE = 32
# About forty megabytes of index. Above this it begins anew with the ends of the running contexts.
_MAX_TOKENS = 1 << 18


@dataclass(slots=True)
class _Entered:
    """How many tokens of a request's context are in the index, and in which text.

    `chain` is the hash of the context's whole pieces so far.
    """

    text: Text
    num_tokens: int
    chain: int


class NgramDrafter(Drafter):
    """Drafts by lookup. `max_tokens` bounds the index over all contexts."""

    name = "ngram"

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self.forget()

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]] = ()) -> None:
        """Forget everything: the index does not record which texts hold a context."""
        self._begin_anew(self._max_tokens)

    def _begin_anew(self, most_each: int) -> None:
        """Empty the index; at most the last `most_each` tokens of a context enter the new one."""
        self._most_each = most_each
        self._index = NgramIndex(_SHORTEST, _LONGEST)
        self._known: set[int] = set()
        self._entered: dict[Request, _Entered] = {}

    def offer(self, request: Request, most: int) -> Offer | None:
        match = self._match(request)
        if match is None:
            return None
        grade = next(grade for grade in _GRADES if match.length >= grade)
        num_tokens = len(match.continuation(most))
        return Offer(f"ngram {grade}", num_tokens, is_free=True)

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for want in wanted:
            match = self._match(want.request)
            drafts.append(match.continuation(want.num_tokens) if match is not None else ())
        return drafts

    def _match(self, request: Request) -> Match | None:
        return self._index.longest_match(self._enter(request).text)

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        unfinished = set(requests)
        for request in [r for r in self._entered if r not in unfinished]:
            self._enter(request)  # its last tokens are useful for later requests too
            del self._entered[request]

    def close(self) -> None:
        self.forget()

    # Entering contexts

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        for ids in contexts:
            self._extend(self._begin(ids), ids)

    def _enter(self, request: Request) -> _Entered:
        """Bring the index up to a request's newest token."""
        if self._index.num_tokens > self._max_tokens:
            # The running contexts fill half of the new index at most. If they filled all of it,
            # every step would begin anew and enter them again.
            self._begin_anew(self._max_tokens // 2 // max(1, len(self._entered)))
        entered = self._entered.get(request)
        if entered is None:
            entered = self._entered[request] = self._begin(request.ids)
        self._extend(entered, request.ids)
        return entered

    def _extend(self, entered: _Entered, ids: Sequence[int]) -> None:
        """Append the new tokens of a context to its text."""
        new = ids[entered.num_tokens :]
        if new:
            self._index.extend(entered.text, new)
            start = entered.num_tokens - entered.num_tokens % _PIECE
            entered.num_tokens = len(ids)
            entered.chain = self._note_pieces(ids, start, entered.chain)

    def _begin(self, ids: Sequence[int]) -> _Entered:
        """Begin a text after the known pieces of a context, with the last few tokens of those.

        Pieces that the index has no room for count as known.
        """
        chain, start = 0, 0
        first = len(ids) - self._most_each
        while start + _PIECE <= len(ids):
            longer = hash((chain, *ids[start : start + _PIECE]))
            if start >= first and longer not in self._known:
                break
            chain, start = longer, start + _PIECE
        text = Text()
        self._index.extend(text, ids[max(0, start - _LONGEST) : start])
        return _Entered(text, start, chain)

    def _note_pieces(self, ids: Sequence[int], start: int, chain: int) -> int:
        for first in range(start, len(ids) - _PIECE + 1, _PIECE):
            chain = hash((chain, *ids[first : first + _PIECE]))
            self._known.add(chain)
        return chain
