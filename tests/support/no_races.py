"""Which of two forms of a compiled kernel the tests take: by its name.

A race compiles both forms of each format, and the rest of a run uses one. The verdict is kept
beside the tests' object code, so that their other processes take the same form.
"""

import zlib

from kvchat_kernels.cpu import races

RACE = races._race


def choose(name: str, forms: tuple[object, ...], *_: object) -> bool:
    """Return whether the second form is taken, as it is of half of the kernels."""
    return zlib.crc32(repr((name, forms)).encode()) % 2 == 0


def use() -> None:
    """Have this process, and its forks, race no kernels."""
    races._race = choose
