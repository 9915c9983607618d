"""Speculation: adds drafts to the decoding requests of a step, where they pay and have room.

It asks the drafters for offers, lets the policy choose, reserves blocks, and records the results. A
drafter that raises is removed, and decoding continues without it. Drawing tokens and appending them
is the work of other parts.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.core.errors import UsageError
from kvchat.core.stats import SpeculationStatus
from kvchat.engine.draft_policy import MAX_DRAFTED, DraftPolicy, RequestOffers
from kvchat.engine.drafters import Drafter, DraftOrder, HiddenReader, Offer, WhenWritten
from kvchat.engine.request import Drafting, Request
from kvchat.engine.scheduler import ScheduledRequest

_log = logging.getLogger(__name__)

OfDrafter = TypeVar("OfDrafter", bound=Drafter)

_WHY_LIMITED = "the answer follows a format"
_WHY_BUDGET = "the answer is held to a KV budget"
# Drafters catch up with the requests in this share of each step's time.
_SHARE_FOR_CATCHING_UP = 0.25


class Mode(StrEnum):
    """Which drafters are asked: none, all in order of preference, or one."""

    OFF = "off"
    AUTO = "auto"
    NGRAM = "ngram"
    DRAFT = "draft"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on drafts: ids below `vocab_size`, at most `max_context` tokens of prompt and
    completion together, at most `max_step_tokens` rows in a step.
    """

    vocab_size: int
    max_context: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class _Order:
    """The number of tokens one drafter has to draft for one scheduled request."""

    scheduled: ScheduledRequest
    drafter: Drafter
    offer: Offer
    num_tokens: int


