"""The logprobs of drawn tokens, from the model's logits as they are."""

from collections.abc import Sequence

import torch

from kvchat.core.types import TokenLogprobs
from kvchat_kernels.sending import on_device


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the logprobs of one drawn token per row, and of the `num_top` likeliest of the row.

    logits   [num_rows, vocab_size] float32, not changed by penalties, biases or constraints
    """
    logprobs = logits.log_softmax(dim=-1)
    drawn = on_device(tokens, torch.int64, logits.device)
    own = logprobs.gather(-1, drawn[:, None])[:, 0].tolist()
    values, token_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    tops = [
        tuple(zip(*row, strict=True))
        for row in zip(token_ids.tolist(), values.tolist(), strict=True)
    ]
    return [TokenLogprobs(*each) for each in zip(tokens, own, tops, strict=True)]
