"""DraftPolicy: chooses which offers of drafts to accept, and for how many tokens.

It uses measurements: the cost of steps by their number of rows, and the share of drafts that were
right. From these it chooses the lengths that give the most tokens per second. Offers that do not
pay are tried again from time to time. Requests are used only as keys.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvchat.engine.drafters import Offer
from kvchat.engine.request import Request

MAX_DRAFTED = 16
# The least weight of a new measurement in the moving average of a cost or an acceptance.
_COST_WEIGHT = 0.2
_ACCEPTANCE_WEIGHT = 1 / 20
# A longer context or a busier machine raises the cost of all counts of rows: each measurement
# also moves the other counts, by this power of its surprise.
_SHARED_DRIFT = 0.15
_NUM_FIRST = 3
# The ratio of measured to expected seconds is limited to this factor: more is an outlier.
_MOST_SURPRISE = 2.0
# The least expected gain for which drafts are used: a smaller one is within measuring errors.
_LEAST_GAIN = 0.03
# No request may get slower by more than this share through the drafts of others.
_MOST_SLOWDOWN = 0.05


class CostCurve:
    """Seconds of a step by its count of rows: measured for some counts, interpolated between them.

    Outside the measured counts, each further row is taken to cost `slope` times the first. The
    curve never falls: more rows never cost less.
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
        """Return how many steps have been recorded."""
        return sum(self._visits)

    def num_measured(self, rows: int) -> int:
        """Return how often the grade of this count of rows was measured."""
        place = bisect_left(self._rows, _grade(rows))
        is_there = place < len(self._rows) and self._rows[place] == _grade(rows)
        return self._visits[place] if is_there else 0

    def note(self, rows: int, seconds: float) -> None:
        """Record one measured step."""
        rows = _grade(rows)
        place = bisect_left(self._rows, rows)
        if place == len(self._rows) or self._rows[place] != rows:
            self._rows.insert(place, rows)
            self._seconds.insert(place, seconds)
            self._visits.insert(place, 1)
            return
        self._visits[place] += 1
        if self._visits[place] <= _NUM_FIRST:
            # One-time work can only make a first step slower. The least of the first steps counts:
            # a count that seems too expensive is not used again, and would never be corrected.
            self._seconds[place] = min(self._seconds[place], seconds)
            return
        surprise = max(1 / _MOST_SURPRISE, min(_MOST_SURPRISE, seconds / self._seconds[place]))
        self._seconds = [known * surprise**_SHARED_DRIFT for known in self._seconds]
        self._seconds[place] *= surprise**_COST_WEIGHT

    def seconds(self, rows: float) -> float:
        """Return the cost of so many rows; at least one count must have been measured."""
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

    def _ratio(self, rows: float, known_rows: int) -> float:
        return (1 + self._slope * (rows - 1)) / (1 + self._slope * (known_rows - 1))


def _grade(rows: int) -> int:
    """Return counts up to 32 as they are; round larger ones down to eighths of a power of two."""
    if rows <= 32:
        return rows
    unit = 1 << (rows.bit_length() - 4)
    return rows // unit * unit


