"""The block formats of GGUF files as tables: where a stored block has its levels and its scales.

`gguf_blocks.py` reads them by torch, and `cpu/block_reading.py` by compiled code. Formats and their
names are ggml's (ggml-common.h).
"""

from dataclasses import dataclass

import torch

from kvchat_kernels.linear.blocks import COLUMNS

# Steps of scales and of minimums, and 6 bits for each scale and minimum of 8 blocks.
HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Plane:
    """Some bits of the numbers of a stored block, the same of each.

    Numbers lie in runs of bytes from `start` on: the first `run` numbers are in the lowest bits of
    the bytes of a run, the next in the bits above these.
    """

    bits: int
    start: int
    run: int

    def place(self, number: int) -> tuple[int, int]:
        """Return the byte that has a number's bits, and the lowest of them."""
        of_run = self.run * (8 // self.bits)
        run, at = divmod(number, of_run)
        return self.start + run * self.run + at % self.run, self.bits * (at // self.run)


@dataclass(frozen=True, slots=True)
class Whole:
    """Scales that are whole numbers, one for each block, and times a step of 16 bits.

    `zero` is subtracted from each; numbers of 8 bits are signed. `step` is where the step is.
    """

    planes: tuple[Plane, ...]
    step: int
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Halves:
    """Floats of 16 bits: where a block has its scale, and its minimum if it has one."""

    scale: int
    minimum: int | None = None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that are the scales of BlockWeights, of this type, and the places of their steps.

    The second step is that of minimums, which are subtracted.
    """

    planes: tuple[Plane, ...]
    dtype: torch.dtype
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The head of HEAD_BYTES that begins a block of 8 x 32 columns: scales and minimums."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A block of `columns` columns as a file stores it, and as BlockWeights has it.

    planes        of the levels, the lowest bits first; a level of 8 bits is signed
    zero, codes, unit  as of BlockWeights
    block         columns of a scale
    """

    name: str
    columns: int
    num_bytes: int
    planes: tuple[Plane, ...]
    scales: Whole | Halves | Bytes | Head
    zero: int = 0
    codes: tuple[int, ...] | None = None
    block: int = COLUMNS
    unit: float = 1.0

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)


# The levels of IQ4_NL and IQ4_XS, and those of 4-bit floats, doubled.
FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _half(start: int) -> tuple[Plane, ...]:
    """Two levels a byte: the first half of 32 columns in the low bits."""
    return (Plane(4, start, 16),)


FILE_FORMATS = {
    form.name: form
    for form in (
        FileFormat("Q8_0", 32, 34, (Plane(8, 2, 32),), Halves(0)),
        FileFormat("Q4_0", 32, 18, _half(2), Halves(0)),
        FileFormat("Q4_1", 32, 20, _half(4), Halves(0, 2)),
        FileFormat("Q5_0", 32, 22, (*_half(6), Plane(1, 2, 1)), Halves(0), zero=16),
        FileFormat("Q5_1", 32, 24, (*_half(8), Plane(1, 4, 1)), Halves(0, 2)),
        FileFormat("Q4_K", 256, 144, (Plane(4, 16, 32),), Head()),
        FileFormat("Q5_K", 256, 176, (Plane(4, 48, 32), Plane(1, 16, 32)), Head()),
        FileFormat(
            "Q6_K",
            256,
            210,
            (Plane(4, 0, 64), Plane(2, 128, 32)),
            Whole((Plane(8, 192, 16),), step=208),
            zero=32,
            block=16,
        ),
        FileFormat(
            "Q3_K",
            256,
            110,
            (Plane(2, 32, 32), Plane(1, 0, 32)),
            Whole((Plane(4, 96, 8), Plane(2, 104, 4)), step=108, zero=32),
            zero=4,
            block=16,
        ),
        FileFormat(
            "Q2_K",
            256,
            84,
            (Plane(2, 16, 32),),
            Bytes((Plane(8, 0, 16),), torch.uint8, steps=(80, 82)),
            block=16,
        ),
        FileFormat("TQ2_0", 256, 66, (Plane(2, 0, 32),), Halves(64), zero=1, block=256),
        FileFormat(
            "MXFP4",
            32,
            17,
            _half(1),
            Bytes((Plane(8, 0, 1),), torch.float8_e8m0fnu),
            codes=FLOATS,
            unit=0.5,
        ),
        # Of safetensors files, whose exponents are a tensor of their own.
        FileFormat(
            "MXFP4 by neighbours",
            32,
            17,
            (Plane(4, 1, 1),),
            Bytes((Plane(8, 0, 1),), torch.float8_e8m0fnu),
            codes=FLOATS,
            unit=0.5,
        ),
        FileFormat(
            "NVFP4",
            64,
            36,
            (Plane(4, 4, 8),),
            Bytes((Plane(8, 0, 4),), torch.float8_e4m3fn),
            codes=FLOATS,
            block=16,
            unit=0.5,
        ),
        # Of safetensors files, whose scales are a tensor of their own.
        FileFormat(
            "NVFP4 by neighbours",
            64,
            36,
            (Plane(4, 4, 1),),
            Bytes((Plane(8, 0, 4),), torch.float8_e4m3fn),
            codes=FLOATS,
            block=16,
            unit=0.5,
        ),
        FileFormat("IQ4_NL", 32, 18, _half(2), Halves(0), codes=UNEVEN),
        FileFormat(
            "IQ4_XS",
            256,
            136,
            (Plane(4, 8, 16),),
            Whole((Plane(4, 4, 1), Plane(2, 2, 1)), step=0, zero=32),
            codes=UNEVEN,
        ),
    )
}
