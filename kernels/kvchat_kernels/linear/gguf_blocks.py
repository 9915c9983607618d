"""GGUF's block formats as BlockWeights: the same numbers, so that products are exact.

Formats and their names are ggml's (ggml-common.h). A format that is not listed has to be unpacked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvchat_kernels.linear.blocks import BlockWeights

_HALF_ROW = 16
# Stored bytes that are read at once: of the experts of a layer, what is made on the way would take
# gigabytes.
_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Parts:
    """Blocks as BlockWeights has them; the first dimension is that of stored blocks."""

    levels: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    steps: torch.Tensor | None = None


def block_weights(data: torch.Tensor, name: str) -> BlockWeights | None:
    """Return the weights of stored rows, None for a format that has no layout here.

    `data` is uint8 [out, bytes of a row], `name` the format, such as Q4_K. Beside the weights it
    takes little memory.
    """
    if name not in _FORMATS:
        return None
    step = max(1, _BYTES_AT_ONCE // data.shape[1])
    if len(data) <= step:
        return _read(data, name)
    whole: BlockWeights | None = None
    for start in range(0, len(data), step):
        tile = _read(data[start : start + step], name)
        if whole is None:
            whole = tile.changed(lambda part: part.new_empty(len(data), *part.shape[1:]))
        parts = tile.parts()
        for key, part in whole.parts().items():
            part[start : start + step] = parts[key]
    return whole


def empty_weights(num_out: int, num_bytes: int, name: str) -> BlockWeights:
    """Return weights of rows that take `num_bytes` each in a file, not written yet."""
    one, times = _one_block(name), num_bytes // _FORMATS[name][2]
    return one.changed(lambda part: part.new_empty(num_out, times * part.shape[1], *part.shape[2:]))


def held_bytes(num_bytes: int, name: str) -> int:
    """Return the bytes of memory of weights that take `num_bytes` in a file; `name` is known."""
    return num_bytes // _FORMATS[name][2] * _one_block(name).num_bytes


def _one_block(name: str) -> BlockWeights:
    return _read(torch.zeros(1, _FORMATS[name][2], dtype=torch.uint8), name)


def _read(data: torch.Tensor, name: str) -> BlockWeights:
    bits, block, num_bytes, read = _FORMATS[name]
    num_out = len(data)
    parts = read(data.reshape(-1, num_bytes))

    def by_rows(part: torch.Tensor | None, *shape: int) -> torch.Tensor | None:
        return None if part is None else part.reshape(num_out, -1, *shape).contiguous()

    levels, scales = by_rows(parts.levels), by_rows(parts.scales)
    assert levels is not None
    assert scales is not None
    steps = by_rows(parts.steps, 1 if parts.minimums is None else 2)
    return BlockWeights(bits, block, levels, scales, by_rows(parts.minimums), steps)


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
    return _Parts(data[:, 2:].contiguous().view(torch.int8), _halves(data[:, :2]))


def _q4_0(data: torch.Tensor) -> _Parts:
    return _Parts(data[:, 2:], _halves(data[:, :2]))  # a level of 8 stands for 0


def _q4_1(data: torch.Tensor) -> _Parts:
    return _Parts(data[:, 4:], _halves(data[:, :2]), _halves(data[:, 2:4]))


def _q5_0(data: torch.Tensor) -> _Parts:
    levels = _unsigned(_nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])) - 16
    return _Parts(levels.to(torch.int8), _halves(data[:, :2]))


def _q5_1(data: torch.Tensor) -> _Parts:
    levels = _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])
    return _Parts(levels.to(torch.int8), _halves(data[:, :2]), _halves(data[:, 2:4]))


def _k_parts(levels: torch.Tensor, head: torch.Tensor) -> _Parts:
    """Return blocks of 8 x 32 levels with the scales and minimums of their head of 16 bytes.

    The head is a step of the scales and one of the minimums, and 12 bytes with 6 bits for each
    scale and minimum. Minimums are subtracted.
    """
    steps = _halves(head[:, :4])
    first, second, high = head[:, 4:8], head[:, 8:12], head[:, 12:16]
    scales = torch.cat((first & 63, (high & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (high >> 4) | ((second >> 6) << 4)), dim=-1)
    steps = torch.stack((steps[:, 0], -steps[:, 1]), dim=-1)
    return _Parts(levels, scales.view(torch.int8), minimums.view(torch.int8), steps)


def _k_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the levels of 128 bytes, which hold two blocks of 32 in each 32 bytes: [n, 8, 32]."""
    parts = data.reshape(len(data), 4, 32)
    return torch.stack((parts & 15, parts >> 4), dim=2).reshape(len(data), 8, 32)


def _q4_k(data: torch.Tensor) -> _Parts:
    return _k_parts(_packed(_k_nibbles(data[:, 16:])), data[:, :16])


def _q5_k(data: torch.Tensor) -> _Parts:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((data[:, None, 16:48] >> shifts) & 1) << 4
    return _k_parts((_k_nibbles(data[:, 48:]) | fifth).to(torch.int8), data[:, :16])


def _q6_k(data: torch.Tensor) -> _Parts:
    """Two halves of 128 columns: 64 bytes of low bits and 32 of high bits for each."""
    count = len(data)
    low = data[:, :128].reshape(count, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(count, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (data[:, 128:192].reshape(count, 2, 1, 32) >> shifts) & 3
    levels = _unsigned(low | (high << 4)) - 32
    scales = data[:, 192:208].contiguous().view(torch.int8)
    return _Parts(levels.to(torch.int8), scales, steps=_halves(data[:, 208:210]))


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
