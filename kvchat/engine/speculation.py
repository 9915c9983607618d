"""Speculation: a step's decoding requests get drafts, as many as pay and as there is room for.

Asks the drafters, lets the policy choose, reserves blocks, and notes what came of it. A drafter
that fails is asked no more, and decoding goes on without it. Draws, verifies and appends nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvchat.cache.block_manager import CacheManager
from kvchat.core.errors import UsageError
from kvchat.core.stats import SpeculationStatus
from kvchat.engine.draft_policy import MAX_DRAFTED, AdaptiveDraftPolicy, Asking, DraftPolicy
from kvchat.engine.drafters import Drafter, Offer, Wanted, WhenWritten
from kvchat.engine.request import Drafting, Request
from kvchat.engine.scheduler import ScheduledRequest

_log = logging.getLogger(__name__)

# What a drafter lacks is made up for in this share of every step's time.
_SHARE_FOR_CATCHING_UP = 0.25


class Mode(StrEnum):
    """Which drafters are asked: none, all of them the preferred first, or one."""

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Limits:
    """What drafts must fit into: ids below `vocab_size`, `max_context` tokens of prompt and
    completion together, `max_step_tokens` rows of a step.
    """

    vocab_size: int
    max_context: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class _Order:
    """What one drafter is to do for one scheduled request."""

    scheduled: ScheduledRequest
    drafter: Drafter
    offer: Offer
    num_tokens: int


class Speculation:
    """Drafts for one engine. `drafters` stand in the order of preference; `clock` returns seconds.

    A step is a `draft`, and either a `note` of what was drawn or nothing where it failed, and a
    `update`. While `is_on` is false, in mode OFF, the engine calls none of these.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        mode: Mode = Mode.AUTO,
        policy: DraftPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total = Drafting()
        self._mode = mode
        self.is_on = mode is not Mode.OFF
        self._drafters = list(drafters)
        self._policy: DraftPolicy = policy if policy is not None else AdaptiveDraftPolicy()
        self._clock = clock
        self._sources: dict[ScheduledRequest, str] = {}
        self._step_s = 0.0
        self._drafting_s = 0.0
        self.failures: dict[str, Exception] = {}

    @property
    def mode(self) -> Mode:
        return self._mode

    def switch(self, mode: Mode) -> None:
        """Ask other drafters from now on; raises UsageError where there is none of that kind."""
        names = {drafter.name for drafter in self._drafters}
        if mode is Mode.DRAFT and mode not in names:
            failure = self.failures.get(mode)
            reason = f"failed: {failure!r}" if failure else "is not loaded"
            raise UsageError(f"The draft model {reason}.", "Start kvchat with --draft NAME.")
        self._mode = mode
        self.is_on = mode is not Mode.OFF
        if not self.is_on:
            self.update(())  # nothing keeps up with the unfinished requests any more

    def status(self) -> SpeculationStatus:
        """Return counts for people; changes nothing."""
        names = tuple(drafter.name for drafter in self._drafters)
        failed = tuple(f"{name}: {error!r}" for name, error in self.failures.items())
        return SpeculationStatus(self._mode, names, self.total.use(), failed)

    def prepare(self) -> None:
        """Let the drafters of the mode make ready, while nobody waits for a first token."""
        for drafter in self._asked():
            try:
                drafter.prepare()
            except Exception as error:
                self._drop(drafter, error)

    def draft(
        self, plan: Sequence[ScheduledRequest], cache: CacheManager, limits: Limits
    ) -> list[ScheduledRequest]:
        """Return the plan with drafts, whose blocks are reserved."""
        self._sources.clear()
        self._drafting_s = 0.0
        orders = self._orders(plan, limits)
        drafts = self._propose(orders) if orders else {}
        return [
            self._with_drafts(scheduled, drafts.get(scheduled, ()), cache, limits)
            for scheduled in plan
        ]

    def _orders(self, plan: Sequence[ScheduledRequest], limits: Limits) -> list[_Order]:
        """Choose what is to be drafted, within the rows that a step has."""
        decoding = [scheduled for scheduled in plan if scheduled.request.is_decoding]
        offered = {
            scheduled: self._offers(scheduled.request, _most(scheduled, limits))
            if self._policy.is_to_ask(scheduled.request)
            else {}
            for scheduled in decoding
        }
        asking = [scheduled for scheduled in decoding if offered[scheduled]]
        if not asking:
            return []
        num_rows = sum(scheduled.num_rows for scheduled in plan)
        taken = self._policy.choose(
            [Asking(scheduled.request, tuple(offered[scheduled])) for scheduled in asking],
            num_rows,
            len(decoding) - len(asking),
        )
        orders, room = [], limits.max_step_tokens - num_rows
        for scheduled, take in zip(asking, taken, strict=True):
            num_tokens = min(take.num_tokens, room) if take is not None else 0
            if take is not None and num_tokens:
                orders.append(
                    _Order(scheduled, offered[scheduled][take.offer], take.offer, num_tokens)
                )
                room -= num_tokens
        return orders

    def _offers(self, request: Request, most: int) -> dict[Offer, Drafter]:
        """Ask every drafter of the mode, in order."""
        offers: dict[Offer, Drafter] = {}
        for drafter in self._asked() if most > 0 else ():
            try:
                offer = drafter.offer(request, most)
            except Exception as error:  # a drafter may be anybody's model
                self._drop(drafter, error)
                continue
            if offer is not None:
                offers[offer] = drafter
        return offers

    def _asked(self) -> list[Drafter]:
        if self._mode is Mode.AUTO:
            return list(self._drafters)
        return [drafter for drafter in self._drafters if drafter.name == self._mode]

    def _propose(self, orders: Sequence[_Order]) -> dict[ScheduledRequest, Sequence[int]]:
        """Have every drafter draft for all its requests at once."""
        drafts: dict[ScheduledRequest, Sequence[int]] = {}
        for drafter in list(self._drafters):
            own = [order for order in orders if order.drafter is drafter]
            if not own:
                continue
            wanted = [Wanted(order.scheduled.request, order.num_tokens) for order in own]
            asked_s = self._clock()
            try:
                drafter.catch_up(wanted)
                began_s = self._clock()
                proposed = drafter.propose(wanted)
            except Exception as error:
                self._drop(drafter, error)
                continue
            if not own[0].offer.is_free:
                longest = max(order.num_tokens for order in own)
                ended_s = self._clock()
                self._drafting_s += ended_s - asked_s
                self._policy.note_drafting(len(own), longest, ended_s - began_s)
            for order, token_ids in zip(own, proposed, strict=True):
                drafts[order.scheduled] = token_ids[: order.num_tokens]
                self._sources[order.scheduled] = order.offer.source
        return drafts

    def _with_drafts(
        self,
        scheduled: ScheduledRequest,
        token_ids: Sequence[int],
        cache: CacheManager,
        limits: Limits,
    ) -> ScheduledRequest:
        """Reserve room for a draft; where there is none, and nobody is to give way, cut it."""
        drafts = tuple(_leading(token_ids, limits.vocab_size))
        request = scheduled.request
        if not drafts or request.table is None:
            return scheduled
        start, end = request.num_computed, request.num_computed + scheduled.num_tokens
        num_tokens = len(drafts)
        while num_tokens and not cache.reserve(request.table, start, end + num_tokens):
            num_tokens -= 1
        source = self._sources.pop(scheduled)
        longer = replace(scheduled, drafts=drafts[:num_tokens])
        if num_tokens:
            self._sources[longer] = source
        return longer

    def note(
        self,
        plan: Sequence[ScheduledRequest],
        drawn: dict[ScheduledRequest, list[int]],
        seconds: float,
    ) -> None:
        """Take in what a step has cost and which of its drafts were right."""
        self._step_s = seconds
        num_decoding = sum(scheduled.request.is_decoding for scheduled in plan)
        if num_decoding:
            num_rows = sum(scheduled.num_rows for scheduled in plan)
            self._policy.note_step(num_decoding, num_rows, seconds)
            if num_rows == num_decoding + sum(len(scheduled.drafts) for scheduled in plan):
                self._note_speed(plan, drawn, seconds + self._drafting_s)
        for scheduled in plan:
            source = self._sources.get(scheduled)
            if source is None:
                continue
            num_accepted = accepted_len(scheduled.drafts, drawn[scheduled])
            self._policy.note_verified(
                scheduled.request, source, len(scheduled.drafts), num_accepted
            )
            self.total.num_accepted += num_accepted  # a request counts those it can use
            for counts in (scheduled.request.drafting, self.total):
                counts.num_drafted += len(scheduled.drafts)
                counts.num_verified += 1

    def _note_speed(
        self,
        plan: Sequence[ScheduledRequest],
        drawn: dict[ScheduledRequest, list[int]],
        seconds: float,
    ) -> None:
        """Hold what a step of decoding alone has cost against plain steps for the same tokens."""
        plain_s = self._policy.plain_s(len(plan))
        if plain_s is None:
            return
        plain_s = min(plain_s, seconds)  # or the machine was busier when plain steps were measured
        for scheduled in plan:
            num_tokens = 1 + accepted_len(scheduled.drafts, drawn[scheduled])
            own = scheduled.request.drafting
            own.why_plain = self._policy.why_plain(scheduled.request)
            own.spent_s += seconds
            own.plain_s += plain_s * num_tokens
            self.total.spent_s += seconds / len(plan)
            self.total.plain_s += plain_s * num_tokens / len(plan)
            self.total.why_plain = own.why_plain

    def update(self, requests: Sequence[Request]) -> None:
        """Have the drafters keep up with the unfinished requests, in a part of a step's time."""
        self._policy.settle(requests)
        seconds, self._step_s = self._step_s * _SHARE_FOR_CATCHING_UP, 0.0
        asked = self._asked()
        for drafter in list(self._drafters):
            try:
                drafter.update(requests if drafter in asked else [], seconds)
            except Exception as error:
                self._drop(drafter, error)

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """Let the drafters of the mode take in contexts that no request has asked for."""
        for drafter in self._asked():
            try:
                drafter.learn(contexts)
            except Exception as error:
                self._drop(drafter, error)

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> list[WhenWritten]:
        """Have drafters forget contexts behind so many tokens of each; return what tells when all
        of them have nothing of theirs still to write.
        """
        waits: list[WhenWritten] = []
        for drafter in list(self._drafters):
            try:
                wait = drafter.forget(contexts)
            except Exception as error:
                self._drop(drafter, error)
                continue
            if wait is not None:
                waits.append(wait)
        return waits

    def _drop(self, drafter: Drafter, error: Exception) -> None:
        """Ask a drafter no more."""
        _log.error("the %s drafter failed", drafter.name, exc_info=error)
        self._drafters.remove(drafter)
        self.failures[drafter.name] = error
        _close(drafter)

    def close(self) -> None:
        """Let the drafters keep what they have. Idempotent."""
        for drafter in self._drafters:
            _close(drafter)
        self._drafters.clear()


def _close(drafter: Drafter) -> None:
    try:
        drafter.close()
    except Exception:
        _log.exception("the %s drafter did not close in order", drafter.name)


def _most(scheduled: ScheduledRequest, limits: Limits) -> int:
    """Return how many drafts could still be of use: the last token of all is never drafted."""
    request = scheduled.request
    most = min(MAX_DRAFTED, limits.max_context - len(request.ids) - 1)
    if request.spec.max_tokens is not None:
        most = min(most, request.spec.max_tokens - request.num_generated - 1)
    return max(0, most)


def _leading(token_ids: Iterable[int], vocab_size: int) -> Iterable[int]:
    """Yield token ids up to the first that the target has no embedding for."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            return
        yield int(token)


def accepted_len(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many leading drafts are right.

    drawn   one token per row of the step, and so one more than there are drafts: the last that
            counts, at index `accepted_len`, was drawn after accepted tokens only
    """
    assert len(drawn) == len(drafts) + 1
    for index, (draft, token) in enumerate(zip(drafts, drawn, strict=False)):
        if draft != token:
            return index
    return len(drafts)
