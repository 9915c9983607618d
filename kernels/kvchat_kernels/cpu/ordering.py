"""Puts the numbers of one row in another order. A unit is a run of columns."""

from enum import IntEnum
from functools import cache

from kvchat_kernels.cpu.code import F32, I32, I64, Code, Kernel

# Columns of a unit.
UNIT_COLUMNS = 2048


class Place(IntEnum):
    """The task: OUT[i] = X[FROM[i]], float32 [WIDTH]; FROM is int32."""

    X = 0
    FROM = 1
    WIDTH = 2
    OUT = 3


@cache
def ordering_kernel() -> Kernel:
    return Kernel("ordering", (), _write)


def _write(code: Code) -> None:
    x, order, out = (code.field(place) for place in (Place.X, Place.FROM, Place.OUT))
    start = code.unit * UNIT_COLUMNS
    with code.loop(start, code.least(start + UNIT_COLUMNS, code.field(Place.WIDTH))) as index:
        source = code.convert("sext", code.load(order, index * 4, I32), I64)
        code.store(code.load(x, source * 4, F32), out, index * 4)
