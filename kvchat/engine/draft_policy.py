"""DraftPolicy: which offers of drafts are taken up, and for how many tokens.

Decides by what has been measured so far: what steps cost by their rows, how often drafts are right,
and so which lengths give the most tokens per second. Offers that do not pay are tried again now and
then. Requests are keys only here; nothing is drafted.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvchat.engine.drafters import Offer
from kvchat.engine.request import Request

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


# Before it is measured: what a row more, and a drafted token more, costs of the first.
_VERIFY_SLOPE, _DRAFT_SLOPE = 0.05, 1.0
_PRIOR = 0.6
_NUM_PLAIN_FIRST = 2
# The first drafts of a process have other things to do besides: what drafting costs is not known
# before so many.
_NUM_DRAFTED_FIRST = 3
# Drafts are measured against plain steps, which are therefore taken now and then.
_STEPS_BETWEEN_PLAIN = 64
_FIRST_WAIT, _LONGEST_WAIT = 32, 512
_MOST_TRIALS = 5
# Asking costs time as well, a twentieth of a small model's step: whoever was refused so often in a
# row is asked again only after so many steps.
_REFUSALS_BEFORE_REST, _STEPS_OF_REST = 16, 3
# While drafting costs time, a trial asks for little; what it costs is not known without one.
_FREE_TRIAL, _TRIAL = 3, 1
_UNKNOWN_COST_TRIAL = 2


@dataclass(frozen=True, slots=True)
class Asking:
    """A decoding request and what it is offered, the preferred first."""

    request: Request
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """An offer taken up for `num_tokens` tokens; for none it is refused."""

    offer: Offer
    num_tokens: int


class DraftPolicy(Protocol):
    """What decides how much is drafted."""

    def is_to_ask(self, request: Request) -> bool:
        """Say whether to look for drafts for a decoding request at all; called once a step."""

    def choose(
        self, asking: Sequence[Asking], num_rows: int, num_others: int
    ) -> list[Taken | None]:
        """Say for each request what to draft in a step of `num_rows` rows before drafts.

        `num_others` counts the decoding requests in it that are offered nothing.
        """

    def note_drafting(self, num_requests: int, longest: int, seconds: float) -> None:
        """Take in what drafting has cost that is not free."""

    def note_step(self, num_decoding: int, num_rows: int, seconds: float) -> None:
        """Take in what a step has cost."""

    def note_verified(self, request: Request, source: str, drafted: int, accepted: int) -> None:
        """Take in how many drafts of a request were right."""

    def plain_s(self, num_decoding: int) -> float | None:
        """Return what a step of so many requests costs without drafts, None where unknown."""

    def why_plain(self, request: Request) -> str:
        """Return why a request's last offers were refused; empty where one was taken up."""

    def settle(self, requests: Sequence[Request]) -> None:
        """Forget what belongs to requests that have left."""


