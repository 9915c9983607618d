"""RequestSpec, what a caller asks for, and Request, the state of one sample being generated."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvchat.core.text import Size
from kvchat.core.types import (
    CachedTokens,
    DraftUse,
    FinishReason,
    KvDropped,
    MissReason,
    SamplingParams,
    StopWatcher,
    Timing,
    TokenConstraint,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    import torch

    from kvchat.cache.arrivals import Arrival
    from kvchat.cache.block_table import BlockTable
    from kvchat.cache.thinned_kv import ThinnedBeginning
    from kvchat.engine.sampler import DeviceTokenIds


@dataclass(frozen=True, slots=True)
class Thinning:
    """Which KV of a request is dropped (`engine/kv_thinner.py`).

    beginning     what the prompt begins with, of which the KV of some positions stays; None for no
                  such beginning
    budget        the KV that the answer may take: bytes, or a share of the context's positions.
                  None for any. The prompt is read with all of its KV
    num_leading   tokens at the beginning that stay
    num_last      tokens at the end of the prompt that stay: the question, by which the others are
                  chosen
    """

    beginning: "ThinnedBeginning | None" = None
    budget: Size | None = None
    num_leading: int = 0
    num_last: int = 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a caller asks for: a prompt and how to complete it.

    prompt_ids         the whole context, at least one token
    max_tokens         most tokens to generate; None for as many as fit in the context, 0 for a
                       prompt that is only computed
    stop_token_ids     ids that end the completion; reported separately, not added to its tokens
    new_stop_watcher   makes a watcher for stop strings, one per sample
    num_samples        completions wanted for the same prompt; each sample has its own noise
    is_one_shot        a later request is unlikely to continue it: its stored KV is evicted first
    is_kept            its KV may be kept on slower tiers; false for a prompt not yet sent
    new_constraint     makes what limits the tokens, one per sample; such a request has no drafts
    session_id         the conversation that it belongs to, "" if that is not saved
    client             who asks, "" for the user of this program: clients have equal shares
    num_top_logprobs   how many logprobs are told beside each token's own; None for not even that
    scores_prompt      whether the prompt's tokens have theirs told too. KV alone gives no logits:
                       all of such a prompt is computed, whatever is cached
    moved_under        the name of the moved contexts (`cache/moved_kv.py`) that may serve it where
                       less of its own KV is in memory; "" for none
    thinning           which KV it goes on without; None for none
    answer_schema      the JSON schema that the answer follows, None for any text: what another
                       program's server is told. This engine follows `new_constraint`
    num_shared         leading tokens of the prompt whose KV other machines may have too
    repetition_limit   ends a completion that has repeated itself for so many tokens, as
                       `only_repeats` says; 0 lets it go on
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    new_stop_watcher: Callable[[], StopWatcher] | None = None
    num_samples: int = 1
    is_one_shot: bool = False
    is_kept: bool = True
    new_constraint: Callable[[], TokenConstraint] | None = None
    num_top_logprobs: int | None = None
    scores_prompt: bool = False
    session_id: str = ""
    client: str = ""
    repetition_limit: int = 0
    moved_under: str = ""
    thinning: Thinning | None = None
    num_shared: int = 0
    answer_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.prompt_ids
        assert self.num_samples >= 1
        assert self.max_tokens is None or self.max_tokens >= 0
        assert not self.scores_prompt or self.num_top_logprobs is not None

    @property
    def needs_logits(self) -> bool:
        """Whether its tokens cannot be drawn within a graph."""
        is_limited = self.new_constraint is not None
        return self.sampling.changes_logits or is_limited or self.num_top_logprobs is not None


class State(Enum):
    """The state of a request in the scheduler."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Clock:
    """Times of a request's events, in seconds of the engine's clock."""

    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def timing(self, now_s: float) -> Timing:
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        last_s = self.last_token_s if self.last_token_s is not None else first_s
        started_s = self.started_s if self.started_s is not None else now_s
        return Timing(
            ttft_s=first_s - self.submitted_s,
            prefill_s=first_s - started_s,
            decode_s=last_s - first_s,
            total_s=now_s - self.submitted_s,
        )


