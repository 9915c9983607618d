"""PipeReader: reads what another program writes, and remembers the beginning and the end of it."""

import os
import threading
from contextlib import suppress


class PipeReader:
    """Reads a descriptor to its end, on a thread of its own. Owns the descriptor."""

    def __init__(self, descriptor: int, head_bytes: int, tail_bytes: int) -> None:
        self._descriptor = descriptor
        self._head_bytes = head_bytes
        self._tail_bytes = tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0
        self._reader = threading.Thread(target=self._read, name="kvchat-pipe", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while piece := os.read(self._descriptor, 1 << 16):
                room = self._head_bytes - len(self._head)
                self._head += piece[: max(0, room)]
                self._tail += piece[max(0, room) :]
                excess = max(0, len(self._tail) - self._tail_bytes)
                del self._tail[:excess]
                self._num_dropped += excess
        os.close(self._descriptor)

    def text(self, wait_s: float = 1.0) -> str:
        """Return what was read, after a wait for the end: a process in the background may write."""
        self._reader.join(wait_s)
        gap = f"\n[{self._num_dropped:,} bytes left out]\n" if self._num_dropped else ""
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        return head + gap + tail
