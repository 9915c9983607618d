"""Ways to draw, row by row, as the tensors that a sampler takes."""

from collections.abc import Sequence

import torch

from kvchat_kernels.sampler import RowDraw, SamplerRows


def sampler_rows(
    draws: Sequence[RowDraw], positions: Sequence[int], device: torch.device | str = "cpu"
) -> SamplerRows:
    """Return how rows draw the tokens at these positions, one way and one position a row."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(draw, name) for draw in draws], dtype=dtype).to(device)

    return SamplerRows(
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        column("seed", torch.int64),
        torch.tensor(positions).to(device),
    )
