"""Puts the numbers of each row in another order. Units: rows."""

from enum import IntEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, I32, I64, Code, Kernel


class Place(IntEnum):
    """The task: OUT[i] = X[FROM[i]] of each row, float32 [rows, WIDTH]; FROM is int32."""

    X = 0
    FROM = 1
    WIDTH = 2
    OUT = 3


@cache
def ordering_kernel() -> Kernel:
    return Kernel("ordering", (), _write)


def _write(code: Code) -> None:
    order, width = code.field(Place.FROM), code.field(Place.WIDTH)
    x, out = (code.field(place) + code.unit * width * 4 for place in (Place.X, Place.OUT))
    with code.loop(0, width) as index:
        source = code.convert("sext", code.load(order, index * 4, I32), I64)
        code.store(code.load(x, source * 4, F32), out, index * 4)
