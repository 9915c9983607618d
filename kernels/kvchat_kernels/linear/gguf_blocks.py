"""GGUF's block formats as BlockWeights: the same numbers, so that products are exact.

Formats and their names are ggml's (ggml-common.h). A format that is not listed has to be unpacked.
"""

from collections.abc import Callable

import torch

from kvchat_kernels.linear.blocks import BlockWeights

_HALF_ROW = 16
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def block_weights(data: torch.Tensor, name: str) -> BlockWeights | None:
    """Return the weights of stored rows, None for a format that has no layout here.

    `data` is uint8 [out, bytes of a row], `name` the format, such as Q4_K.
    """
    known = _FORMATS.get(name)
    if known is None:
        return None
    bits, block, num_bytes, read = known
    num_out = len(data)
    levels, scales, minimums = read(data.reshape(-1, num_bytes))
    return BlockWeights(
        bits,
        block,
        levels.reshape(num_out, -1).contiguous(),
        scales.reshape(num_out, -1).contiguous(),
        minimums.reshape(num_out, -1).contiguous() if minimums is not None else None,
    )


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., 2 * n] as float16 [..., n]."""
    return data.contiguous().view(torch.float16)


def _unsigned(data: torch.Tensor) -> torch.Tensor:
    return data.to(torch.int16)


def _packed(levels: torch.Tensor) -> torch.Tensor:
    """Pack levels [..., 32] of 0 to 15 as BlockWeights has them: bytes [..., 16]."""
    levels = levels.to(torch.uint8)
    return levels[..., :_HALF_ROW] | (levels[..., _HALF_ROW:] << 4)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low bits of bytes [..., n], then their high bits: [..., 2 * n]."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return 32 bits of 4 bytes, each as 16 or 0: [..., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data[..., None] >> shifts) & 1).flatten(-2) << 4


def _q8_0(data: torch.Tensor) -> _Parts:
    return data[:, 2:].contiguous().view(torch.int8), _halves(data[:, :2]), None


def _q4_0(data: torch.Tensor) -> _Parts:
    scales = _halves(data[:, :2])
    return data[:, 2:], scales, -8 * scales


def _q4_1(data: torch.Tensor) -> _Parts:
    return data[:, 4:], _halves(data[:, :2]), _halves(data[:, 2:4])


def _q5_0(data: torch.Tensor) -> _Parts:
    levels = _unsigned(_nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])) - 16
    return levels.to(torch.int8), _halves(data[:, :2]), None


def _q5_1(data: torch.Tensor) -> _Parts:
    levels = _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return levels.to(torch.int8), _halves(data[:, :2]), _halves(data[:, 2:4])


def _k_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the minimums of 8 blocks from a head of 16 bytes, float32 [n, 8].

    The head is a scale and a minimum for all, float16, and 12 bytes with 6 bits for each block.
    """
    both = _halves(data[:, :4]).float()
    first, second, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((first & 63, (high & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (high >> 4) | ((second >> 6) << 4)), dim=-1)
    return both[:, :1] * scales.float(), -both[:, 1:] * minimums.float()


def _k_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the levels of 128 bytes, which hold two blocks of 32 in each 32 bytes: [n, 8, 32]."""
    parts = data.reshape(len(data), 4, 32)
    return torch.stack((parts & 15, parts >> 4), dim=2).reshape(len(data), 8, 32)


def _q4_k(data: torch.Tensor) -> _Parts:
    scales, minimums = _k_scales(data)
    return _packed(_k_nibbles(data[:, 16:])), scales, minimums


def _q5_k(data: torch.Tensor) -> _Parts:
    scales, minimums = _k_scales(data)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((data[:, None, 16:48] >> shifts) & 1) << 4
    return (_k_nibbles(data[:, 48:]) | fifth).to(torch.int8), scales, minimums


def _q6_k(data: torch.Tensor) -> _Parts:
    """Two halves of 128 columns: 64 bytes of low bits and 32 of high bits for each."""
    count = len(data)
    low = data[:, :128].reshape(count, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(count, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (data[:, 128:192].reshape(count, 2, 1, 32) >> shifts) & 3
    levels = _unsigned(low | (high << 4)) - 32
    scales = data[:, 192:208].contiguous().view(torch.int8).float()
    return levels.to(torch.int8), _halves(data[:, 208:210]).float() * scales, None


_FORMATS: dict[str, tuple[int, int, int, Callable[[torch.Tensor], _Parts]]] = {
    "Q8_0": (8, 32, 34, _q8_0),
    "Q4_0": (4, 32, 18, _q4_0),
    "Q4_1": (4, 32, 20, _q4_1),
    "Q5_0": (8, 32, 22, _q5_0),
    "Q5_1": (8, 32, 24, _q5_1),
    "Q4_K": (4, 32, 144, _q4_k),
    "Q5_K": (8, 32, 176, _q5_k),
    "Q6_K": (8, 16, 210, _q6_k),
}
BLOCK_FORMATS = frozenset(_FORMATS)