class Acceptance:
    """The probability that a draft is right at each position, given that those before are right.

    Before measurements it is `prior`, which counts as much as `num_prior` of them.
    """

    def __init__(self, prior: float, num_prior: int = 1) -> None:
        self._likely = [prior] * MAX_DRAFTED
        self._counts = [0] * MAX_DRAFTED
        self._num_prior = num_prior

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Record one verified draft."""
        for place in range(min(num_accepted, MAX_DRAFTED)):
            self._move(place, 1.0)
        if num_accepted < min(num_drafted, MAX_DRAFTED):
            self._move(num_accepted, 0.0)

    def _move(self, place: int, outcome: float) -> None:
        self._counts[place] += 1
        weight = max(_ACCEPTANCE_WEIGHT, 1 / (self._counts[place] + self._num_prior))
        self._likely[place] += weight * (outcome - self._likely[place])

    def survival(self, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... `count` drafts are all right.

        A position that was never reached uses the value of the nearest one before it that was.
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
        """Return a copy for a new request, whose counts are cut to 3 so that it adapts quickly."""
        copy = Acceptance(0.0, self._num_prior)
        copy._likely = list(self._likely)
        copy._counts = [min(count, 3) for count in self._counts]
        return copy


@dataclass(frozen=True, slots=True)
class Chance:
    """One request: `survival[i]` is the probability that its first i + 1 drafts are all right.

    `is_free` says that making its drafts costs no time. `num_again` are the rows that the next step
    has to compute again if a draft is wrong, beside those of right drafts: of recurrent layers;
    None without any.
    """

    survival: Sequence[float]
    is_free: bool
    num_again: int | None = None

    def rows_again(self, num_drafts: int) -> float:
        """Return how many rows are to be expected again after so many drafts, at least one."""
        if self.num_again is None:
            return 0.0
        right = self.survival[: num_drafts - 1]
        all_right = self.survival[num_drafts - 1]
        return self.num_again * (1 - all_right) + sum(right) - len(right) * all_right


@dataclass(frozen=True, slots=True)
class Choice:
    """`lengths[i]` is the number of tokens to draft for request i.

    `gain` is the expected tokens per second, as a multiple of plain decoding.
    """

    lengths: tuple[int, ...]
    gain: float


def choose_lengths(
    chances: Sequence[Chance],
    num_rows: int,
    num_others: int,
    verify_s: Callable[[float], float],
    draft_s: Callable[[int], float],
) -> Choice:
    """Choose the lengths that give the most tokens per second over all decoding requests.

    num_rows     rows of the step without any draft
    num_others   decoding requests in it that have nothing to draft
    verify_s     seconds of a step by its rows; those that are computed again cost as much as more
                 rows of this step
    draft_s      seconds of drafting by the longest draft that is not free

    Drafts are added one by one, the most likely first. Lengths are refused if their gain is too
    small, or if some request would get its tokens noticeably slower than in plain decoding. The
    search stops when even all remaining drafts could not pay for the cost so far. That is safe:
    seconds never fall with rows or with depth.
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
    again = [0.0] * len(chances)
    depth = 0
    most_tokens = num_tokens - sum(survival for survival, _, _ in offered)
    for count, (negative, position, index) in enumerate(offered, start=1):
        lengths[index] += 1
        expected[index] -= negative
        num_tokens -= negative
        if not chances[index].is_free:
            depth = max(depth, position + 1)
        again[index] = chances[index].rows_again(lengths[index])
        seconds = verify_s(num_rows + count + sum(again)) + (draft_s(depth) if depth else 0.0)
        if most_tokens / seconds / plain_rate <= max(best.gain, 1 + _LEAST_GAIN):
            break
        gain = num_tokens / seconds / plain_rate
        slowest = 1.0 if num_others else min(expected)
        is_fair = slowest * plain_s >= (1 - _MOST_SLOWDOWN) * seconds
        if is_fair and gain > max(best.gain, 1 + _LEAST_GAIN):
            best = Choice(tuple(lengths), gain)
    return best


# Costs before measurement: a further row, and a further drafted token, relative to the first.
_VERIFY_SLOPE, _DRAFT_SLOPE = 0.05, 1.0
_PRIOR = 0.6
# A head was trained for this model: a few wrong guesses at first are bad luck. By source of drafts.
_OTHER_PRIORS = {"head": (0.75, 6)}
_NUM_PLAIN_FIRST = 2
# The first drafts of a process do one-time work too: the cost of drafting counts as unknown before
# this many.
_NUM_DRAFTED_FIRST = 3
# Drafts are compared with plain steps, so a plain step is run after this many others.
_STEPS_BETWEEN_PLAIN = 64
_FIRST_WAIT, _LONGEST_WAIT = 32, 512
_MOST_TRIALS = 5
# Asking drafters costs time too, a twentieth of a small model's step. A request refused this often
# in a row is asked again only after this many steps.
_REFUSALS_BEFORE_REST, _STEPS_OF_REST = 16, 3
# Lengths of trials: short where drafting costs time, as only a trial can measure that cost.
_FREE_TRIAL, _TRIAL = 3, 1
_UNKNOWN_COST_TRIAL = 2


