"""NgramDrafter: what followed these tokens before will follow them again.

Looks the last tokens up in every context it has met, attached files and other branches of the same
conversation included. Needs no model and no memory on the device. Knows token ids only.

Source of the idea: prompt lookup decoding (Saxena, 2023) and LLMA (Yang et al., 2023).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.engine.drafters import Offer, Wanted
from kvchat.engine.ngram_index import Match, NgramIndex, Text
from kvchat.engine.request import Request

_SHORTEST, _LONGEST = 3, 24
# The longer the match, the likelier it goes on: acceptance is remembered apart for each.
_GRADES = (12, 6, 4, _SHORTEST)
# A context is entered once, however many requests share its beginning: it is known by pieces.
_PIECE = 32
# Some forty megabytes of index at the most; then it begins anew.
_MAX_TOKENS = 1 << 18


@dataclass(slots=True)
class _Entered:
    """How far a request's context stands in the index, and in which text."""

    text: Text
    num_tokens: int
    chain: int


class NgramDrafter:
    """Drafts by looking up. `max_tokens` bounds what it remembers over all contexts."""

    name = "ngram"

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self.forget()

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]] = ()) -> None:
        """Forget everything: which texts hold a piece of a context nobody keeps account of."""
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

    def prepare(self) -> None:
        """Looking up is as fast as it gets."""

    def catch_up(self, wanted: Sequence[Wanted]) -> None:
        """An offer has entered all there is."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for want in wanted:
            match = self._match(want.request)
            drafts.append(match.continuation(want.num_tokens) if match is not None else ())
        return drafts

    def _match(self, request: Request) -> Match | None:
        return self._index.longest_match(self._enter(request).text)

    def tend(self, requests: Sequence[Request], seconds: float) -> None:
        unfinished = set(requests)
        for request in [r for r in self._entered if r not in unfinished]:
            self._enter(request)  # what it ended with is worth remembering too
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
            self.forget()
        entered = self._entered.get(request)
        if entered is None:
            entered = self._entered[request] = self._begin(request.ids)
        self._extend(entered, request.ids)
        return entered

    def _extend(self, entered: _Entered, ids: Sequence[int]) -> None:
        """Bring a text up to the end of the context that it is of."""
        new = ids[entered.num_tokens :]
        if new:
            self._index.extend(entered.text, new)
            start = entered.num_tokens - entered.num_tokens % _PIECE
            entered.num_tokens = len(ids)
            entered.chain = self._note_pieces(ids, start, entered.chain)

    def _begin(self, ids: Sequence[int]) -> _Entered:
        """Begin a text where a context leaves what is known, a few tokens before it included."""
        chain, start = 0, 0
        while start + _PIECE <= len(ids):
            longer = hash((chain, *ids[start : start + _PIECE]))
            if longer not in self._known:
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
