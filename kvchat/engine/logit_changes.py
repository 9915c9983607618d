"""Changes one row of logits before the filters: penalties, then biases, then a constraint.

Each part that is off runs no code.
"""

import numpy as np
import torch

from kvchat.core.errors import GenerationError
from kvchat.core.types import SamplingParams
from kvchat_kernels.sending import on_device


def change_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    context_ids: torch.Tensor | None,
    num_prompt: int,
) -> None:
    """Change one row in place.

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
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), float("-inf"))
