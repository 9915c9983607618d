"""Draws token ids from logits on the device: temperature, top-k, top-p, min-p, hashed noise.

README.md describes how the kernels filter without sorting.
"""

import torch

from kvchat_kernels.launch import uses_triton
from kvchat_kernels.sampler.operands import RowDraw, SamplerRows
from kvchat_kernels.sampler.reference import sample_tokens_reference

__all__ = ["RowDraw", "SamplerRows", "sample_tokens"]


def sample_tokens(logits: torch.Tensor, rows: SamplerRows, *, impl: str = "auto") -> torch.Tensor:
    """Draw one token id per row.

    logits   [num_rows, vocab_size] float32, bfloat16 or float16, last dimension dense; not changed
    rows     each row's parameters
    impl     auto, triton or reference

    Returns [num_rows] int64 on the device, owned by the caller; -1 for a row with a NaN. A row's
    token depends only on its own logits and parameters. The filters apply in the order top-k,
    top-p, min-p, each to the probabilities that the previous one left. They always keep the most
    likely token. Of equal logits the lower id counts as more likely.
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
