"""Pace: which offers are taken up, and for how many tokens, from what has been measured so far.

Keeps the cost curves and acceptances that `draft_length` reckons with, and tries again now and then
what does not pay. Knows requests as keys only; drafts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvchat.engine.draft_length import Acceptance, Chance, CostCurve, choose_lengths
from kvchat.engine.drafters import Offer
from kvchat.engine.request import Request

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
_MOST_PROBES = 5
# Asking costs time as well, a twentieth of a small model's step: whoever was refused so often in a
# row is asked again only after so many steps.
_REFUSALS_BEFORE_REST, _STEPS_OF_REST = 16, 3
# While drafting costs time, a probe asks for little; what it costs is not known without one.
_FREE_PROBE, _PROBE = 3, 1
_UNKNOWN_COST_PROBE = 2


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


class Pace(Protocol):
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


class FixedPace:
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
    num_probes: int = 0

    @property
    def wait(self) -> int:
        """How many refused offers are between two probes."""
        return min(_LONGEST_WAIT, _FIRST_WAIT << self.num_probes)


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


class AdaptivePace:
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
        most = min(offer.most, _UNKNOWN_COST_PROBE) if is_unknown else offer.most
        return Chance(acceptance.survival(most), offer.is_free)

    def _take(self, request: Request, offer: Offer, length: int) -> Taken | None:
        """Take an offer up, or refuse it but for a probe after a while."""
        record, habit = self._record(request), self._habit(request, offer.source)
        if length:
            record.why_plain = ""
            record.num_refused = habit.num_refused = habit.num_probes = 0
            return Taken(offer, length)
        likely = habit.acceptance.survival(1)[0]
        record.note_refusal(habit, f"too dear for guesses {likely:.0%} likely")
        if habit.num_refused < habit.wait or habit.num_probes >= _MOST_PROBES:
            return None
        habit.num_refused = 0
        habit.num_probes += 1
        return Taken(offer, min(_FREE_PROBE if offer.is_free else _PROBE, offer.most))

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
