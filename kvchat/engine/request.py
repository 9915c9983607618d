"""RequestSpec and Request: what a caller asks for, and one generation on its way.

Knows token ids and lengths. Does not know blocks' contents, logits or text.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvchat.core.types import (
    CachedTokens,
    DraftUse,
    FinishReason,
    MissReason,
    SamplingParams,
    StopWatcher,
    Timing,
    Usage,
)

if TYPE_CHECKING:
    from kvchat.cache.block_manager import BlockTable
    from kvchat.cache.host_offload import Promotion
    from kvchat.cache.restore import Restore
    from kvchat.engine.sampler import DeviceTokenIds


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One generation as a caller asks for it.

    prompt_ids         the whole context, at least one token
    max_tokens         most tokens to generate; None for as many as the context holds
    stop_token_ids     ids that end the completion; they are reported apart, not generated
    new_stop_watcher   makes a watcher for stop strings, one per sample
    num_samples        completions wanted for the same prompt; sample i draws noise of its own
    is_one_shot        nobody is likely to go on with it: what is kept of it is forgotten first
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    new_stop_watcher: Callable[[], StopWatcher] | None = None
    num_samples: int = 1
    is_one_shot: bool = False

    def __post_init__(self) -> None:
        assert self.prompt_ids
        assert self.num_samples >= 1
        assert self.max_tokens is None or self.max_tokens >= 1


class State(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Clock:
    """When things happened to a request, in seconds of the engine's clock."""

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
    """Counts of drafts, and the seconds decoding has taken and would have taken without them."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    spent_s: float = 0.0
    plain_s: float = 0.0
    why_plain: str = ""

    def use(self) -> DraftUse:
        """Return the counts for those who read them."""
        gain = self.plain_s / self.spent_s if self.spent_s > 0 and self.num_verified else None
        return DraftUse(
            self.num_drafted, self.num_accepted, self.num_verified, gain, self.why_plain
        )


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a spec. Three lengths carry it; everything else is derived.

    # [0, num_computed)            KV is in the table's blocks
    # [num_computed, len(ids))     to be computed by the coming steps
    # ids[:num_prompt_tokens]      the prompt; what follows was generated

    `ids` are 32-bit integers in one piece of memory, the form in which the radix tree compares
    them: a waiting request is looked up at every step. `table` is there while the request runs.
    `steps_waited` counts since it last ran. `promotion` and `restore` are what host memory and
    a slower tier have of it, on its way up before it runs. `num_offered` counts the tokens
    whose KV was last offered to be kept. `device_ids` are its ids on the device, where a
    repetition penalty wants them.
    """

    request_id: int
    sample: int
    spec: RequestSpec
    ids: "array[int]"
    clock: Clock
    state: State = State.WAITING
    table: "BlockTable | None" = None
    num_computed: int = 0
    cached: CachedTokens | None = None
    promotion: "Promotion | None" = None
    restore: "Restore | None" = None
    num_offered: int = 0
    watcher: StopWatcher | None = None
    steps_waited: int = 0
    cancelled_for: FinishReason | None = None
    stop_token: int | None = None
    num_siblings_to_fork: int = field(default=0)
    drafting: Drafting = field(default_factory=Drafting)
    told_miss_reason: MissReason | None = None
    device_ids: "DeviceTokenIds | None" = None

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
        )

    def sibling(self, sample: int, table: "BlockTable") -> "Request":
        """Return another sample of the same prompt, computed as far as this one, on `table`."""
        maker = self.spec.new_stop_watcher
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
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, a stop token included."""
        return len(self.ids) - self.num_prompt_tokens + (self.stop_token is not None)

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def is_fetching(self) -> bool:
        """Whether more of the prompt's KV may still come from a slower tier."""
        is_promoting = self.promotion is not None and not self.promotion.is_over
        return is_promoting or (self.restore is not None and not self.restore.is_over)

    @property
    def miss_reason(self) -> MissReason | None:
        """Why no more of the prompt came from a slower tier; None where none was asked."""
        if self.told_miss_reason is None and self.restore is not None:
            return self.restore.miss_reason
        return self.told_miss_reason

    @property
    def num_due(self) -> int:
        """Tokens to compute as soon as there is room: while more comes up, those before it."""
        if not self.is_fetching:
            return self.num_uncomputed
        front = self.restore.num_front if self.restore is not None else 0
        return max(0, min(len(self.ids), front) - self.num_computed)

    @property
    def awaits_kv(self) -> bool:
        """Whether it has nothing to compute before more comes up."""
        return self.is_fetching and not self.num_due

    @property
    def is_to_join(self) -> bool:
        """Whether something has come up behind the front that it has computed."""
        if self.restore is None or not self.restore.num_front:
            return False
        return not self.is_fetching or self.restore.num_arrived > self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_uncomputed == 1 and self.num_generated > 0

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached=self.cached or CachedTokens(),
            completion_tokens=self.num_generated,
            drafts=self.drafting.use(),
        )
