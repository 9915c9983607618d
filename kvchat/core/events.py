"""Events of the engine about requests and about loading a model. Immutable, without tensors."""

from dataclasses import dataclass

from kvchat.core.errors import KvchatError
from kvchat.core.types import CachedTokens, FinishReason, MissReason, Timing, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A stage of loading a model; `fraction` is 0 to 1 within the stage, None where unknown."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model is loaded; holds the values for the status line and the JSON output.

    dtype                   the dtype of activations, "" for a server, which does not tell it
    draft                   the name of the draft model, None where there is none
    kv_dtype                the dtype of KV, "" if it is `dtype`
    weights                 the form of the weights, "" if it is not known or cannot be chosen
    stored_as               the format of the files' weights, such as Q4_K_M; "" if it is not known
    sent_as                 what a server gets, token ids or messages; "" if this process computes
    is_context_limit_told   false for a server that does not tell: `context_limit` is a large number
    """

    name: str
    identity: str
    device: str
    dtype: str
    context_limit: int
    load_s: float
    notes: tuple[str, ...] = ()
    draft: str | None = None
    is_context_limit_told: bool = True
    kv_dtype: str = ""
    weights: str = ""
    stored_as: str = ""
    sent_as: str = ""

    @property
    def told_context_limit(self) -> int | None:
        """The most tokens of a context, for the user; None if that is not known."""
        return self.context_limit if self.is_context_limit_told else None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model could not be loaded; every request submitted so far fails with `error`."""

    error: KvchatError


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine has ended, for the `reason` in one sentence. Another one loads from now on, until
    ModelReady or LoadFailed.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens have their KV; `cached` of them did not need computing.

    `left_s` is how long the others take, by the rate that prices are told from; None without one.
    """

    request_id: int
    cached: CachedTokens
    done: int
    total: int
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The logprobs of the next tokens of a prompt, in order, the second token's first.

    Nothing stands before the first token, so it has none. All come before the answer's tokens.
    """

    request_id: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """Token ids appended to sample `sample` of a request, in order.

    `logprobs` has one item for each if the request wants them, else none.
    """

    request_id: int
    sample: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """One sample is complete. `stop_token` is the stop token that ended it, if one did, and
    `stop_logprobs` has its logprobs if the request wants any.

    `miss_reason` says why a slower tier did not have more of the prompt, None if it was not asked.
    """

    request_id: int
    sample: int
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop_token: int | None = None
    miss_reason: MissReason | None = None
    stop_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended without an answer; it has no further events."""

    request_id: int
    error: KvchatError


LoadEvent = LoadProgress | ModelReady | LoadFailed | EngineLost
RequestEvent = PrefillProgress | PromptScored | TokensGenerated | SampleFinished | RequestFailed
