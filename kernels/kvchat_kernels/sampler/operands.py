"""The sampling parameters of each row: RowDraw on the host, SamplerRows as device tensors.

The parameters are tensors so that a captured graph can be replayed with other values.
"""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class RowDraw:
    """The sampling parameters of one row, without its position; see SamplerRows.

    `seed` must fit int64, `top_k` int32.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Parameters of each row, all [num_rows] on the device of the logits.

    temperature   float32; 0 takes the most likely token
    top_k         int32, the number of tokens to draw from; 0 for all
    top_p         float32, the share of the probability to draw from; 1 for all
    min_p         float32, the smallest probability relative to the most likely token's; 0 for any
    seeds         int64, the low 64 bits of each seed
    positions     int64, the index in its sequence of the token to draw
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        dtypes = [torch.float32, torch.int32, torch.float32, torch.float32]
        dtypes += [torch.int64, torch.int64]
        for field, dtype in zip(fields(self), dtypes, strict=True):
            tensor = getattr(self, field.name)
            assert tensor.dtype == dtype, (field.name, tensor.dtype)
            assert tensor.shape == self.temperature.shape, (field.name, tensor.shape)
            assert tensor.is_contiguous(), field.name