class FixedDraftPolicy:
    """Takes the first offer, for up to `num_tokens` tokens, whatever it costs."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def is_to_ask(self, request: Request) -> bool:
        return True

    def choose(
        self, asking: Sequence[Asking], num_rows: int, num_others: int
    ) -> list[Taken | None]:
        firsts = [ask.offers[0] for ask in asking]
        return [Taken(offer, min(offer.most, self._num_tokens)) for offer in firsts]

    def note_drafting(self, num_requests: int, longest: int, seconds: float) -> None:
        return

    def note_step(self, num_decoding: int, num_rows: int, seconds: float) -> None:
        return

    def note_verified(self, request: Request, source: str, drafted: int, accepted: int) -> None:
        return

    def plain_s(self, num_decoding: int) -> float | None:
        return None

    def why_plain(self, request: Request) -> str:
        return ""

    def settle(self, requests: Sequence[Request]) -> None:
        return


@dataclass(slots=True)
class _Habit:
    """What one request has shown about one source of drafts."""

    acceptance: Acceptance
    num_refused: int = 0
    num_trials: int = 0

    @property
    def wait(self) -> int:
        """How many refused offers are between two trials."""
        return min(_LONGEST_WAIT, _FIRST_WAIT << self.num_trials)


@dataclass(slots=True)
class _Record:
    """What is known of one request: its habits by source, and how its last offers fared."""

    habits: dict[str, _Habit] = field(default_factory=dict)
    why_plain: str = ""
    num_refused: int = 0
    num_to_rest: int = 0

    def note_refusal(self, habit: _Habit, why: str) -> None:
        """Take in one more refusal; after many in a row the request rests for a while."""
        self.why_plain = why
        self.num_refused += 1
        habit.num_refused += 1
        if self.num_refused >= _REFUSALS_BEFORE_REST:
            self.num_to_rest = _STEPS_OF_REST
            habit.num_refused += _STEPS_OF_REST  # what it would have been offered meanwhile


@dataclass(slots=True)
class _Costs:
    """What steps with some number of decoding requests cost."""

    verify: CostCurve = field(default_factory=lambda: CostCurve(_VERIFY_SLOPE))
    draft: CostCurve = field(default_factory=lambda: CostCurve(_DRAFT_SLOPE))
    steps_since_plain: int = 0

    @property
    def knows_drafting(self) -> bool:
        """Whether drafting has been measured often enough to be believed."""
        return self.draft.num_noted >= _NUM_DRAFTED_FIRST


class AdaptiveDraftPolicy:
    """Takes what promises the most tokens per second, and nothing where plain decoding does."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._general: dict[str, Acceptance] = {}
        self._records: dict[Request, _Record] = {}

    def is_to_ask(self, request: Request) -> bool:
        record = self._record(request)
        if not record.num_to_rest:
            return True
        record.num_to_rest -= 1
        return False

    def choose(
        self, asking: Sequence[Asking], num_rows: int, num_others: int
    ) -> list[Taken | None]:
        num_decoding = len(asking) + num_others
        costs = self._costs_of(num_decoding)
        if self._needs_plain(costs, num_rows, num_decoding):
            return [None] * len(asking)
        best = [self._best_offer(ask, costs, num_rows) for ask in asking]
        chances = [self._chance(a.request, o, costs) for a, o in zip(asking, best, strict=True)]
        choice = choose_lengths(
            chances, num_rows, num_others, costs.verify.seconds, _draft_s(costs)
        )
        return [
            self._take(ask.request, offer, length)
            for ask, offer, length in zip(asking, best, choice.lengths, strict=True)
        ]

    def _needs_plain(self, costs: _Costs, num_rows: int, num_decoding: int) -> bool:
        """Whether this step had better be a plain one, to be compared with."""
        if num_rows > num_decoding:  # a prompt beside it decides what the step costs
            return costs.verify.is_empty
        return (
            costs.verify.num_measured(num_rows) < _NUM_PLAIN_FIRST
            or costs.steps_since_plain >= _STEPS_BETWEEN_PLAIN
        )

    def _best_offer(self, ask: Asking, costs: _Costs, num_rows: int) -> Offer:
        """Return the offer that would gain most by itself; the preferred one where none would."""
        best, best_gain = ask.offers[0], 1.0
        if len(ask.offers) == 1:
            return best
        for offer in ask.offers:
            chance = self._chance(ask.request, offer, costs)
            choice = choose_lengths([chance], num_rows, 0, costs.verify.seconds, _draft_s(costs))
            if choice.gain > best_gain:
                best, best_gain = offer, choice.gain
        return best

    def _chance(self, request: Request, offer: Offer, costs: _Costs) -> Chance:
        acceptance = self._habit(request, offer.source).acceptance
        is_unknown = not costs.knows_drafting and not offer.is_free
        most = min(offer.most, _UNKNOWN_COST_TRIAL) if is_unknown else offer.most
        return Chance(acceptance.survival(most), offer.is_free)

    def _take(self, request: Request, offer: Offer, length: int) -> Taken | None:
        """Take an offer up, or refuse it but for a trial after a while."""
        record, habit = self._record(request), self._habit(request, offer.source)
        if length:
            record.why_plain = ""
            record.num_refused = habit.num_refused = habit.num_trials = 0
            return Taken(offer, length)
        likely = habit.acceptance.survival(1)[0]
        record.note_refusal(habit, f"too dear for guesses {likely:.0%} likely")
        if habit.num_refused < habit.wait or habit.num_trials >= _MOST_TRIALS:
            return None
        habit.num_refused = 0
        habit.num_trials += 1
        return Taken(offer, min(_FREE_TRIAL if offer.is_free else _TRIAL, offer.most))

    def note_drafting(self, num_requests: int, longest: int, seconds: float) -> None:
        self._costs_of(num_requests).draft.note(longest, seconds)

    def note_step(self, num_decoding: int, num_rows: int, seconds: float) -> None:
        costs = self._costs_of(num_decoding)
        costs.verify.note(num_rows, seconds)
        is_plain = num_rows == num_decoding
        costs.steps_since_plain = 0 if is_plain else costs.steps_since_plain + 1

    def note_verified(self, request: Request, source: str, drafted: int, accepted: int) -> None:
        self._habit(request, source).acceptance.note(drafted, accepted)
        self._general[source].note(drafted, accepted)

    def plain_s(self, num_decoding: int) -> float | None:
        verify = self._costs_of(num_decoding).verify
        return verify.seconds(num_decoding) if not verify.is_empty else None

    def why_plain(self, request: Request) -> str:
        return self._record(request).why_plain

    def settle(self, requests: Sequence[Request]) -> None:
        unfinished = set(requests)
        for request in [r for r in self._records if r not in unfinished]:
            del self._records[request]

    def _costs_of(self, num_decoding: int) -> _Costs:
        return self._costs.setdefault(num_decoding, _Costs())

    def _record(self, request: Request) -> _Record:
        return self._records.setdefault(request, _Record())

    def _habit(self, request: Request, source: str) -> _Habit:
        habits = self._record(request).habits
        if source not in habits:
            general = self._general.setdefault(source, Acceptance(_PRIOR))
            habits[source] = _Habit(general.renewed())
        return habits[source]


def _draft_s(costs: _Costs) -> Callable[[int], float]:
    """Return what drafting costs by its length; nothing until it has been tried a few times."""
    return costs.draft.seconds if costs.knows_drafting else lambda longest: 0.0
