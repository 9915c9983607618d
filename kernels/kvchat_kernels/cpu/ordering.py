"""Puts the numbers of each row in another order. Units: rows."""

from functools import cache

from kvchat_kernels.cpu.code import F32, I32, I64, Code, Kernel
from kvchat_kernels.cpu.task import Memory, Task


class OrderingTask(Task):
    """out[i] = x[source[i]] of each row, float32 [rows, width]; `source` is int32."""

    x: Memory
    source: Memory
    width: int
    out: Memory


@cache
def ordering_kernel() -> Kernel[OrderingTask]:
    return Kernel("ordering", OrderingTask, (), _write)


def _write(code: Code) -> None:
    order, width = code.task.source, code.task.width
    x, out = (rows + code.unit * width * 4 for rows in (code.task.x, code.task.out))
    with code.loop(0, width) as index:
        source = code.convert("sext", code.load(order, index * 4, I32), I64)
        code.store(code.load(x, source * 4, F32), out, index * 4)