@dataclass(frozen=True, slots=True)
class RequestOffers:
    """A decoding request and its offers, the preferred first; `num_again` as of `Chance`."""

    request: Request
    offers: tuple[Offer, ...]
    num_again: int | None = None


@dataclass(frozen=True, slots=True)
class AcceptedOffer:
    """An accepted offer, for `num_tokens` tokens."""

    offer: Offer
    num_tokens: int


@dataclass(slots=True)
class _SourceRecord:
    """The record of one request and one source of drafts."""

    acceptance: Acceptance
    num_refused: int = 0
    num_trials: int = 0

    @property
    def wait(self) -> int:
        """The number of refused offers before the next trial."""
        return min(_LONGEST_WAIT, _FIRST_WAIT << self.num_trials)


@dataclass(slots=True)
class _Record:
    """The records of one request by source, and its latest refusals."""

    sources: dict[str, _SourceRecord] = field(default_factory=dict)
    why_plain: str = ""
    num_refused: int = 0
    num_to_rest: int = 0

    def note_refusal(self, source_record: _SourceRecord, why: str) -> None:
        """Record one more refusal; after many in a row the request is not asked for some steps."""
        self.why_plain = why
        self.num_refused += 1
        source_record.num_refused += 1
        if self.num_refused >= _REFUSALS_BEFORE_REST:
            self.num_to_rest = _STEPS_OF_REST
            source_record.num_refused += _STEPS_OF_REST  # count the offers of the skipped steps


@dataclass(slots=True)
class _Costs:
    """Costs of steps with one number of decoding requests."""

    verify: CostCurve = field(default_factory=lambda: CostCurve(_VERIFY_SLOPE))
    draft: CostCurve = field(default_factory=lambda: CostCurve(_DRAFT_SLOPE))
    steps_since_plain: int = 0

    @property
    def knows_drafting(self) -> bool:
        """Whether drafting has been measured often enough to use its cost."""
        return self.draft.num_noted >= _NUM_DRAFTED_FIRST


