"""Logits -> token ids without the host: temperature, top-k, top-p, min-p, counter-based noise.

Knows one row's parameters at a time; no requests and no text. README.md says how a token is drawn
from what the filters leave without sorting anything.
"""

import torch

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.sampler.operands import RowDraw, SamplerRows
from kvchat_kernels.sampler.reference import sample_tokens_reference

__all__ = ["RowDraw", "SamplerRows", "sample_tokens"]


def sample_tokens(logits: torch.Tensor, rows: SamplerRows, *, impl: str = "auto") -> torch.Tensor:
    """Draw one token id per row.

    logits   [num_rows, vocab_size] float32, bfloat16 or float16, last dimension dense; not changed
    impl     auto, triton or reference

    Returns [num_rows] int64 on the device, owned by the caller; -1 where a logit is not a number.
    What a row draws depends on its own logits and parameters alone. The filters apply in the order
    top-k, top-p, min-p, each to the probabilities that the one before left, and always leave the
    likeliest token; among equal logits the lower id counts as the likelier.
    """
    assert logits.ndim == 2, logits.shape
    assert logits.shape[0] == rows.temperature.shape[0]
    assert logits.shape[1] < 2**31
    if uses_triton(logits.device, impl):
        from kvchat_kernels.sampler.kernel import sampler_launches

        chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for launch in sampler_launches(logits, rows, chosen):
            launch.run()
        return chosen
    return sample_tokens_reference(logits, rows)
