"""Page memory: fresh zeroed memory from the system, and read buffers that are reused.

The first write to a page costs a fault: for 48 MiB in 48 places 28 ms of an EPYC core where memory
is shared between processes, 19 ms where it is private. A large page is one fault for 2 MiB, and all
of them are zeroed: that pays where they are all written. So fresh memory costs several times what
reading as much from the page cache does (two cores of an EPYC, 4 MiB: 2.2 ms against 0.21 ms), and
buffers are used again.
"""

import mmap
from contextlib import suppress


def fresh_memory(num_bytes: int, *, is_for_all: bool) -> mmap.mmap:
    """Return `num_bytes` of zeros that take room only where written.

    `is_for_all` says that nearly all of them will be, and soon.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_for_all and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # not every kernel has large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_GRAIN_BYTES = 1 << 16
_PAGE_BYTES = 4096


class ReadBuffers:
    """Read buffers; a buffer is reused once no view of it exists any more.

    At most `max_kept` buffers are kept; further ones are used once. One thread calls `take`; any
    thread may drop a view.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of writable memory, which the caller owns while it holds a view."""
        for memory in self._kept:
            if len(memory) >= num_bytes and _is_free(memory):
                return memoryview(memory)[:num_bytes]
        memory = _fresh(num_bytes)
        self._keep(memory)
        return memoryview(memory)[:num_bytes]

    def warm(self, num_bytes: int, count: int) -> None:
        """Have `count` buffers of `num_bytes` ready, so that the first reads are as fast as later
        ones.
        """
        for _ in range(min(count, self._max_kept) - len(self._kept)):
            memory = _fresh(num_bytes)
            memory[::_PAGE_BYTES] = bytes(len(memory) // _PAGE_BYTES)
            self._keep(memory)

    def _keep(self, memory: mmap.mmap) -> None:
        """Keep a buffer, in place of a smaller one that is free where there are enough."""
        if len(self._kept) >= self._max_kept:
            smaller = [m for m in self._kept if len(m) < len(memory) and _is_free(m)]
            if not smaller:
                return
            self._kept.remove(smaller[0])
        self._kept.append(memory)


def _fresh(num_bytes: int) -> mmap.mmap:
    size = -(-max(num_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
    return fresh_memory(size, is_for_all=True)


def _is_free(memory: mmap.mmap) -> bool:
    """Whether no view of `memory` exists: only then does Python allow a resize.

    On systems without resize, such as macOS, this is false and no buffer is reused.
    """
    try:
        memory.resize(len(memory))
    except (BufferError, SystemError):
        return False
    return True