class Speculation:
    """Drafts for one engine. `drafters` are in order of preference; `clock` returns seconds.

    For each step the engine calls `draft`, then `note` unless the step failed, then `update`. While
    `is_on` is false, in mode OFF, the engine calls none of them.
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
        # Asked once: such a question takes longer than what a reader does.
        self._readers = [each for each in drafters if isinstance(each, HiddenReader)]
        self._policy = policy or DraftPolicy()
        self._clock = clock
        self._sources: dict[ScheduledRequest, str] = {}
        self._step_s = 0.0
        self._drafting_s = 0.0
        self.failures: dict[str, Exception] = {}
        # A plain value: with speculation off, a question for the status runs no code of drafting.
        self.status_when_off = self.status()

    @property
    def mode(self) -> Mode:
        return self._mode

    def drafter(self, kind: type[OfDrafter]) -> OfDrafter | None:
        """Return the drafter of a kind; None if there is none."""
        return next((each for each in self._drafters if isinstance(each, kind)), None)

    def switch(self, mode: str) -> None:
        """Change the mode, to a Mode or its name; raises UsageError for another name, and if it is
        DRAFT and there is no draft model.
        """
        if mode not in list(Mode):
            raise UsageError(f"{mode!r} is no kind of drafts.", f"Use {', '.join(Mode)}.")
        mode = Mode(mode)
        names = {drafter.name for drafter in self._drafters}
        if mode is Mode.DRAFT and mode not in names:
            failure = self.failures.get(mode)
            reason = f"failed: {failure!r}" if failure else "is not loaded"
            raise UsageError(f"The draft model {reason}.", "Start kvchat with --draft NAME.")
        if mode is Mode.MTP and mode not in names:
            raise UsageError("The model has no head for the next token in use.")
        self._mode = mode
        self.is_on = mode is not Mode.OFF
        if not self.is_on:
            self.update(())  # drafters drop their state: they get no more updates
            self.status_when_off = self.status()

    def status(self) -> SpeculationStatus:
        """Return the counts shown to users; changes nothing."""
        names = tuple(drafter.name for drafter in self._drafters)
        failed = tuple(f"{name}: {error!r}" for name, error in self.failures.items())
        return SpeculationStatus(self._mode, names, self.total.use(), failed)

    def prepare(self) -> None:
        """Let the drafters of the mode do their one-time work, before decoding needs it."""
        for drafter in self._asked():
            with self._dropping(drafter):
                drafter.prepare()

    def draft(
        self, plan: Sequence[ScheduledRequest], cache: CacheManager, limits: Limits
    ) -> list[ScheduledRequest]:
        """Return the plan with drafts; their blocks are reserved."""
        self._sources.clear()
        self._drafting_s = 0.0
        orders = self._orders(plan, cache, limits)
        drafts = self._propose(orders) if orders else {}
        return [
            self._with_drafts(scheduled, drafts.get(scheduled, ()), cache, limits)
            for scheduled in plan
        ]

    def _orders(
        self, plan: Sequence[ScheduledRequest], cache: CacheManager, limits: Limits
    ) -> list[_Order]:
        """Choose what to draft, within the rows of a step."""
        decoding = [scheduled for scheduled in plan if scheduled.request.is_decoding]
        offered = {
            scheduled: self._offers(scheduled.request, _most(scheduled, cache, limits))
            if self._policy.is_to_ask(scheduled.request)
            else {}
            for scheduled in decoding
        }
        asking = [scheduled for scheduled in decoding if offered[scheduled]]
        if not asking:
            return []
        num_rows = sum(scheduled.num_rows for scheduled in plan)
        taken = self._policy.choose(
            [
                RequestOffers(
                    scheduled.request,
                    tuple(offered[scheduled]),
                    scheduled.num_tokens if cache.reads_again else None,
                )
                for scheduled in asking
            ],
            num_rows,
            len(decoding) - len(asking),
        )
        orders, room = [], max(0, limits.max_step_tokens - num_rows)
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
            with self._dropping(drafter):
                if (offer := drafter.offer(request, most)) is not None:
                    offers[offer] = drafter
        return offers

    def _asked(self) -> list[Drafter]:
        if self._mode is Mode.AUTO:
            return list(self._drafters)
        return [drafter for drafter in self._drafters if drafter.name == self._mode]

    def _propose(self, orders: Sequence[_Order]) -> dict[ScheduledRequest, Sequence[int]]:
        """Call each drafter once, for all its requests."""
        drafts: dict[ScheduledRequest, Sequence[int]] = {}
        for drafter in list(self._drafters):
            own = [order for order in orders if order.drafter is drafter]
            if not own:
                continue
            wanted = [DraftOrder(order.scheduled.request, order.num_tokens) for order in own]
            asked_s, proposed = self._clock(), None
            with self._dropping(drafter):
                drafter.catch_up(wanted)
                began_s = self._clock()
                proposed = drafter.propose(wanted)
            if proposed is None:
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
        """Reserve blocks for a draft; cut it to what fits, as no request is preempted for it."""
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
        """Record a step's cost and which of its drafts were right."""
        self._step_s = seconds
        num_decoding = sum(scheduled.request.is_decoding for scheduled in plan)
        if num_decoding:
            num_rows = sum(scheduled.num_rows for scheduled in plan)
            self._policy.note_step(num_decoding, num_rows, seconds)
            if num_decoding == len(plan):
                self._note_speed(plan, drawn, seconds + self._drafting_s)
        for scheduled in plan:
            source = self._sources.get(scheduled)
            if source is None:
                continue
            num_accepted = accepted_len(scheduled.drafts, drawn[scheduled])
            self._policy.note_verified(
                scheduled.request, source, len(scheduled.drafts), num_accepted
            )
            self.total.num_accepted += num_accepted  # a request counts only those appended to it
            for counts in (scheduled.request.drafting, self.total):
                counts.num_drafted += len(scheduled.drafts)
                counts.num_verified += 1

    def read_hidden(
        self,
        drawn: dict[ScheduledRequest, list[int]],
        hidden: Mapping[ScheduledRequest, torch.Tensor],
    ) -> None:
        """Hand a step's last hidden states to the drafters that go on from them.

        Called before the step's tokens are counted. Those behind wrong drafts are left out.
        """
        asked = self._asked() if hidden else ()
        for drafter in [each for each in self._readers if each in asked]:
            with self._dropping(drafter):
                for scheduled, rows in hidden.items():
                    tokens = drawn.get(scheduled, ())
                    num_right = accepted_len(scheduled.drafts, tokens) if scheduled.drafts else 0
                    drafter.read_hidden(scheduled.request, rows[: scheduled.num_tokens + num_right])

    def _note_speed(
        self,
        plan: Sequence[ScheduledRequest],
        drawn: dict[ScheduledRequest, list[int]],
        seconds: float,
    ) -> None:
        """Compare the cost of a step that only decodes with plain steps for the same tokens."""
        plain_s = self._policy.plain_s(len(plan))
        if plain_s is None:
            return
        plain_s = min(plain_s, seconds)  # plain steps may have been measured on a busier machine
        for scheduled in plan:
            num_tokens = 1 + accepted_len(scheduled.drafts, drawn[scheduled])
            own = scheduled.request.drafting
            own.why_plain = self._why_plain(scheduled.request)
            own.spent_s += seconds
            own.plain_s += plain_s * num_tokens
            self.total.spent_s += seconds / len(plan)
            self.total.plain_s += plain_s * num_tokens / len(plan)
            self.total.why_plain = own.why_plain

    def _why_plain(self, request: Request) -> str:
        if request.constraint is not None:
            return _WHY_LIMITED
        return _WHY_BUDGET if request.has_budget else self._policy.why_plain(request)

    def update(self, requests: Sequence[Request]) -> None:
        """Let the drafters catch up with the unfinished requests, in a share of the step's time."""
        self._policy.settle(requests)
        seconds, self._step_s = self._step_s * _SHARE_FOR_CATCHING_UP, 0.0
        asked = self._asked()
        for drafter in list(self._drafters):
            with self._dropping(drafter):
                drafter.update(requests if drafter in asked else [], seconds)

    def learn(self, contexts: Sequence[Sequence[int]]) -> None:
        """Let the drafters of the mode learn contexts that no request has asked for."""
        for drafter in self._asked():
            with self._dropping(drafter):
                drafter.learn(contexts)

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> list[WhenWritten]:
        """Have all drafters forget contexts; each keeps its given number of leading tokens.

        Each returned function calls its argument once one drafter has no write of them pending.
        """
        waits: list[WhenWritten] = []
        for drafter in list(self._drafters):
            with self._dropping(drafter):
                if (wait := drafter.forget(contexts)) is not None:
                    waits.append(wait)
        return waits

    @contextmanager
    def _dropping(self, drafter: Drafter) -> Iterator[None]:
        """Drop a drafter that fails inside: a draft model may fail with anything."""
        try:
            yield
        except Exception as error:
            self.drop(drafter, error)

    def drop(self, drafter: Drafter, error: Exception) -> None:
        """Remove a drafter that raised `error`, and close it."""
        _log.error("the %s drafter failed", drafter.name, exc_info=error)
        self._drafters.remove(drafter)
        self._readers = [each for each in self._readers if each is not drafter]
        # Its traceback would hold the drafter, and so the memory of its model.
        self.failures[drafter.name] = error.with_traceback(None)
        self.status_when_off = self.status()
        _close(drafter)

    def close(self) -> None:
        """Close the drafters, which keep what is worth keeping. Idempotent."""
        for drafter in self._drafters:
            _close(drafter)
        self._drafters.clear()


