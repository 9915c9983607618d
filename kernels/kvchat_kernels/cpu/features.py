"""What a processor has beside single instructions: vectors of 512 bits, and tiles."""

import ctypes
import platform
import sys
from functools import cache

from kvchat_kernels.cpu.code import has_feature


def has_512_bits() -> bool:
    """Return whether the processor has vectors of 512 bits, with products of whole numbers."""
    return has_feature("avx512vnni") and has_feature("avx512vl")


@cache
def has_tiles() -> bool:
    """Return whether this process may use tiles of whole numbers. Asks the system to allow it."""
    if not (has_feature("amx-tile") and has_feature("amx-int8") and has_feature("avx512vl")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, ask, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0
