"""Sampler: logits -> token ids, each row with its own sampling parameters.

Supports temperature, top-k, top-p, min-p, penalties, logit biases and seeds. The noise is
counter-based: the same seed, position and token id always give the same number, and no state is
kept. So a sampled text does not depend on the rest of the batch, on chunking or on preemption.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvchat.core.errors import GenerationError
from kvchat.core.types import SamplingParams, TokenLogprobs
from kvchat_kernels.host_sampler import draw_token, splitmix, token_logprobs
from kvchat_kernels.launch import on_device, uses_triton
from kvchat_kernels.sampler import RowDraw, SamplerRows, sample_tokens

_MASK_64 = 0xFFFFFFFFFFFFFFFF


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of the `sample`-th completion of one prompt; sample 0 keeps the seed.

    The seed is mixed before the sample number is added, so that seeds s and s + 1 share no samples.
    """
    return seed if sample == 0 else splitmix((splitmix(seed & _MASK_64) + sample) & _MASK_64)


_SMALLEST = 256


class DeviceTokenIds:
    """The ids of one context, which only grows, and of its drafts, in one tensor on the device."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.empty(0, dtype=torch.int64, device=device)
        self._num_settled = 0

    def of(self, ids: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Return [len(ids) + len(drafts)] int64, a view that is valid until the next call.

        ids   the whole context; it begins with the ids of earlier calls
        """
        assert len(ids) >= self._num_settled
        end = len(ids) + len(drafts)
        self._make_room_for(end)
        new_ids = [*ids[self._num_settled :], *drafts]
        if new_ids:
            place = self._ids[self._num_settled : end]
            place.copy_(on_device(new_ids, torch.int64, self._ids.device))
        self._num_settled = len(ids)
        return self._ids[:end]

    def _make_room_for(self, count: int) -> None:
        if count <= len(self._ids):
            return
        larger = self._ids.new_empty(max(_SMALLEST, 2 * count))
        larger[: self._num_settled] = self._ids[: self._num_settled]
        self._ids = larger


_NOT_NUMBERS = "the model's logits are not numbers"
_MOST_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to draw one token.

    seed, position   they select the noise
    context_ids      [num_tokens] int64, the tokens before it; None without a penalty
    num_prompt       the request has generated the tokens of the context from this index on
    allowed          the bits of the ids that may be drawn, as a TokenConstraint tells them
    """

    params: SamplingParams
    seed: int
    position: int
    context_ids: torch.Tensor | None = None
    num_prompt: int = 0
    allowed: bytes | None = None

    @property
    def changes_logits(self) -> bool:
        return self.params.changes_logits or self.allowed is not None


@torch.inference_mode()  # the logits are inference tensors, changed in place only in this mode
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token id per row.

    logits   [num_rows, vocab_size] float32; changed in place where `changes_logits` is true

    Raises ValueError if a logit is NaN: low precision overflowed, or the weights are damaged.
    Raises GenerationError for a row that allows no token.
    """
    assert logits.shape[0] == len(rows)
    for index, row in enumerate(rows):
        if row.changes_logits:
            change_logits(logits[index], row.params, row.context_ids, row.num_prompt)
        if row.allowed is not None:
            refuse_others(logits[index], row.allowed)
    if logits.is_cuda and uses_triton(logits.device, "auto"):
        return _draw_on_device(logits, rows)
    lines = zip(logits.numpy(force=True), rows, strict=True)
    return valid_tokens([draw_token(line, _draw_of(row), row.position) for line, row in lines])


