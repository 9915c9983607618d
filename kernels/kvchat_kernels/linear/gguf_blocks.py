"""GGUF's block formats as BlockWeights: the same numbers, so that products are exact.

`file_formats.py` has a table of each. A format that is not listed has to be unpacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, in_planes
from kvchat_kernels.linear.file_formats import (
    FILE_FORMATS,
    HEAD_BYTES,
    Bytes,
    FileFormat,
    Halves,
    Plane,
    Whole,
)

# Stored bytes that are read at once: of the experts of a layer, what is made on the way would take
# gigabytes.
_BYTES_AT_ONCE = 1 << 22
BLOCK_FORMATS = frozenset(FILE_FORMATS)


@dataclass(frozen=True, slots=True)
class _Factors:
    """Factors of blocks as BlockWeights has them; the first dimension is that of stored blocks."""

    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    steps: torch.Tensor | None = None


def block_weights(data: torch.Tensor, name: str) -> BlockWeights | None:
    """Return the weights of stored rows, None for a format that has no layout here.

    `data` is uint8 [out, bytes of a row], `name` the format, such as Q4_K. Beside the weights it
    takes little memory.
    """
    if name not in BLOCK_FORMATS:
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
    one, times = _one_block(name), num_bytes // FILE_FORMATS[name].num_bytes
    return one.changed(lambda part: part.new_empty(num_out, times * part.shape[1], *part.shape[2:]))


def held_bytes(num_bytes: int, name: str) -> int:
    """Return the bytes of memory of weights that take `num_bytes` in a file; `name` is known."""
    return num_bytes // FILE_FORMATS[name].num_bytes * _one_block(name).num_bytes


@cache
def _one_block(name: str) -> BlockWeights:
    """Return the weights of one stored block. A model asks for a few forms, once a tensor."""
    return _read(torch.zeros(1, FILE_FORMATS[name].num_bytes, dtype=torch.uint8), name)


def _read(data: torch.Tensor, name: str) -> BlockWeights:
    form = FILE_FORMATS[name]
    num_out, blocks = len(data), data.reshape(-1, form.num_bytes)
    factors = _factors(blocks, form)

    def by_rows(part: torch.Tensor | None, *shape: int) -> Any:
        return None if part is None else part.reshape(num_out, -1, *shape).contiguous()

    levels = numbers(blocks, form.planes, form.columns).view(len(blocks), -1, COLUMNS)
    bits = form.bits
    levels = levels.view(torch.int8) if bits == 8 else levels
    minimums = by_rows(factors.minimums)
    steps = by_rows(factors.steps, 1 if factors.steps is None else factors.steps.shape[1])
    parts = {"levels": by_rows(in_planes(levels, bits)), "scales": by_rows(factors.scales)}
    parts |= {"minimums": minimums, "steps": steps}
    return BlockWeights(bits, form.block, **parts, zero=form.zero, codes=form.codes, unit=form.unit)


def numbers(blocks: torch.Tensor, planes: Sequence[Plane], count: int) -> torch.Tensor:
    """Return the numbers of stored blocks [n, bytes] that lie in planes: uint8 [n, count]."""
    total, low = torch.zeros(len(blocks), count, dtype=torch.uint8), 0
    for plane in planes:
        places = [plane.place(number) for number in range(count)]
        at, shifts = (torch.tensor(part) for part in zip(*places, strict=True))
        bits = (blocks[:, at] >> shifts.to(torch.uint8)) & ((1 << plane.bits) - 1)
        total |= bits << low
        low += plane.bits
    return total


def _factors(blocks: torch.Tensor, form: FileFormat) -> _Factors:
    match form.scales:
        case Halves(scale, None):
            return _Factors(_half(blocks, scale))
        case Halves(scale, int(minimum)):
            return _Factors(_half(blocks, scale), _half(blocks, minimum))
        case Whole(planes, step, zero):
            whole = numbers(blocks, planes, form.columns // form.block)
            return _Factors(whole.view(torch.int8) - zero, steps=_half(blocks, step))
        case Bytes(planes, dtype, places):
            stored = numbers(blocks, planes, form.columns // form.block).view(dtype)
            return _Factors(stored, steps=_steps(blocks, *places) if places else None)
        case _:
            return _head(blocks[:, :HEAD_BYTES])


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a place of each block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _head(head: torch.Tensor) -> _Factors:
    """Return the factors of a `Head`. Minimums are subtracted.

    It is a step of the scales and one of the minimums, and 12 bytes with 6 bits for each scale and
    minimum.
    """
    first, second, high = head[:, 4:8], head[:, 8:12], head[:, 12:16]
    scales = torch.cat((first & 63, (high & 15) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (high >> 4) | ((second >> 6) << 4)), dim=-1)
    return _Factors(scales.view(torch.int8), minimums.view(torch.int8), _steps(head, 0, 2))


def _steps(blocks: torch.Tensor, scale: int, minimum: int) -> torch.Tensor:
    """Return the steps of scales and of minimums, [n, 2]; minimums are subtracted."""
    return torch.cat((_half(blocks, scale), -_half(blocks, minimum)), dim=-1)