@dataclass(slots=True)
class Drafting:
    """Counts of drafts; seconds spent decoding, and the estimate for the same without drafts."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    spent_s: float = 0.0
    plain_s: float = 0.0
    why_plain: str = ""

    def use(self) -> DraftUse:
        """Return the counts for reports; the gain is None where it is not known."""
        gain = self.plain_s / self.spent_s if self.spent_s > 0 and self.num_verified else None
        return DraftUse(
            self.num_drafted, self.num_accepted, self.num_verified, gain, self.why_plain
        )


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a spec. Its progress is three lengths, in positions, the indices of `ids`:

    # [0, num_computed)            KV is in the table's slots, but what a private table dropped
    # [num_computed, len(ids))     to compute in the next steps
    # ids[:num_prompt_tokens]      the prompt; the rest is generated

    `ids` are contiguous 32-bit integers, the form that the radix tree compares: a waiting request
    is looked up at every step. `table` is set while the request runs. `steps_waited` counts the
    steps since it last ran. `arrival` is its KV on its way from slower tiers; `has_asked_quick`
    says whether quick tiers were asked since it last ran. `num_offered` counts the leading tokens
    whose KV was last offered to be written. `device_ids` are its ids on the device, for a penalty.
    `scored` are the logprobs of the prompt that were told. A step with tokens before `kept_until`
    is not given up for a new request. With `moved_under` its table is of that name's moved
    contexts, so its KV is kept on no slower tier; so it is not once it `is_thinned`. `slot_scores`
    are the attention that the slots left by the last drop have got. One that `is_exact` drops no KV
    any more. `num_again` are the tokens before the newest that a recurrent state has to read again,
    because one of the drafts behind them was wrong.
    """

    request_id: int
    sample: int
    spec: RequestSpec
    ids: "array[int]"
    clock: Clock
    state: State = State.WAITING
    table: "BlockTable | None" = None
    num_computed: int = 0
    num_again: int = 0
    cached: CachedTokens | None = None
    arrival: "Arrival | None" = None
    has_asked_quick: bool = False
    num_offered: int = 0
    watcher: StopWatcher | None = None
    steps_waited: int = 0
    cancelled_for: FinishReason | None = None
    stop_token: int | None = None
    num_siblings_to_fork: int = field(default=0)
    drafting: Drafting = field(default_factory=Drafting)
    told_miss_reason: MissReason | None = None
    device_ids: "DeviceTokenIds | None" = None
    constraint: TokenConstraint | None = None
    scored: list[TokenLogprobs] = field(default_factory=list)
    kept_until: int = 0
    moved_under: str = ""
    is_thinned: bool = False
    is_exact: bool = False
    slot_scores: "torch.Tensor | None" = None
    dropped: KvDropped | None = None

    @classmethod
    def from_spec(cls, request_id: int, spec: RequestSpec, now_s: float) -> "Request":
        return cls(
            request_id=request_id,
            sample=0,
            spec=spec,
            ids=array("i", spec.prompt_ids),
            clock=Clock(submitted_s=now_s),
            watcher=spec.new_stop_watcher() if spec.new_stop_watcher is not None else None,
            num_siblings_to_fork=spec.num_samples - 1,
            constraint=spec.new_constraint() if spec.new_constraint is not None else None,
        )

    def sibling(self, sample: int, table: "BlockTable") -> "Request":
        """Return another sample of the same prompt, with as many tokens computed, on `table`."""
        maker, new_constraint = self.spec.new_stop_watcher, self.spec.new_constraint
        return Request(
            request_id=self.request_id,
            sample=sample,
            spec=self.spec,
            ids=self.ids[:],
            clock=Clock(self.clock.submitted_s, self.clock.started_s),
            state=State.RUNNING,
            table=table,
            num_computed=self.num_computed,
            cached=CachedTokens(device=self.num_prompt_tokens),
            watcher=maker() if maker is not None else None,
            constraint=new_constraint() if new_constraint is not None else None,
            scored=self.scored,
            moved_under=self.moved_under,
            is_thinned=self.is_thinned,
            is_exact=self.is_exact,
            dropped=self.dropped,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def is_kept(self) -> bool:
        """Whether its KV may be kept on slower tiers."""
        return self.spec.is_kept and not (self.moved_under or self.is_thinned)

    @property
    def has_budget(self) -> bool:
        """Whether KV may be dropped while it decodes."""
        return self.spec.thinning is not None and self.spec.thinning.budget is not None

    @property
    def beginning(self) -> "ThinnedBeginning | None":
        """The thinned beginning that its prompt has; None without one."""
        thinning = self.spec.thinning
        return None if thinning is None or self.is_exact else thinning.beginning

    @property
    def thins_at(self) -> int | None:
        """The number of tokens whose KV is to be there before some of it is dropped; None if that
        is done, or nothing is to be.
        """
        if self.beginning is None or self.is_thinned:
            return None
        return self.beginning.num_tokens

    @property
    def is_to_be_scored(self) -> bool:
        """Whether logprobs of the prompt are left to tell."""
        return self.spec.scores_prompt and len(self.scored) < self.num_prompt_tokens - 1

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, a stop token included."""
        return len(self.ids) - self.num_prompt_tokens + (self.stop_token is not None)

    @property
    def only_repeats(self) -> bool:
        """Whether it would go on repeating itself; to ask after each token."""
        return only_repeats(self.ids, self.num_generated, self.spec.repetition_limit)

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def is_fetching(self) -> bool:
        """Whether more of the prompt's KV may still come from a slower tier."""
        return self.arrival is not None and not self.arrival.is_over

    def end_fetching(self) -> None:
        """Drop the arrival once it is over; keep the reason for a miss."""
        if not self.is_fetching:
            self.told_miss_reason, self.arrival = self.miss_reason, None

    @property
    def miss_reason(self) -> MissReason | None:
        """Why no more of the prompt came from a slower tier; None if no reason is known."""
        if self.told_miss_reason is None and self.arrival is not None:
            return self.arrival.miss_reason
        return self.told_miss_reason

    @property
    def num_due(self) -> int:
        """Tokens that can be computed now: only those of the front while KV still arrives."""
        end = len(self.ids) if self.thins_at is None else self.thins_at
        if not self.is_fetching:
            return end - self.num_computed
        front = self.arrival.num_front if self.arrival is not None else 0
        return max(0, min(end, front) - self.num_computed)

    @property
    def awaits_kv(self) -> bool:
        """Whether it can compute nothing until more KV arrives."""
        return self.is_fetching and not self.num_due

    @property
    def is_to_join(self) -> bool:
        """Whether KV that arrived can be joined to the front that it has computed."""
        if self.arrival is None or not self.arrival.num_front:
            return False
        return not self.is_fetching or self.arrival.num_arrived > self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left, and those that its state has to read again."""
        return self.num_uncomputed == 1 + self.num_again and self.num_generated > 0

    def usage(self) -> Usage:
        cached = self.cached or CachedTokens()
        num_read = max(self.num_computed, cached.total)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached=cached,
            completion_tokens=self.num_generated,
            drafts=self.drafting.use(),
            unread_tokens=0 if self.num_generated else max(0, self.num_prompt_tokens - num_read),
            dropped=self.dropped,
        )


# A passage of at most so many tokens is looked for. Rules of dashes, rows of zeros and what else
# people ask for consist of one or two tokens, or repeat less often.
_MOST_PERIOD = 64
_SHORT_PERIOD = 2
# A longer passage is repeated for so many times the limit.
_LONG_FACTOR = 2
# Looking costs a few hundred microseconds.
_EVERY = 32


def only_repeats(ids: "array[int]", num_generated: int, limit: int) -> bool:
    """Return whether the end of an answer is one passage over and over; to ask after each token.

    The answer is the last `num_generated` of `ids`. A passage of one or two tokens has to fill the
    last `limit` tokens, a longer one twice as many. A `limit` of 0 never finds one.
    """
    if not limit or num_generated < limit or num_generated % _EVERY:
        return False
    if _has_period(ids[-limit:], range(1, _SHORT_PERIOD + 1)):
        return True
    num_long = _LONG_FACTOR * limit
    longer = range(_SHORT_PERIOD + 1, _MOST_PERIOD + 1)
    return num_generated >= num_long and _has_period(ids[-num_long:], longer)


def _has_period(tail: "array[int]", periods: range) -> bool:
    return any(tail[period:] == tail[:-period] for period in periods if period < len(tail))
