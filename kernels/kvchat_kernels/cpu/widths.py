"""Whether vectors of 512 bits are faster than those of 256: a race of both, once for each format.

Some processors take 512 bits at once, and some in two halves. No instruction tells which, and a
list of names is wrong for the next processor. So a kernel is compiled in both widths when it is
first needed, both run over the same memory, and the verdict is kept beside the object code.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvchat_kernels.cpu.code import Code, Kernel, digest_of, has_feature
from kvchat_kernels.cpu.object_cache import object_cache
from kvchat_kernels.cpu.step import NUM_HEADERS, Header

# The race: a small product that stays in the second cache, several times, the fastest run counts.
NUM_OUT, NUM_IN, _NUM_ROWS = 64, 1024, 24
_NUM_RUNS = 9
# Wide vectors are taken unless narrow ones are so many times as fast: where both are alike, every
# race is to end alike, for floats are added up in another order.
_MARGIN = 1.1
_ROOM_BYTES = 1 << 19
_NUM_PLACES = 24
_VERDICTS = {b"wide": True, b"narrow": False}

Write = Callable[[Code, bool], None]


@dataclass(frozen=True, slots=True)
class RaceTask:
    """The numbers of a race's task, by places; `addresses` are those of operands and results."""

    numbers: dict[IntEnum, int]
    addresses: tuple[IntEnum, ...]


def has_512_bits() -> bool:
    """Return whether the processor has vectors of 512 bits, with products of whole numbers."""
    return has_feature("avx512vnni") and has_feature("avx512vl")


def is_wide_faster(name: str, forms: tuple[object, ...], write: Write, task: RaceTask) -> bool:
    """Return whether the kernel that `write(code, is_wide)` writes is faster in 512 bits.

    False, without a race, where there is one width alone. Raises what compiling raises.
    """
    if not has_512_bits():
        return False
    file_name = f"width-{digest_of(name, forms)}"
    verdict = _VERDICTS.get(object_cache().load(file_name) or b"")
    if verdict is None:
        verdict = _race(name, forms, write, task)
        word = next(word for word, is_wide in _VERDICTS.items() if is_wide is verdict)
        object_cache().save(file_name, word)
    return verdict


def _race(name: str, forms: tuple[object, ...], write: Write, task: RaceTask) -> bool:
    narrow, wide = (_Runner(name, forms, write, task, is_wide) for is_wide in (False, True))
    runs = [(wide.seconds(), narrow.seconds()) for _ in range(_NUM_RUNS)]
    wide_s, narrow_s = (min(times) for times in zip(*runs, strict=True))
    return wide_s < _MARGIN * narrow_s


class _Runner:
    """Runs one unit of a kernel over zeros: its time does not depend on the numbers."""

    def __init__(
        self, name: str, forms: tuple[object, ...], write: Write, task: RaceTask, is_wide: bool
    ) -> None:
        self._kernel = Kernel(name, (*forms, is_wide), lambda code: write(code, is_wide))
        self._room = np.zeros((len(task.addresses), _ROOM_BYTES), np.uint8)
        self._task = np.zeros(_NUM_PLACES, np.int64)
        for place, number in task.numbers.items():
            self._task[place] = number
        for place, room in zip(task.addresses, self._room, strict=True):
            self._task[place] = room.ctypes.data
        self._header = np.zeros(NUM_HEADERS, np.int64)
        self._header[Header.NUM_ROWS] = _NUM_ROWS
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._run = call(self._kernel.address)

    def seconds(self) -> float:
        start_s = time.perf_counter()
        self._run(self._task.ctypes.data, self._header.ctypes.data, 0)
        return time.perf_counter() - start_s