def _draw_on_device(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw all rows with kernels; the host waits only once, for the tokens."""
    return as_tokens(sample_tokens(logits, parameters_of(rows, logits.shape[1], logits.device)))


def row_draw(row: SamplingRow) -> RowDraw | None:
    """Return how a row draws in a graph; None if its logits have to be changed first."""
    return None if row.changes_logits else _draw_of(row)


def _draw_of(row: SamplingRow) -> RowDraw:
    params, top_k = row.params, min(row.params.top_k, _MOST_INT32)
    return RowDraw(params.temperature, top_k, params.top_p, params.min_p, _signed(row.seed))


def as_tokens(drawn: torch.Tensor) -> list[int]:
    """Read drawn tokens from the device. Raises ValueError if one is -1: a logit was NaN."""
    return valid_tokens([int(token) for token in drawn.tolist()])


def valid_tokens(tokens: list[int]) -> list[int]:
    """Return drawn tokens as they are. Raises ValueError if one is -1: a logit was NaN."""
    if tokens and min(tokens) < 0:
        raise ValueError(_NOT_NUMBERS)
    return tokens


def parameters_of(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
) -> SamplerRows:
    """Return the rows' parameters as tensors, sent to the device without waiting for the logits."""
    params = [row.params for row in rows]
    # Each column starts at a multiple of 16 bytes: other alignments would compile kernels anew.
    rest = [0] * (-len(rows) % 4)
    floats = [
        [*(each.temperature for each in params), *rest],
        [*(each.top_p for each in params), *rest],
        [*(each.min_p for each in params), *rest],
    ]
    integers = [
        [*(_signed(row.seed) for row in rows), *rest],
        [*(row.position for row in rows), *rest],
        [*(min(each.top_k, vocab_size) for each in params), *rest],
    ]
    temperature, top_p, min_p = on_device(floats, torch.float32, device)[:, : len(rows)]
    seeds, positions, top_k = on_device(integers, torch.int64, device)[:, : len(rows)]
    return SamplerRows(temperature, top_k.int(), top_p, min_p, seeds, positions)


def _signed(seed: int) -> int:
    """Return the seed's low 64 bits as an int64; the noise uses only those."""
    low = seed & _MASK_64
    return low - (1 << 64) if low >> 63 else low


def change_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    context_ids: torch.Tensor | None,
    num_prompt: int,
) -> None:
    """Change one row before the filters, in place: penalties, then biases.

    Each part that is off runs no code.

    logits        [vocab_size] float32
    context_ids   [num_tokens] int64, the tokens before the one to draw, the request's own from
                  index `num_prompt` on; None if `params` has no penalty
    """
    if params.repetition_penalty != 1.0:
        assert context_ids is not None
        _penalise_repetition(logits, context_ids, params.repetition_penalty)
    if params.penalises_generated:
        assert context_ids is not None
        _penalise_generated(logits, context_ids[num_prompt:], params)
    if params.logit_bias:
        _add_bias(logits, params.logit_bias)


def _penalise_repetition(logits: torch.Tensor, context_ids: torch.Tensor, penalty: float) -> None:
    """Lower the scores of tokens in the context (CTRL: Keskar et al., 2019, section 4.1)."""
    scores = logits[context_ids]
    logits[context_ids] = torch.where(scores > 0, scores / penalty, scores * penalty)


def _penalise_generated(
    logits: torch.Tensor, generated: torch.Tensor, params: SamplingParams
) -> None:
    """Lower the scores of generated tokens, as OpenAI defines it: once each, and once each time."""
    token_ids, counts = generated.unique(return_counts=True)
    logits[token_ids] -= params.frequency_penalty * counts + params.presence_penalty


def _add_bias(logits: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Add to the scores of given tokens; a draft model may lack some of the vocabulary's end."""
    known = [(token_id, value) for token_id, value in bias if token_id < len(logits)]
    token_ids = on_device([token_id for token_id, _ in known], torch.int64, logits.device)
    logits[token_ids] += on_device([value for _, value in known], torch.float32, logits.device)


def refuse_others(logits: torch.Tensor, allowed: bytes) -> None:
    """Make all tokens but the allowed ones impossible, in place.

    logits    [vocab_size] float32
    allowed   a bit for each id, the lowest first; ids beyond it are refused

    Raises GenerationError if no token is allowed.
    """
    octets = np.frombuffer(allowed, dtype=np.uint8)
    bits = np.unpackbits(octets, count=len(logits), bitorder="little")  # 0 beyond the octets
    if not bits.any():
        raise GenerationError("The format of the answer allows no token of the model.")
    if logits.device.type == "cpu":  # torch's threads take 2 to 5 ms for it beside another program
        np.copyto(logits.numpy(), -np.inf, where=bits == 0)
    else:
        logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), float("-inf"))


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the logprobs of one drawn token per row, and of the `num_top` likeliest of the row.

    logits   [num_rows, vocab_size] float32, not changed by penalties, biases or constraints
    """
    told = []
    for line, token in zip(logits.numpy(force=True), tokens, strict=True):
        logprob, top = token_logprobs(line, token, num_top)
        told.append(TokenLogprobs(token, logprob, tuple(top)))
    return told


def numeric(logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
    """Return logprobs as they are. Raises ValueError if one is NaN."""
    if any(math.isnan(each.logprob) for each in logprobs):
        raise ValueError(_NOT_NUMBERS)
    return logprobs