def _close(drafter: Drafter) -> None:
    try:
        drafter.close()
    except Exception:
        _log.exception("closing the %s drafter failed", drafter.name)


def _most(scheduled: ScheduledRequest, cache: CacheManager, limits: Limits) -> int:
    """Return how many drafts can still be used: the very last token is never drafted."""
    request = scheduled.request
    if request.constraint is not None:
        return 0  # the tokens allowed after a draft are not known before it is accepted
    if request.has_budget:
        return 0  # drafts would move the tokens at which KV is dropped, and so the text
    most = min(MAX_DRAFTED, limits.max_context - len(request.ids) - 1)
    most = min(most, cache.most_drafts(request.num_computed, len(request.ids)))
    if request.spec.max_tokens is not None:
        most = min(most, request.spec.max_tokens - request.num_generated - 1)
    return max(0, most)


def _leading(token_ids: Iterable[int], vocab_size: int) -> Iterable[int]:
    """Yield token ids up to the first without an embedding in the target."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            return
        yield int(token)


def accepted_len(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many leading drafts are right.

    drawn   one token per row of the step, so one more than there are drafts; the token at index
            `accepted_len` is the last valid one, drawn after accepted drafts only
    """
    assert len(drawn) == len(drafts) + 1
    for index, (draft, token) in enumerate(zip(drafts, drawn, strict=False)):
        if draft != token:
            return index
    return len(drafts)
