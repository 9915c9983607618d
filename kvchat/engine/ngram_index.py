"""NgramIndex: where the last tokens of a text have stood before, in everything seen so far.

Hash chains over n-grams, as LZ77 compressors find their matches: each place remembers the place
before it where the same few tokens stood, so a lookup walks candidates from the newest to the
oldest and extends each backwards. Integers only; the plain twin in the tests scans everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# Where something has stood everywhere, the newest places are as good as any.
_MAX_CANDIDATES = 48


@dataclass(slots=True, eq=False)
class Text:
    """One run of token ids that grows at its end. `earlier[i]` continues the chain of the n-gram
    that ends before place i; None ends it.
    """

    ids: list[int] = field(default_factory=list)
    earlier: "list[Place | None]" = field(default_factory=list)


Place = tuple[Text, int]


@dataclass(frozen=True, slots=True)
class Match:
    """The `length` tokens before `start` in `text` are those asked for; what follows is a guess.

    `is_own` where they were found in the very text that was asked for.
    """

    text: Text
    start: int
    length: int
    is_own: bool

    def continuation(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed, at least one.

        Where its own text ends it goes on with what it has just guessed: a repetition that is
        still running, such as a ruled line, is copied on.
        """
        ids = self.text.ids[self.start : self.start + count]
        period = len(ids)
        while self.is_own and len(ids) < count:
            ids.append(ids[len(ids) - period])
        return ids


class NgramIndex:
    """Remembers every place where at least `shortest` tokens came before.

    Matches are extended to `longest` tokens. Not for several threads.
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
            # The chain of a place at the end is there before anything follows.
            text.earlier.append(self._newest.get(key) if end >= n else None)
            if end >= n:
                self._newest[key] = (text, end)
        self.num_tokens += len(ids)

    def longest_match(self, text: Text) -> Match | None:
        """Find where the last tokens of `text` stood before: the longest run, of these the newest.

        Only runs of `shortest` tokens and more count.
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
                continue  # nothing has followed it so far
            length = self._common_len(candidate, end, text)
            if best is None or length > best.length:
                best = Match(candidate, end, length, candidate is text)
            if length == self._longest:
                break
        return best

    def _common_len(self, candidate: Text, end: int, text: Text) -> int:
        """Return how many tokens before `end` are the last ones of `text`."""
        most = min(end, len(text.ids), self._longest)
        ids, others = text.ids, candidate.ids
        length = self._shortest
        while length < most and ids[-1 - length] == others[end - 1 - length]:
            length += 1
        return length
