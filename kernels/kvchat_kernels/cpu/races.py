"""Which of two forms of a kernel is faster: a race of both, once for each format.

Some processors take vectors of 512 bits at once, and some in two halves. No instruction tells
which, and a list of names is wrong for the next processor. So what a kernel does with many rows is
compiled in both forms when the kernel is first needed, both run over the same memory, and the
verdict is kept beside the object code.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from kvchat_kernels.cpu.code import Code, Kernel, file_name_of
from kvchat_kernels.cpu.object_cache import object_cache
from kvchat_kernels.cpu.step import NUM_HEADERS, set_num_rows
from kvchat_kernels.cpu.task import Task

# The race: a small product that stays in the second cache, several times, the fastest run counts.
NUM_OUT, NUM_IN, _NUM_ROWS = 64, 1024, 40
_NUM_RUNS = 9
# The second form is taken unless the first is so many times as fast: where both are alike, every
# race is to end alike, for wide vectors add up floats in another order.
_MARGIN = 1.1
_ROOM_BYTES = 1 << 19
_VERDICTS = {b"second": True, b"first": False}

Write = Callable[[Code, bool], None]
# The class of the kernel's tasks, and the fields of the race's that are whole numbers.
RaceTask = tuple[type[Task], dict[str, int]]


def is_second_faster(name: str, forms: tuple[object, ...], write: Write, task: RaceTask) -> bool:
    """Return whether the kernel that `write(code, is_second)` writes is faster in its second form.

    Raises what compiling raises.
    """
    file = file_name_of(f"race {name}", forms)
    verdict = _VERDICTS.get(object_cache().load(file) or b"")
    if verdict is None:
        verdict = _race(name, forms, write, task)
        word = next(word for word, is_second in _VERDICTS.items() if is_second is verdict)
        object_cache().save(file, word)
    return verdict


def _race(name: str, forms: tuple[object, ...], write: Write, task: RaceTask) -> bool:
    first, second = (_Runner(name, forms, write, task, is_second) for is_second in (False, True))
    runs = [(second.seconds(), first.seconds()) for _ in range(_NUM_RUNS)]
    second_s, first_s = (min(times) for times in zip(*runs, strict=True))
    return second_s < _MARGIN * first_s


class _Runner:
    """Runs one unit of a kernel over zeros: its time does not depend on the numbers."""

    def __init__(
        self, name: str, forms: tuple[object, ...], write: Write, task: RaceTask, is_second: bool
    ) -> None:
        kind, sizes = task
        rooms = {field: np.zeros(_ROOM_BYTES, np.uint8) for field in kind.names() - sizes.keys()}
        self._task = kind(**sizes, **rooms)
        self._kernel: Kernel[Any] = Kernel(
            name, kind, (*forms, is_second), lambda code: write(code, is_second)
        )
        self._header = np.zeros(NUM_HEADERS, np.int64)
        set_num_rows(self._header, _NUM_ROWS)

    @cached_property
    def _run(self) -> Callable[[int, int, int], None]:
        """The compiled function; the other form is being compiled by now too."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        return call(self._kernel.address)

    def seconds(self) -> float:
        run, addresses = self._run, (self._task.numbers.ctypes.data, self._header.ctypes.data)
        start_s = time.perf_counter()
        run(*addresses, 0)
        return time.perf_counter() - start_s
