"""KvCode: how keys and values are stored in few bits, in groups of numbers with a scale.

A group is a part of one head of one token, so a token can be written and read without the tokens
beside it. That is what a slot needs, and why a scale for each channel is not possible here. Keys
have a few channels that are far larger than the others (KIVI, Liu et al. 2024). With one scale for
a whole head, such a channel would take the precision of the head's other numbers. With a scale for
32 it takes that of its group only, which is what llama.cpp's q8_0 does: perplexity 6.2344 against
6.2322 with 16 bits (llama.cpp#7412). Scales are bfloat16: they have the range of float32, and the
error of rounding them is in the numbers, which are divided by the rounded scale.

Within its group such a channel still takes the precision of 31 others. So keys are turned first: a
group is multiplied with a Hadamard matrix, which spreads every number over all (QuaRot, Ashkboos et
al. 2024). The matrix is its own inverse but for a factor, and a query turned likewise has the same
product with a turned key as both had before. Of Qwen2.5-Coder-0.5B in 8 bits that makes the loss of
perplexity 0.1 % instead of 1.8 %, and the KL to plain KV 0.0055 instead of 0.0185.

Values of 4 bits are turned for the same reason. A sum of turned values is the turned sum, so what
attention returns is turned back, once a row and head.

The scale of 8 bits makes the largest number of a group the largest level. With 16 levels that is
not the scale of the least error, so a few scales are tried: each gives levels, for these levels the
scale of the least squared error is known, and the best pair is taken. This is computed in whole
numbers, or in a single operation that every device rounds alike, so that all store the same bytes.

Floats of 8 bits (e4m3) keep 4 bits of every number, whatever is largest in its group; whole numbers
keep 8 of the largest. Keys and values have few numbers so small that floats are better for them:
of the same bytes `int8` is the better code for every model that was measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

# Numbers of a group, the largest that divides a head.
_GROUPS = (32, 16, 8)
# A group with smaller numbers is stored as zeros: its scale has too few bits.
LEAST = 1e-30
SCALE_BYTES = 2
# Added to a small float32, it leaves no place for what is behind the point.
_TO_WHOLE = 1.5 * 2**23
# 4 bits: the farthest number of a group in whole units, and the steps between levels that are
# tried. Steps are odd, so that no unit is in the middle of two levels. Sums are exact in float32.
UNITS = 1024
STEPS = range(103, 140, 12)


def group_size(dim: int) -> int:
    """Return how many numbers of a head of `dim` share a scale; all where no group divides it."""
    return next((size for size in _GROUPS if dim % size == 0), dim)


class Form(StrEnum):
    """What the numbers of a code are: whole numbers of 8 or 4 bits, or floats of 8."""

    INT8 = "int8"
    INT4 = "int4"
    E4M3 = "e4m3"


@dataclass(frozen=True, slots=True)
class NumberCode:
    """Numbers of few bits, times the scale of their group.

    8 bits   -127 to 127: a scale is the largest number of its group without its sign, over 127
    4 bits   -8 to 7, stored plus 8. A scale has the sign that makes the number farthest from zero a
             negative level, and the size of least error. The first half of a group is in the lower
             halves of its bytes, the second half in the upper ones
    e4m3     floats with 4 bits of exponent and 3 of mantissa, as bytes: the scale makes the largest
             of a group 448, the largest that there is
    turned   whether a group is multiplied with a Hadamard matrix before it is rounded; see `turns`
    """

    form: Form
    turned: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.form is Form.INT4 else 8

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.form is Form.INT8 else torch.uint8

    @property
    def most(self) -> float:
        """The largest number of 8 bits, which the largest of a group becomes."""
        return 448.0 if self.form is Form.E4M3 else 127.0

    def takes(self, dim: int) -> bool:
        """Whether heads of `dim` can be stored: a vector of 8 bytes is half a group of 4 bits."""
        return self.bits == 8 or dim % 16 == 0

    def turns(self, dim: int) -> bool:
        """Whether heads of `dim` are turned: only a group of a power of two has such a matrix."""
        return self.turned and dim % _GROUPS[-1] == 0

    def width(self, dim: int) -> int:
        """Return the bytes of the numbers of a head of `dim`."""
        return dim * self.bits // 8

    def num_bytes(self, dim: int) -> int:
        """Return the bytes of a head of `dim`, with its scales."""
        return self.width(dim) + dim // group_size(dim) * SCALE_BYTES

    def quantised(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return floats [..., dim] as numbers [..., width] and scales [..., dim / group] bfloat16.

        A group with a NaN or infinity gets a scale that is not finite, so that it is not read as
        right.
        """
        groups = values.float().unflatten(-1, (-1, group_size(values.shape[-1])))
        return self._rounded(turned(groups) if self.turns(values.shape[-1]) else groups)

    def changed(
        self,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers and scales of what `change` returns of their float32 [..., dim].

        Turned groups are turned back and again by a product of matrices: many times as fast as
        `turned`, but for the order in which it adds up.
        """
        whole = self.restored(numbers, scales)
        dim, size = whole.shape[-1], group_size(whole.shape[-1])
        if not self.turns(dim):
            return self.quantised(change(whole))
        matrix = turned(torch.eye(size, device=whole.device))
        plain = whole.unflatten(-1, (-1, size)) @ (matrix / size)
        return self._rounded(change(plain.flatten(-2)).unflatten(-1, (-1, size)) @ matrix)

    def _rounded(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 groups [..., n], turned already, as `quantised` does."""
        if self.form is Form.INT4:
            scales = _best_scales(groups).to(torch.bfloat16)
        else:
            scales = _scales_of_peaks(groups, self.most).to(torch.bfloat16)
        divisors = scales.float()[..., None]
        is_usable = (divisors != 0) & divisors.isfinite()
        levels = torch.where(is_usable, groups / divisors, 0.0)
        if self.form is Form.E4M3:
            floats = levels.clamp(-self.most, self.most).to(torch.float8_e4m3fn)
            return floats.view(torch.uint8).flatten(-2), scales
        levels = _whole(levels)
        if self.form is Form.INT8:
            return levels.clamp(-127, 127).to(torch.int8).flatten(-2), scales
        lower, upper = (levels.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, dim=-1)
        return (lower | upper << 4).flatten(-2), scales

    def restored(
        self, numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return numbers times their scales, in float32, or in `out`'s dtype and memory.

        `numbers` and `out` are contiguous. A turned group stays turned. Of float32 the result is
        exact, of bfloat16 it is rounded once.
        """
        if out is None:
            shape = (*numbers.shape[:-1], numbers.shape[-1] * 8 // self.bits)
            out = torch.empty(shape, dtype=torch.float32, device=numbers.device)
        groups = out.view(*scales.shape, -1)
        halves = numbers.view(*scales.shape, -1)
        if self.form is Form.E4M3:
            groups.copy_(halves.view(torch.float8_e4m3fn))
        elif self.form is Form.INT8:
            groups.copy_(halves)  # exact: 8 bits are fewer than a float's
        else:
            lower, upper = groups.chunk(2, dim=-1)
            lower.copy_(halves & 15)
            upper.copy_(halves >> 4)
            groups.sub_(8)
        groups.mul_(scales.to(out.dtype)[..., None])
        return out

    def plain(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return numbers times their scales in float32, as they were before they were turned."""
        whole = self.restored(numbers, scales)
        return turned_queries(whole) if self.turns(whole.shape[-1]) else whole


def _whole(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to even.

    `torch.round` takes a second thread for a few numbers, and waits for it.
    """
    return numbers + _TO_WHOLE - _TO_WHOLE


def _scales_of_peaks(groups: torch.Tensor, most: float) -> torch.Tensor:
    """Return the scales that make the largest number of each group `most`."""
    peaks = groups.abs().amax(dim=-1)
    return torch.where(peaks < LEAST, 0.0, peaks / most)


def _best_scales(groups: torch.Tensor) -> torch.Tensor:
    """Return the scales of 4 bits of groups [..., n], as [...] float32."""
    peaks = groups.abs().amax(dim=-1)
    units = peaks / UNITS
    is_usable = (peaks >= LEAST) & peaks.isfinite()
    signed = torch.where(groups.amax(dim=-1) == peaks, -units, units)
    numbers = torch.where(is_usable[..., None], _whole(groups / signed[..., None]), 0.0)
    best = torch.full_like(peaks, -1.0)
    scales = torch.zeros_like(peaks)
    for step in STEPS:
        levels = _whole(numbers * (1 / step)).clamp_(-8, 7)
        products = (numbers * levels).sum(dim=-1)
        squares = levels.square().sum(dim=-1)
        gains = products * products / squares  # the less error is left
        is_better = gains > best
        best = torch.where(is_better, gains, best)
        scales = torch.where(is_better, products / squares, scales)
    scales = torch.where(is_usable, scales * signed, peaks)
    return torch.where(peaks < LEAST, 0.0, scales)


def turned(groups: torch.Tensor) -> torch.Tensor:
    """Return groups [..., n] times the Hadamard matrix of order n, a power of two, in float32.

    In rounds of sums and differences, of the numbers 1, 2, 4, ... apart: the compiled kernels add
    in this order too, so that both store the same bytes.
    """
    size = groups.shape[-1]
    assert size & (size - 1) == 0, size
    step = 1
    while step < size:
        pairs = groups.unflatten(-1, (-1, 2, step))
        first, second = pairs.unbind(-2)
        groups = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return groups


def turned_queries(query: torch.Tensor) -> torch.Tensor:
    """Return queries [..., dim] whose products with turned keys are those with the keys; of turned
    numbers, the numbers before they were turned.
    """
    size = group_size(query.shape[-1])
    groups = turned(query.float().unflatten(-1, (-1, size)))
    return groups.mul(1 / size).flatten(-2).to(query.dtype)


@dataclass(frozen=True, slots=True)
class KvCode:
    """How the KV of a layer is stored. `name` is that of the setting, `stored_name` is part of the
    identity of stored KV: other bytes need another one.
    """

    name: str
    stored_name: str
    keys: NumberCode
    values: NumberCode

    def takes(self, key_dim: int, value_dim: int) -> bool:
        """Whether heads of these dims can be stored."""
        return self.keys.takes(key_dim) and self.values.takes(value_dim)

    def num_bytes(self, key_dim: int, value_dim: int) -> int:
        """Return the bytes of a key and a value of one head of one token."""
        return self.keys.num_bytes(key_dim) + self.values.num_bytes(value_dim)


_EIGHT = NumberCode(Form.INT8, turned=True)
INT8 = KvCode("int8", "int8, turned keys", _EIGHT, NumberCode(Form.INT8))
_FLOATS = NumberCode(Form.E4M3)
FP8 = KvCode("fp8", "e4m3, a bfloat16 scale for 32", _FLOATS, _FLOATS)
_FOUR = NumberCode(Form.INT4, turned=True)
K8V4 = KvCode("k8v4", "k8v4, turned, searched scales", _EIGHT, _FOUR)
INT4 = KvCode("int4", "int4, turned, searched scales", _FOUR, _FOUR)
CODES = {code.name: code for code in (INT8, FP8, K8V4, INT4)}
