"""How many tokens to draft: what steps cost, how often guesses are right, and what pays best.

Pure arithmetic over measured seconds and counted acceptances. Knows no tokens, requests or models.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DRAFTED = 16
# A measured cost or a counted acceptance weighs at least this much in its moving average.
_COST_WEIGHT = 0.2
_ACCEPTANCE_WEIGHT = 1 / 20
# A longer context or a busier machine makes other counts of rows dearer as well.
_SHARED_DRIFT = 0.15
_NUM_FIRST = 3
# Seconds of one step beyond these multiples of what was expected are a hiccup of the machine.
_MOST_SURPRISE = 2.0
# Drafting has to promise at least this much, or measuring errors would decide.
_LEAST_GAIN = 0.03
# No request beside others may be slowed by more than this for the others' sake.
_MOST_SLOWDOWN = 0.05


class CostCurve:
    """Seconds by a count of rows, measured where there was occasion and estimated between.

    Before anything is known about more than one count, each row more is taken to cost `slope` of
    the first. Never falls: more rows do not cost less.
    """

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._visits: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self._rows

    @property
    def num_noted(self) -> int:
        """Return how many steps have been taken in."""
        return sum(self._visits)

    def num_measured(self, rows: int) -> int:
        """Return how often this count of rows was measured."""
        place = bisect_left(self._rows, _grade(rows))
        is_there = place < len(self._rows) and self._rows[place] == _grade(rows)
        return self._visits[place] if is_there else 0

    def note(self, rows: int, seconds: float) -> None:
        """Take in one measured step."""
        rows = _grade(rows)
        place = bisect_left(self._rows, rows)
        if place == len(self._rows) or self._rows[place] != rows:
            self._rows.insert(place, rows)
            self._seconds.insert(place, seconds)
            self._visits.insert(place, 1)
            return
        self._visits[place] += 1
        if self._visits[place] <= _NUM_FIRST:
            # What a first step has to do besides makes it slower, never quicker; and what seems
            # too dear is not taken again, so that nothing would ever put it right.
            self._seconds[place] = min(self._seconds[place], seconds)
            return
        surprise = max(1 / _MOST_SURPRISE, min(_MOST_SURPRISE, seconds / self._seconds[place]))
        self._seconds = [known * surprise**_SHARED_DRIFT for known in self._seconds]
        self._seconds[place] *= surprise**_COST_WEIGHT

    def seconds(self, rows: int) -> float:
        """Return what so many rows cost; something has been measured before."""
        assert self._rows
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._seconds[0] * self._ratio(rows, self._rows[0])
        below = max(self._seconds[:place])
        if place == len(self._rows):
            return below * self._ratio(rows, self._rows[-1])
        above = max(below, self._seconds[place])
        low, high = self._rows[place - 1], self._rows[place]
        return below + (above - below) * (rows - low) / (high - low)

    def _ratio(self, rows: int, known_rows: int) -> float:
        return (1 + self._slope * (rows - 1)) / (1 + self._slope * (known_rows - 1))


def _grade(rows: int) -> int:
    """Count exactly up to 32, and beyond in steps of an eighth."""
    if rows <= 32:
        return rows
    unit = 1 << (rows.bit_length() - 4)
    return rows // unit * unit


class Acceptance:
    """How likely a draft is right at each position, where those before it were right."""

    def __init__(self, prior: float) -> None:
        self._likely = [prior] * MAX_DRAFTED
        self._counts = [0] * MAX_DRAFTED

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one verified draft."""
        for place in range(min(num_accepted, MAX_DRAFTED)):
            self._move(place, 1.0)
        if num_accepted < min(num_drafted, MAX_DRAFTED):
            self._move(num_accepted, 0.0)

    def _move(self, place: int, outcome: float) -> None:
        self._counts[place] += 1
        weight = max(_ACCEPTANCE_WEIGHT, 1 / (self._counts[place] + 1))
        self._likely[place] += weight * (outcome - self._likely[place])

    def survival(self, count: int) -> list[float]:
        """Return how likely the first, the first two, ... the first `count` drafts are all right.

        A position that was never reached is taken to be like the last that was.
        """
        chances: list[float] = []
        survived, likely = 1.0, self._likely[0]
        for place in range(min(count, MAX_DRAFTED)):
            if self._counts[place]:
                likely = self._likely[place]
            survived *= likely
            chances.append(survived)
        return chances

    def renewed(self) -> "Acceptance":
        """Return the same expectation, held less firmly: for a text of its own."""
        copy = Acceptance(0.0)
        copy._likely = list(self._likely)
        copy._counts = [min(count, 3) for count in self._counts]
        return copy


@dataclass(frozen=True, slots=True)
class Chance:
    """What one request may gain: `survival[i]` is how likely its first i + 1 drafts are right.

    `is_free` where its drafts cost no time of their own.
    """

    survival: Sequence[float]
    is_free: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """`lengths[i]` tokens to draft for request i; `gain` is the tokens per second expected of that,
    as a multiple of plain decoding.
    """

    lengths: tuple[int, ...]
    gain: float


def choose_lengths(
    chances: Sequence[Chance],
    num_rows: int,
    num_others: int,
    verify_s: Callable[[int], float],
    draft_s: Callable[[int], float],
) -> Choice:
    """Choose the lengths that give the most tokens per second over all decoding requests.

    num_rows     rows of the step without any draft
    num_others   decoding requests in it that have nothing to draft
    verify_s     seconds of a step by its rows
    draft_s      seconds of drafting by the longest draft that is not free

    Drafts join one by one, the likeliest first. None join where that promises too little, or where
    some request would get its tokens noticeably slower than it does plainly. Looks no further than
    where no draft that is left could pay for what those before it cost: seconds never fall with
    rows or with depth.
    """
    plain = (0,) * len(chances)
    offered = [
        (-survival, position, index)
        for index, chance in enumerate(chances)
        for position, survival in enumerate(chance.survival)
    ]
    offered.sort()
    num_tokens = float(len(chances) + num_others)
    plain_s = verify_s(num_rows)
    plain_rate = num_tokens / plain_s
    best = Choice(plain, 1.0)
    lengths = [0] * len(chances)
    expected = [1.0] * len(chances)
    depth = 0
    most_tokens = num_tokens - sum(survival for survival, _, _ in offered)
    for count, (negative, position, index) in enumerate(offered, start=1):
        lengths[index] += 1
        expected[index] -= negative
        num_tokens -= negative
        if not chances[index].is_free:
            depth = max(depth, position + 1)
        seconds = verify_s(num_rows + count) + (draft_s(depth) if depth else 0.0)
        if most_tokens / seconds / plain_rate <= max(best.gain, 1 + _LEAST_GAIN):
            break
        gain = num_tokens / seconds / plain_rate
        slowest = 1.0 if num_others else min(expected)
        is_fair = slowest * plain_s >= (1 - _MOST_SLOWDOWN) * seconds
        if is_fair and gain > max(best.gain, 1 + _LEAST_GAIN):
            best = Choice(tuple(lengths), gain)
    return best