class DraftPolicy:
    """Accepts the offers with the most expected tokens per second; none if plain decoding wins."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._general: dict[str, Acceptance] = {}
        self._records: dict[Request, _Record] = {}

    def is_to_ask(self, request: Request) -> bool:
        """Return whether to ask drafters for a decoding request; called once a step."""
        record = self._record(request)
        if not record.num_to_rest:
            return True
        record.num_to_rest -= 1
        return False

    def choose(
        self, asking: Sequence[RequestOffers], num_rows: int, num_others: int
    ) -> list[AcceptedOffer | None]:
        """Return for each request the accepted offer, None for no draft.

        `num_rows` counts the rows of the step before drafts, `num_others` its decoding requests
        without an offer.
        """
        num_decoding = len(asking) + num_others
        costs = self._costs_of(num_decoding)
        if self._needs_plain(costs, num_rows, num_decoding):
            return [None] * len(asking)
        best = [self._best_offer(ask, costs, num_rows) for ask in asking]
        chances = [self._chance(ask, o, costs) for ask, o in zip(asking, best, strict=True)]
        choice = choose_lengths(
            chances, num_rows, num_others, costs.verify.seconds, _draft_s(costs)
        )
        return [
            self._take(ask.request, offer, length)
            for ask, offer, length in zip(asking, best, choice.lengths, strict=True)
        ]

    def _needs_plain(self, costs: _Costs, num_rows: int, num_decoding: int) -> bool:
        """Whether this step should be a plain one, to measure what drafts are compared with."""
        if num_rows > num_decoding:  # with prefill in the step its cost says little
            return costs.verify.is_empty
        return (
            costs.verify.num_measured(num_rows) < _NUM_PLAIN_FIRST
            or costs.steps_since_plain >= _STEPS_BETWEEN_PLAIN
        )

    def _best_offer(self, ask: RequestOffers, costs: _Costs, num_rows: int) -> Offer:
        """Return the offer with the largest gain by itself; the preferred one if none has any."""
        best, best_gain = ask.offers[0], 1.0
        if len(ask.offers) == 1:
            return best
        for offer in ask.offers:
            chance = self._chance(ask, offer, costs)
            choice = choose_lengths([chance], num_rows, 0, costs.verify.seconds, _draft_s(costs))
            if choice.gain > best_gain:
                best, best_gain = offer, choice.gain
        return best

    def _chance(self, ask: RequestOffers, offer: Offer, costs: _Costs) -> Chance:
        acceptance = self._source_record(ask.request, offer.source).acceptance
        is_unknown = not costs.knows_drafting and not offer.is_free
        most = min(offer.most, _UNKNOWN_COST_TRIAL) if is_unknown else offer.most
        return Chance(acceptance.survival(most), offer.is_free, ask.num_again)

    def _take(self, request: Request, offer: Offer, length: int) -> AcceptedOffer | None:
        """Accept an offer, or refuse it; after enough refusals accept a short trial."""
        record, source_record = self._record(request), self._source_record(request, offer.source)
        if length:
            record.why_plain = ""
            record.num_refused = source_record.num_refused = source_record.num_trials = 0
            return AcceptedOffer(offer, length)
        likely = source_record.acceptance.survival(1)[0]
        record.note_refusal(source_record, f"too dear for guesses {likely:.0%} likely")
        if (
            source_record.num_refused < source_record.wait
            or source_record.num_trials >= _MOST_TRIALS
        ):
            return None
        source_record.num_refused = 0
        source_record.num_trials += 1
        return AcceptedOffer(offer, min(_FREE_TRIAL if offer.is_free else _TRIAL, offer.most))

    def note_drafting(self, num_requests: int, longest: int, seconds: float) -> None:
        """Record the cost of drafting that is not free; `longest` is the longest draft."""
        self._costs_of(num_requests).draft.note(longest, seconds)

    def note_step(self, num_decoding: int, num_rows: int, seconds: float) -> None:
        """Record the cost of a step."""
        costs = self._costs_of(num_decoding)
        costs.verify.note(num_rows, seconds)
        is_plain = num_rows == num_decoding
        costs.steps_since_plain = 0 if is_plain else costs.steps_since_plain + 1

    def note_verified(self, request: Request, source: str, drafted: int, accepted: int) -> None:
        """Record how many of a request's drafts were right."""
        self._source_record(request, source).acceptance.note(drafted, accepted)
        self._general[source].note(drafted, accepted)

    def plain_s(self, num_decoding: int) -> float | None:
        """Return the seconds of a step of so many requests without drafts; None if unknown."""
        verify = self._costs_of(num_decoding).verify
        return verify.seconds(num_decoding) if not verify.is_empty else None

    def why_plain(self, request: Request) -> str:
        """Return why a request's last offer was refused; empty if it was accepted."""
        return self._record(request).why_plain

    def settle(self, requests: Sequence[Request]) -> None:
        """Forget the records of all but the unfinished `requests`."""
        unfinished = set(requests)
        for request in [r for r in self._records if r not in unfinished]:
            del self._records[request]

    def _costs_of(self, num_decoding: int) -> _Costs:
        return self._costs.setdefault(num_decoding, _Costs())

    def _record(self, request: Request) -> _Record:
        return self._records.setdefault(request, _Record())

    def _source_record(self, request: Request, source: str) -> _SourceRecord:
        sources = self._record(request).sources
        if source not in sources:
            prior = _OTHER_PRIORS.get(source, (_PRIOR, 1))
            general = self._general.setdefault(source, Acceptance(*prior))
            sources[source] = _SourceRecord(general.renewed())
        return sources[source]


def _draft_s(costs: _Costs) -> Callable[[int], float]:
    """Return the seconds of drafting by length; 0 until it was measured a few times."""
    return costs.draft.seconds if costs.knows_drafting else lambda longest: 0.0
